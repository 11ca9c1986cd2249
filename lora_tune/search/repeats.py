"""Which configuration is run again while the search goes on: the leader, until it has run three times.

One run leads by luck as much as by merit. A second and a third run of the leader were not picked for being fast, so
they say what it is worth, and how far runs scatter at all, which the cap and every interval rest on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from lora_tune.config.study import Study
from lora_tune.search.race_scale import scale_of
from lora_tune.search.scatter import scatter_of, settings
from lora_tune.store.records import StudyRecords, Trial, TrialState, Value

WHY = "the leader is run again: one run leads by luck as much as by merit"
"""Why such a trial is proposed."""

RUNS = 3
"""Runs of the leader, its first one included."""

FIRST = 5
"""Results before a leader is run again."""

SHARE = 0.25
"""Most of a sweep's trials that are repeats. Of 30 trials, regret with and without them: 1.4 and 1.5% at 5% noise, 3.2
and 2.8% at 10%, 5.8 and 5.1% at 20% (``benchmarks.statistics --part coverage``, 2026-11-26)."""

EARLY = 2
"""Repeats beyond the share of the trials so far, so that the first leader's come early."""


def wanted(study: Study, sweep: StudyRecords) -> Mapping[str, Value] | None:
    """The tuned values of the leader where it is to run again now; None where it has runs enough, the share is used,
    or runs differ by nothing that matters."""
    done = [t for t in sweep.reached() if t.tuned and not t.probe and t.metrics.objective is not None]
    planned = study.budget.trials or math.inf
    repeated = sum(t.why == WHY for t in sweep.trials.values())
    if len(done) < FIRST or repeated + 1 > min(SHARE * planned, EARLY + SHARE * len(sweep.trials)):
        return None
    if (leading := leader(study, sweep, done)) is None:
        return None
    key = settings(leading)
    runs = [t for t in sweep.trials.values() if settings(t) == key and _may_count(t)]
    return leading.tuned if len(runs) < RUNS else None


def leader(study: Study, sweep: StudyRecords, done: list[Trial]) -> Trial | None:
    """The trial of the lowest mean, each mean shrunk towards the level of all by how few runs it rests on.

    None where runs of one configuration have shown no scatter: a repeat would say the same again.
    """
    scale, noise = scale_of(study), scatter_of(study, sweep)
    runs: dict[object, list[tuple[float, Trial]]] = {}
    for trial in done:
        if (place := scale.inward(trial.objective)) is not None:
            runs.setdefault(settings(trial), []).append((place, trial))
    if not runs:
        return None
    every = [place for own in runs.values() for place, _ in own]
    repeated = [own for own in runs.values() if len(own) > 1]
    if repeated and all(abs(p - own[0][0]) < scale.least_sd(every) for own in repeated for p, _ in own):
        return None
    means = np.array([np.mean([place for place, _ in own]) for own in runs.values()])
    counts = np.array([len(own) for own in runs.values()])
    apart = max(float(means.var()) - noise.sd**2, 0.25 * noise.sd**2)
    level = float(np.median(means))
    shrunk = (means * counts / noise.sd**2 + level / apart) / (counts / noise.sd**2 + 1 / apart)
    return list(runs.values())[int(np.argmin(shrunk))][0][1]


def _may_count(trial: Trial) -> bool:
    """Whether a trial has ended with a word on its configuration, or may yet."""
    return trial.state is not TrialState.FINISHED or trial.verdict is not None
