"""``python -m benchmarks.score_agreement [FOLDER]``: our score of every public submission against mlperf_logging's.

FOLDER contains the public results (``logs/``, ``more_logs/``). For each submission the result summarizer computes the
olympic mean and the RCP checker the factor and the verdict, each in the ruleset of its round; all must be equal.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mlperf_logging.rcp_checker import rcp_checker
from mlperf_logging.result_summarizer import result_summarizer

from benchmarks.public_runs import folder as public_folder
from lora_tune.mlperf.rulesets import as_ruleset
from lora_tune.mlperf.submission import Submission, read_submission, result_folders


def official(submission: Submission) -> tuple[float | None, float, bool]:
    """Olympic minutes, factor and pass flag by the package's functions, called as by its command line.

    The RCP checker fails with an error on logs that form no submission; that counts as not passed.
    """
    with tempfile.TemporaryDirectory() as name:
        for path in submission.folder.glob("result_*.txt.gz"):
            (Path(name) / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        with contextlib.redirect_stdout(io.StringIO()):
            minutes = result_summarizer._compute_strong_score_standalone(
                submission.benchmark, "", False, name, "training", submission.ruleset
            )[0]
        try:
            passes, _, factor = rcp_checker.check_directory(
                name, "training", submission.ruleset, False, False, rcp_pass="pruned_rcps"
            )
        except (KeyError, TypeError, ValueError) as error:
            print(f"{submission.folder}: the RCP checker ends with {type(error).__name__}: {error}", flush=True)
            passes, factor = False, 1.0
    return minutes, float(factor), bool(passes)


def submissions(data: Path) -> Iterator[tuple[str, Path]]:
    """Every public submission with the ruleset of its round."""
    for room in ("logs", "more_logs"):
        for round_ in sorted((data / room).glob("v*")):
            yield from ((as_ruleset(round_.name), folder) for folder in result_folders(round_))


def main() -> int:
    """Compare all; return the number of submissions that differ."""
    logging.disable(logging.CRITICAL)
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else public_folder()
    same: Counter[tuple[str, str]] = Counter()
    differing = 0
    for ruleset, folder in submissions(data):
        ours = read_submission(folder, ruleset)
        theirs = official(ours)
        mine = (ours.olympic_minutes, ours.factor, ours.convergence.passes)
        if mine == theirs:
            same[ruleset, ours.benchmark or "-"] += 1
        else:
            differing += 1
            print(f"DIFFERS {folder}: ours {mine}, theirs {theirs}")
    for (ruleset, benchmark), count in sorted(same.items()):
        print(f"{ruleset}  {benchmark:20} {count:4} submissions equal")
    print(f"{sum(same.values())} equal, {differing} differ: olympic mean, factor and pass flag, to the last digit")
    return differing


if __name__ == "__main__":
    sys.exit(main() > 0)
