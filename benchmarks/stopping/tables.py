"""Whole runs by table: recorded trials, whole PEFT curves, and published MLPerf runs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.calibrate_curves import is_good
from benchmarks.public_runs import by_submission, load
from benchmarks.statistics import perturbed
from lora_tune.curves.comparison import ComparedRun, compared_run
from lora_tune.logs.run import Eval
from lora_tune.mlperf import convergence

ROOT = Path(__file__).resolve().parents[2]
RECORDED = {
    "lora_tiny": (ROOT / "lora_tune_simulation/tables/lora_tiny.npz", (1.60, 1.64, 1.68)),
    "lora_small": (ROOT / "lora_tune_simulation/tables/lora_small.npz", (1.08,)),
    "lora_warmup": (ROOT / "benchmarks/records/lora_warmup.npz", (1.06,)),
}
"""Tables of real trials with the targets that they are judged by: between a tenth and a half of the runs reach them."""
WHOLE_CURVES = ROOT / "benchmarks/statistics/tiny_curves.npz"


@dataclass(frozen=True)
class Table:
    """Runs that were never stopped. good: they reached ``target`` within their schedules."""

    name: str
    target: float
    good: Sequence[ComparedRun]
    bad: Sequence[ComparedRun]


def table(name: str, target: float, runs: Sequence[ComparedRun]) -> Table:
    """Runs told apart by whether they reached the target."""
    reached = [math.isfinite(run.stop(target)) for run in runs]
    return Table(
        name,
        target,
        [run for run, good in zip(runs, reached, strict=True) if good],
        [run for run, good in zip(runs, reached, strict=True) if not good],
    )


def recorded() -> list[Table]:
    """The 2,552 recorded trials and the 21 whole curves of the PEFT recipe."""
    found = [
        table(f"{n} {target:g}", target, _runs(path)) for n, (path, targets) in RECORDED.items() for target in targets
    ]
    return [*found, table("tiny PEFT 1.68", 1.68, _runs(WHOLE_CURVES))]


def _runs(path: Path) -> list[ComparedRun]:
    data = np.load(path)
    rows = zip(data["samples"], data["eval_loss"], data["MAX_STEPS"], data["batch"], strict=True)
    return [_recorded(*row) for row in rows]


def _recorded(samples: np.ndarray, loss: np.ndarray, steps: float, batch: float) -> ComparedRun:
    made = np.isfinite(samples) & (samples > 0)
    length = float(steps * batch)
    return whole(samples[made].astype(float), loss[made].astype(float), length, task=int(batch))


def whole(samples: np.ndarray, loss: np.ndarray, length: float, task: Hashable = ()) -> ComparedRun:
    """A run by its evals, finite or not."""
    evals = [Eval(float(s), float(v), math.nan) for s, v in zip(samples, loss, strict=True)]
    return compared_run(evals, length=length, task=task)


def published() -> Table:
    """Published runs at GBS 8 of good submissions; simulated ones that never get there, with the noise of real ones."""
    groups = [g for g in by_submission(load()).values() if g[0].gbs == 8 and is_good(g)]
    good = [_public(r.run.evals, float(r.max_steps * r.gbs)) for g in groups for r in g]
    family = convergence.published(8).family
    rest = [_residuals(run, family) for run in good]
    noise = np.concatenate(rest)
    noise = noise / noise.std()
    bad = [
        _public(run, perturbed.MAX_SAMPLES)
        for seed, shape in enumerate(perturbed.BAD.values())
        for run in perturbed.never_reach(perturbed.simulate(shape, noise, 60, seed))
    ]
    return Table("published, GBS 8", 0.925, [g for g in good if math.isfinite(g.stop(0.925))], bad)


def _public(evals: Sequence[tuple[float, float, float]], length: float) -> ComparedRun:
    rows = np.array([(e[0], e[1]) for e in evals], dtype=float).reshape(-1, 2)
    return whole(rows[:, 0], rows[:, 1], length)


def _residuals(run: ComparedRun, family: object) -> np.ndarray:
    samples, loss = run.curve
    rest = loss - family.loss_at(samples)  # type: ignore[attr-defined]
    return np.asarray((rest - np.median(rest))[:-1])
