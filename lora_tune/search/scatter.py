"""How far one run of a configuration lies from the next: the one noise of a sweep, with its own uncertainty.

It comes from repeats: runs of equal parameters. While there are few, what is usual for such results is believed beside
them. What differs between configurations has no part in it: fitted from configurations that ran once, a rough surface
is taken for noise, and noise for a rough surface.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lora_tune.base.text import counted
from lora_tune.config.study import Study
from lora_tune.search.race_scale import scale_of, seed_spread
from lora_tune.store.records import StudyRecords, Trial

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
    def words(self) -> str:
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
    """The scatter of this sweep's runs, by the repeats of its trials.

    A metric's own unit has no usual scatter: a third of how far results lie apart is the start there.
    """
    return sweep.once(("scatter", study.digest), lambda: _scatter_of(study, sweep))


def _scatter_of(study: Study, sweep: StudyRecords) -> Scatter:
    scale = scale_of(study)
    groups = [[at for v in values if (at := scale.inward(v)) is not None] for values in repeats_of(sweep).values()]
    squares, repeats = within(groups)
    if scale.relative:
        return pooled(seed_spread(study), width_of(study), squares, repeats)
    means = [float(np.mean(places)) for places in groups if places]
    apart = float(np.std(means)) if len(means) > 1 else 0.0
    least = scale.least_sd(means)
    return pooled(max(apart / 3, least), 1.5, squares, repeats)


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
