"""The chosen configuration's runs as a result folder of an MLPerf submission, and what MLPerf's checkers say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from lora_tune.base.errors import SetupError
from lora_tune.base.paths import near
from lora_tune.base.text import redact
from lora_tune.logs.mllog import MllogReader
from lora_tune.mlperf.benchmark import benchmark_names
from lora_tune.mlperf.submission import passes, read_submission, sentences
from lora_tune.workloads.base import Job


@dataclass(frozen=True, slots=True)
class CheckerResult:
    """What MLPerf's own checkers say: ``applies`` False where the logs are of something else, then nothing was run."""

    applies: bool
    passes: bool
    sentences: tuple[str, ...]


def run_text(job: Job, position: int) -> str:
    """What the log says of run ``position`` (0 is the first) of a job, without secrets.

    Raises SetupError where the log is gone.
    """
    own = job.run_logs[position] if position < len(job.run_logs) else None
    path = own if own is not None and own.is_file() else job.log
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SetupError(
            f"{path}: {error.strerror}: the result files are made of the logs; restore it, or start "
            "the confirmation anew with another --output"
        ) from error
    return redact(text if path is own else split_runs(text)[position])


def split_runs(text: str) -> list[str]:
    """A job's log, cut where a new run begins: at the first ``init_start`` or ``run_start`` behind a ``run_stop``."""
    parts: list[list[str]] = [[]]
    over = False
    for line in text.splitlines(keepends=True):
        if over and ('"init_start"' in line or '"run_start"' in line):
            parts.append([])
            over = False
        parts[-1].append(line)
        over = over or '"run_stop"' in line
    return ["".join(part) for part in parts]


def write_results(folder: Path, texts: Sequence[str]) -> list[Path]:
    """``result_0.txt`` and so on in ``folder``, replacing what was there."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("result_*.txt"):
        old.unlink()
    written = [folder / f"result_{i}.txt" for i in range(len(texts))]
    for path, text in zip(written, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return written


def check(folder: Path, ruleset: str | None = None) -> CheckerResult:
    """Run MLPerf's compliance and RCP checkers on a result folder, where they apply.

    ruleset: of the study; None: the newest that has the logs' benchmark.
    """
    named = {_benchmark(path) for path in folder.glob("result_*.txt")}
    if len(named) != 1 or not named <= set(benchmark_names()):
        shown = ", ".join(sorted(name or "none" for name in named))
        reason = (
            f"MLPerf's compliance and RCP checks do not apply: the logs name the benchmark {shown}, none of MLPerf's"
        )
        return CheckerResult(False, False, (reason,))
    submission = read_submission(folder, ruleset)
    return CheckerResult(True, passes(submission), tuple(sentences(submission)))


def _benchmark(path: Path) -> str:
    reader = MllogReader()
    reader.feed(path.read_bytes())
    named = (run.hyperparameters.get("submission_benchmark") for run in reader.runs())
    return next((str(name) for name in named if name), "")


def say_checks(checks: CheckerResult | None, folder: Path | None) -> None:
    """Print what the checkers said of the result files in ``folder``; nothing where they were not asked."""
    if checks is None or folder is None:
        return
    for sentence in checks.sentences:
        click.echo(f"checks   {sentence}")
    click.echo(f"results  {near(folder)}/result_*.txt")
