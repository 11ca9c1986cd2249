"""``python -m benchmarks.public_packages [FOLDER] [--every N]``: repackage public submissions from their logs.

FOLDER contains the public results (``logs/``, ``more_logs/``). For each submission ``lora-tune package`` makes a tree,
with a system description from the logs and "not stated" for the rest, which MLPerf's package and repository checkers
check in the ruleset of its round. Submissions with incomplete logs are skipped. Prints how many are accepted, the
errors of the others, and how many LoRA scores differ from the published table's (``submissions*.csv``) by more than 0.1
s; then a table of every difference between package and original by kind, with its explanation. The public data here are
only logs: originals of descriptions and code are not available.
"""

from __future__ import annotations

import csv
import gzip
import json
import tempfile
from collections import Counter
from pathlib import Path

import click
from click.testing import CliRunner

from benchmarks.public_runs import folder as public_folder
from benchmarks.score_agreement import submissions
from lora_tune.base.errors import InputError
from lora_tune.cli.package import _announced
from lora_tune.mlperf.benchmark import benchmark_names
from lora_tune.mlperf.package import described_by_logs, folder_of, template
from lora_tune.mlperf.submission import read_submission, result_files
from lora_tune.package import main as package

SECONDS = 0.1


def packaged(ruleset: str, folder: Path, scratch: Path, runs: int) -> tuple[bool, list[str], Counter[str]]:
    """Whether the checkers accept the package of a submission, their errors, and its differences by kind."""
    (scratch / "code").mkdir()
    (scratch / "code" / "README.md").write_text("made again from logs\n")
    try:
        announced = _announced(folder, ruleset)
    except InputError as error:
        return False, [str(error)], Counter({"a checker's refusal": 1})
    known = described_by_logs(announced)
    system = scratch / "system.json"
    filled = {name: value or "not stated" for name, value in template(known).items()}
    system.write_text(json.dumps(filled))
    words = [folder, "--system", system, "--code", scratch / "code", "--out", scratch / "out", "--ruleset", ruleset]
    done = CliRunner().invoke(package, list(map(str, words)), catch_exceptions=False)
    marks = ("ERROR", "lora-tune:", ": ended with", "lora_tune:")
    errors = [line.strip() for line in done.output.splitlines() if any(mark in line for mark in marks)]
    apart = differences(folder, scratch / "out", announced, runs)
    apart["a checker's refusal"] = int(done.exit_code != 0)
    return done.exit_code == 0, errors or [done.output[-160:]] * (done.exit_code != 0), apart


KINDS = {
    "a log's bytes": "none is allowed: a result is what its log says",
    "a log's number": "results are result_0.txt, result_1.txt and so on; the original numbers from 1, or has a gap",
    "a log beyond the count": "the first by number count, whose order was fixed before the runs",
    "the submitter's folder": "the log says submission_org otherwise than the original's folder, blanks apart",
    "the system's name": "the log says submission_platform otherwise than the original's folder, or says two",
    "a field of the description": "no log says it: the submitter fills it in",
    "code and configs": "not in the public data here: a note stands in their place",
    "minutes of the table": "a run did not end, and the table drops the slowest other one, too",
    "a checker's refusal": "see REFUSED",
}
"""Possible differences between a regenerated package and its original -> why."""


def differences(original: Path, package: Path, announced: dict[str, object], runs: int) -> Counter[str]:
    """Number of differences of each kind between a submission's public logs and its package."""
    logs = result_files(original)
    made = sorted(package.glob("*/results/*/*/result_*.txt"), key=lambda path: int(path.stem.removeprefix("result_")))
    known, (submitter, system) = described_by_logs(announced), _names(original)
    pairs = list(zip(logs, made, strict=False))
    return +Counter({
        "a log's bytes": sum(gzip.decompress(log.read_bytes()) != copy.read_bytes() for log, copy in pairs),
        "a log's number": sum(log.name.removesuffix(".gz") != copy.name for log, copy in pairs),
        "a log beyond the count": max(0, len(logs) - runs),
        "the submitter's folder": int(folder_of(known["submitter"]) != submitter),
        "the system's name": int(known["system_name"] != system),
        "a field of the description": sum(not value for value in template(known).values()),
        "code and configs": 1,
    })  # fmt: skip


def _names(original: Path) -> tuple[str, str]:
    """Submitter and system by the original's folders: SUBMITTER/SYSTEM, with BENCHMARK below in more_logs."""
    place = original.parent if original.name in benchmark_names() else original
    return place.parent.name, place.name


def table(data: Path) -> dict[tuple[str, str, str], float]:
    """Published olympic minutes by round, submitter and system."""
    rows = [row for file in sorted(data.glob("submissions*.csv")) for row in csv.DictReader(file.open())]
    return {(row["round"], row["submitter"], row["system"]): float(row["time_min"]) for row in rows if row["time_min"]}


@click.command()
@click.argument("data", type=click.Path(path_type=Path, exists=True), required=False)
@click.option("--every", default=1, show_default=True, help="every so many-th submission")
def main(data: Path | None, every: int) -> None:
    """Package them all and count."""
    data = data or public_folder()
    accepted, against, apart, compared = Counter[str](), Counter[str](), 0, 0
    differing, packages = Counter[str](), Counter[str]()
    published = table(data)
    for ruleset, folder in list(submissions(data))[::every]:
        submission = read_submission(folder, ruleset)
        if len(submission.files) < (submission.runs or 0):
            accepted[f"{ruleset} not whole here"] += 1
            continue
        with tempfile.TemporaryDirectory() as scratch:
            accepts, errors, kinds = packaged(ruleset, folder, Path(scratch), submission.runs or 0)
        accepted[f"{ruleset} {'accepted' if accepts else 'refused'}"] += 1
        for error in errors:
            against[error[:160]] += 1
        parts = folder.relative_to(data).parts
        score = submission.olympic_minutes
        known = published.get((parts[1], *parts[2:4])) if len(parts) == 4 else None  # the tables are of LoRA only
        if known is not None and score is not None:
            compared += 1
            if abs(known - score) * 60 > SECONDS:
                apart += 1
                kinds["minutes of the table"] = 1
                click.echo(f"{folder.relative_to(data)}: the table says {known} min, the rule {score:.3f} min")
        for kind, count in (+kinds).items():
            differing[kind] += count
            packages[kind] += 1
        if not accepts:
            click.echo(f"REFUSED {folder.relative_to(data)}: {errors[:1]}")
    for name, count in sorted(accepted.items()):
        click.echo(f"{name:20} {count}")
    for error, count in against.most_common(12):
        click.echo(f"{count:4} {error}")
    click.echo(f"\n| difference to the original | how many | packages | explanation |\n|{'---|' * 4}")
    for kind, why in KINDS.items():
        click.echo(f"| {kind} | {differing[kind]} | {packages[kind]} | {why} |")
    click.echo(f"scores compared with the table: {compared}, more than {SECONDS} s apart: {apart}")


if __name__ == "__main__":
    main()
