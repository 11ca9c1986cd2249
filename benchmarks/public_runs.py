"""The public MLPerf llama2_70b_lora runs as this project's types, and their split into calibration and test."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lora_tune.logs.run import Eval, RunLog

TARGET = 0.925


@dataclass(frozen=True, slots=True)
class PublicRun:
    """One published run. submission: ``round/submitter/system``; minutes: from ``run_start`` to ``run_stop``."""

    submission: str
    gbs: int
    learning_rate: float
    max_steps: int
    minutes: float
    run: RunLog

    @property
    def stop(self) -> float:
        """Samples at the eval that reached the target; every published run did."""
        return self.run.evals[-1].samples


def folder() -> Path:
    """Folder of the public results: ``LORA_TUNE_MLPERF``, or ``../shared/mlperf`` next to the repository."""
    default = Path(__file__).resolve().parents[2] / "shared" / "mlperf"
    return Path(os.environ.get("LORA_TUNE_MLPERF", default))


def load(path: Path | None = None) -> list[PublicRun]:
    """All runs of ``runs.jsonl.gz`` (v4.0 to v5.0) and ``runs_v5.1.jsonl.gz``, in file order."""
    found = []
    for name in ("runs.jsonl.gz", "runs_v5.1.jsonl.gz"):
        with gzip.open((path or folder()) / name, "rt") as lines:
            found += [_public_run(json.loads(line)) for line in lines]
    return found


def is_test(submission: str) -> bool:
    """Whether a submission belongs to the test half: the parity of the SHA-256 of its name."""
    return int(hashlib.sha256(submission.encode()).hexdigest(), 16) % 2 == 1


def fold(submission: str, folds: int) -> int:
    """The fold of a submission in a cross-validation, from the same hash."""
    return int(hashlib.sha256(submission.encode()).hexdigest(), 16) // 2 % folds


def by_submission(runs: Iterable[PublicRun]) -> dict[str, list[PublicRun]]:
    """Runs grouped by submission."""
    groups: dict[str, list[PublicRun]] = defaultdict(list)
    for run in runs:
        groups[run.submission].append(run)
    return dict(groups)


def _public_run(row: dict) -> PublicRun:
    parts = row["path"].split("/")
    speeds = [row["first_block_samples_per_second"], *(row["samples_per_second_by_block"] or [])]
    return PublicRun(
        submission="/".join((parts[0], parts[1], parts[3])),
        gbs=row["gbs"],
        learning_rate=row["lr"],
        max_steps=row["max_steps"],
        minutes=row["minutes"],
        run=RunLog(
            evals=tuple(Eval(*e) for e in row["evals_samples_loss_seconds"]),
            throughput=tuple(s for s in speeds if s),
            eval_seconds=tuple(row["eval_seconds"] or ()),
        ),
    )
