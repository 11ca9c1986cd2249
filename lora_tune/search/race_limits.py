"""Group-sequential limits: how far apart two configurations must lie at a look, when there are many looks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

PRIOR_FREEDOM = 4
"""Degrees of freedom of the spread between seeds, which the prior makes up while the runs have fewer. From three runs
of two configurations on it counts no more: a prior of 5% let 18% of equal pairs be separated where it was 10%."""

PATHS = 40_000
"""Simulated races behind a limit."""


@dataclass(frozen=True, slots=True)
class LimitShape:
    """Limits that fall with the number of pairs of runs, and stay from ``pairs`` on.

    flatness: Delta of the Wang-Tsiatis family: 0.5 is Pocock's, 0 O'Brien and Fleming's (Wang and Tsiatis 1987).
    """

    pairs: float
    flatness: float

    def at(self, pairs: float) -> float:
        """The limit after so many pairs, relative to the lowest."""
        return math.pow(min(1.0, pairs / self.pairs), self.flatness - 0.5)


@cache
def limit_constant(
    level: float, fewest: int, most: int, shape: LimitShape, prior_freedom: int = PRIOR_FREEDOM
) -> float:
    """c such that equal configurations cross ``+-c * (n / most)^(FLATNESS - 1/2)`` at some look with chance ``level``.

    Student's statistics, with the spread that the runs show by then and taken to normal quantiles, are looked at after
    every run, alternately of the one and the other, from ``fewest`` to ``most`` of both; n is the harmonic mean of
    their numbers. Limits of Wang and Tsiatis (1987); the constant by simulation of ``PATHS`` races with a fixed seed
    (standard error about 0.02). prior_freedom: degrees of freedom of a spread that is known beforehand.
    """
    from scipy.special import ndtri, stdtr

    rng = np.random.default_rng(20261121)
    runs = rng.standard_normal((2, most, PATHS))
    sums, powers = np.cumsum(runs, axis=1), np.cumsum(runs**2, axis=1)
    counts, worst = [fewest, fewest], np.zeros(PATHS)
    while True:
        means = [sums[side, count - 1] / count for side, count in enumerate(counts)]
        squares = sum(powers[i, n - 1] - n * mean**2 for i, (n, mean) in enumerate(zip(counts, means, strict=True)))
        freedom = sum(counts) - 2
        missing = max(0, prior_freedom - freedom)
        sd = np.sqrt((squares + missing) / (freedom + missing))
        lead = np.abs(means[0] - means[1]) / (sd * math.sqrt(1 / counts[0] + 1 / counts[1]))
        far = lead > 1  # nearer ones are no quantile of the worst
        z = -ndtri(np.maximum(stdtr(freedom + missing, -lead[far]), 1e-300))
        pairs = 2 / (1 / counts[0] + 1 / counts[1])
        worst[far] = np.maximum(worst[far], z / shape.at(pairs))
        if counts[1] >= most:
            return float(np.quantile(worst, 1 - level))
        counts[0 if counts[0] == counts[1] else 1] += 1
