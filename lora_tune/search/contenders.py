"""The configurations of a race, with the runs that they have had and the spread between seeds that they share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lora_tune.search.race_scale import TIMES, RaceScale


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run of a configuration: what it is compared by (infinite when it has no result) and its node-hours."""

    result: float
    node_hours: float = 0.0


@dataclass(frozen=True, slots=True)
class Contender:
    """A configuration: its runs that have a result, on their scale, how many have none, its node-hours a run."""

    name: str
    places: tuple[float, ...]
    failures: int
    node_hours: float

    @property
    def runs(self) -> int:
        return len(self.places) + self.failures

    @property
    def mean(self) -> float:
        return float(np.mean(self.places)) if self.places else math.inf


def pooled_sd(configs: Sequence[Contender], scale: RaceScale) -> tuple[float, float]:
    """Sd within configurations and its degrees of freedom; the scale's prior fills in for missing ones.

    Where neither says anything, the spread is taken to be as large as the results lie apart.
    """
    every = [place for c in configs for place in c.places]
    own = sum(max(0, len(c.places) - 1) for c in configs)
    missing, least = max(0, scale.prior_freedom - own), scale.least_sd(every)
    if not missing + own:
        return max(float(np.ptp([*every, 0.0])), least), 1.0
    within = sum(float(((np.array(c.places) - c.mean) ** 2).sum()) for c in configs if c.places)
    return max(math.sqrt((missing * scale.prior_sd**2 + within) / (missing + own)), least), float(missing + own)


def means(
    results: Mapping[str, Sequence[RunSummary]], scale: RaceScale = TIMES
) -> dict[str, tuple[float, float, float]]:
    """Arithmetic mean of each configuration that has results, with its 90% interval, low and high.

    Student's interval on the scale, with the spread between seeds that all configurations share; of logarithms moved by
    as much as the mean of the results lies above that of their logarithms.
    """
    from scipy.special import stdtrit

    configs = [contender(name, runs, scale) for name, runs in results.items()]
    sd, freedom = pooled_sd(configs, scale)
    width = float(stdtrit(freedom, 0.95)) * sd
    return {c.name: _mean(c, width / math.sqrt(len(c.places)), scale) for c in configs if c.places}


def _mean(config: Contender, half: float, scale: RaceScale) -> tuple[float, float, float]:
    middle, low, high = scale.interval(config.mean, half)
    results = [scale.outward(place) for place in config.places]
    mean = math.fsum(results) / len(results)
    moved = mean / middle if scale.relative else 1.0
    return mean, moved * low, moved * high


def contender(name: str, runs: Sequence[RunSummary], scale: RaceScale) -> Contender:
    """A configuration with its runs on a scale."""
    places = tuple(place for r in runs if (place := scale.inward(r.result)) is not None)
    hours = [r.node_hours for r in runs if math.isfinite(r.node_hours)]
    return Contender(name, places, len(runs) - len(places), float(np.mean(hours)) if hours else 0.0)


def pairs_of(leader: Contender, rival: Contender) -> float:
    """Pairs of runs that are worth as much as these unequal numbers: their harmonic mean."""
    return 2 / (1 / len(leader.places) + 1 / len(rival.places))
