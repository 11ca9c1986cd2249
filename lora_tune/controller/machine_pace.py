"""How fast the machine is now beside what it was: trials that do the same work a step compared at the same progress."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from lora_tune.config.study import Study
from lora_tune.logs.run import Eval, RunLog, TrainPoint
from lora_tune.search.grey_box.features import RATE, STEPS, WARMUP
from lora_tune.store.records import StudyRecords, Trial

SAME_WORK = frozenset({*RATE, *STEPS, *WARMUP, "MIN_LR", "WARMUP_RATIO", "WEIGHT_DECAY", "SEED"})
"""Parameters that leave a training step as it is, by name in capitals; any other may change what a step costs."""

BLIND = 10.0
"""Times its limit that a run may take before its first eval or train loss, where others do the same work a step."""


def slowdown(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> float:
    """Seconds of the run over those of the fastest trial that does the same work a step, for the same progress.

    At least 1, and 1 where no other trial does the same work. A run that shows no progress yet has ``BLIND``.
    """
    others = [evals for other in alike(study, sweep, trial) if (evals := timed(sweep.last_evals(other.number)))]
    if not others:
        return 1.0
    points = timed([*run.evals, *run.train])
    if not points:
        return BLIND
    samples, seconds = max(points)
    fastest = min(seconds_at(samples, evals) for evals in others)
    return max(1.0, seconds / fastest) if fastest > 0 else 1.0


def alike(study: Study, sweep: StudyRecords, trial: Trial) -> Sequence[Trial]:
    """Other trials of the sweep that do the same work a step: all that may change it is equal. No probes.

    None for a run that only its log tells of (``replay``): a log does not state all that its program was given.
    """
    if not trial.tuned:
        return []
    work = _work(study, trial)
    return [t for t in sweep.trials.values() if t.number != trial.number and not t.probe and _work(study, t) == work]


def _work(study: Study, trial: Trial) -> frozenset[tuple[str, str]]:
    roles = study.search_space.roles()
    return frozenset(
        (name, str(value))
        for name, value in trial.parameters.items()
        if name.upper() not in SAME_WORK and roles.get(name) != "convergence"
    )


def timed(points: Iterable[Eval | TrainPoint]) -> list[tuple[float, float]]:
    """(samples, seconds) of those points that say both."""
    pairs = ((p.samples, p.seconds) for p in points)
    return [(n, s) for n, s in pairs if 0 < n < math.inf and 0 < s < math.inf]


def seconds_at(samples: float, points: Sequence[tuple[float, float]]) -> float:
    """When a run with these (samples, seconds) had come to ``samples``; beyond its end at its mean pace."""
    ordered = [(0.0, 0.0), *sorted(points)]
    last_samples, last_seconds = ordered[-1]
    if samples > last_samples:
        return last_seconds * samples / last_samples
    return float(np.interp(samples, [n for n, _ in ordered], [s for _, s in ordered]))
