"""How far one run of a configuration lies from the next: the one noise of a sweep, with its own uncertainty, and when
the leader is run again to know it.

It comes from repeats: runs of equal parameters. While there are few, what is usual for such results is believed beside
them. What differs between configurations has no part in it: fitted from configurations that ran once, a rough surface
is taken for noise, and noise for a rough surface.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lora_tune.base.text import counted
from lora_tune.config.study import Study
from lora_tune.search.race_scale import RaceScale, scale_of, seed_spread
from lora_tune.store.records import StudyRecords, Trial, TrialState, Value

KNOWN_WIDTH, UNKNOWN_WIDTH = 0.35, 0.9
"""Sd of ln(scatter) before a sweep has repeats: where it was read from public runs of the same workload, which is worth
four repeats, and where a script may be far quieter or louder than those, which is worth less than one."""

POINTS = 41
"""Of the grid of ln(scatter), over four standard deviations on each side."""


@dataclass(frozen=True, slots=True)
class Scatter:
    """sd: of single runs of one configuration, in ln(result), or in the metric's own unit where results have no
    logarithm. freedom: degrees of freedom that it is known with. repeats: those of them that are repeats here."""

    sd: float
    freedom: float
    repeats: int = 0

    @property
    def sentence(self) -> str:
        """For people, of logarithms."""
        base = counted(self.repeats, "repeats") if self.repeats else "usual for such runs, no repeat yet"
        return f"runs of one configuration differ by about {100 * self.sd:.2g}% ({base})"


def pooled(usual: float, width: float, squares: float, repeats: int) -> Scatter:
    """What repeats say beside what is usual.

    usual, width: median of the scatter before them, and the sd of its logarithm. squares: of the runs about the means
    of their configurations. repeats: degrees of freedom of these. The posterior of ln(scatter) on a grid; its mean and
    variance are those of a Student scale of ``1 / (2 variance)`` degrees of freedom.
    """
    logs = math.log(usual) + width * np.linspace(-5, 5, POINTS)
    density = -0.5 * ((logs - math.log(usual)) / width) ** 2 - repeats * logs - 0.5 * squares * np.exp(-2 * logs)
    weights = np.exp(density - density.max())
    weights /= weights.sum()
    mean = float(weights @ logs)
    variance = float(weights @ (logs - mean) ** 2)
    return Scatter(math.exp(mean), max(1.0, 1 / (2 * variance)), repeats)


def within(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Squares of places about the means of their groups, and their degrees of freedom."""
    squares, freedom = 0.0, 0
    for places in groups:
        if len(places) > 1:
            squares += float(((np.asarray(places) - np.mean(places)) ** 2).sum())
            freedom += len(places) - 1
    return squares, freedom


def width_of(study: Study) -> float:
    """Sd of ln(scatter) before the sweep has repeats."""
    return KNOWN_WIDTH if study.objective.curves == "llama2_70b_lora" else UNKNOWN_WIDTH


def scatter_of(study: Study, sweep: StudyRecords) -> Scatter:
    """The scatter of this sweep's runs, by the repeats of its trials."""
    return sweep.once(("scatter", study.digest), lambda: _scatter_of(study, sweep))


def _scatter_of(study: Study, sweep: StudyRecords) -> Scatter:
    scale = scale_of(study)
    groups = [[at for v in values if (at := scale.inward(v)) is not None] for values in repeats_of(sweep).values()]
    squares, repeats = within(groups)
    return pooled(*usual(study, scale, [float(np.mean(places)) for places in groups if places]), squares, repeats)


def usual(study: Study, scale: RaceScale, means: Sequence[float]) -> tuple[float, float]:
    """The scatter before there are repeats, and the sd of its logarithm. means: of configurations, on the scale.

    A metric's own unit has no usual scatter: a third of how far results lie apart is the start there.
    """
    if scale.prior_sd:
        return seed_spread(study), width_of(study)
    return max(float(np.std(means)) / 3 if means else 0.0, scale.least_sd(means)), 1.5


def settings(trial: Trial) -> object:
    """What runs of one configuration have in common."""
    return tuple(sorted((name, str(value)) for name, value in trial.parameters.items()))


def repeats_of(sweep: StudyRecords) -> dict[object, list[float]]:
    """Results of the trials that have one, by their configuration."""
    return sweep.once("results by configuration", lambda: _repeats_of(sweep))


def _repeats_of(sweep: StudyRecords) -> dict[object, list[float]]:
    runs: dict[object, list[float]] = {}
    for trial in sweep.reached():
        if trial.metrics.objective is not None:
            runs.setdefault(settings(trial), []).append(trial.metrics.objective)
    return runs


# The leader is run again while the search goes on, until it has run three times. One run leads by luck as much as by
# merit; a second and a third were not picked for being fast, so they say what it is worth, and how far runs scatter.


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


def next_repeat(study: Study, sweep: StudyRecords) -> Mapping[str, Value] | None:
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
    every = [place for of_run in runs.values() for place, _ in of_run]
    repeated = [of_run for of_run in runs.values() if len(of_run) > 1]
    if repeated and all(abs(p - of_run[0][0]) < scale.least_sd(every) for of_run in repeated for p, _ in of_run):
        return None
    means = np.array([np.mean([place for place, _ in of_run]) for of_run in runs.values()])
    counts = np.array([len(of_run) for of_run in runs.values()])
    apart = max(float(means.var()) - noise.sd**2, 0.25 * noise.sd**2)
    level = float(np.median(means))
    shrunk = (means * counts / noise.sd**2 + level / apart) / (counts / noise.sd**2 + 1 / apart)
    return list(runs.values())[int(np.argmin(shrunk))][0][1]


def _may_count(trial: Trial) -> bool:
    """Whether a trial has ended with a word on its configuration, or may yet."""
    return trial.state is not TrialState.FINISHED or trial.verdict is not None
