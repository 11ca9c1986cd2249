"""Evidence that one sample of runs has the smaller mean, valid at every look: a sequential t-test by e-values.

Model: runs of one arm scatter about its mean as a normal distribution, with the same unknown spread for both arms. A
difference is measured in spreads (an effect). Without a difference, the likelihood ratio of Student's statistic under
an effect d against none is a martingale (Lai 1976, "On confidence sequences", section 4; as an e-value Grünwald, de
Heide and Koolen 2024, "Safe testing", section 4), so the probability that it ever exceeds 1/a is at most a (Ville's
inequality). So is a mixture over effects. The choice of the next arm may depend on earlier comparisons.

Pure functions of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

EFFECTS = {0.5: 1 / 8, 1.0: 1 / 4, 2.0: 1 / 2, 4.0: 1 / 8}
"""Effects of the mixture, in spreads between seeds -> weights: most for effects that are useful and still need more
than one run to detect."""

FEWEST_FREEDOM = 2
"""Fewest degrees of freedom of the spread for a comparison of two samples."""


@dataclass(frozen=True, slots=True)
class TwoSamples:
    """Comparison of the means of two samples. difference: second minus first, positive if the first is smaller.
    spread: of single runs, pooled. pairs: effective size, ``1 / (1/n + 1/m)``."""

    difference: float
    spread: float
    pairs: float
    freedom: int

    @property
    def statistic(self) -> float:
        """Student's t; infinite if runs do not scatter at all."""
        if self.spread == 0:
            return math.copysign(math.inf, self.difference) if self.difference else 0.0
        return self.difference * math.sqrt(self.pairs) / self.spread


def two_samples(arm: Sequence[float], baseline: Sequence[float]) -> TwoSamples | None:
    """The comparison of two samples; None for too few runs."""
    freedom = len(arm) + len(baseline) - 2
    if not arm or not baseline or freedom < FEWEST_FREEDOM:
        return None
    x, y = np.asarray(arm, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    within = float(((x - x.mean()) ** 2).sum() + ((y - y.mean()) ** 2).sum())
    return TwoSamples(
        difference=float(y.mean() - x.mean()),
        spread=math.sqrt(within / freedom),
        pairs=1 / (1 / len(x) + 1 / len(y)),
        freedom=freedom,
    )


def log_evidence(statistic: float, pairs: float, freedom: int) -> float:
    """ln of the e-value for "the first is smaller", from Student's statistic with ``freedom`` degrees of freedom."""
    return _mixture(statistic, pairs, freedom, sides=(1,))


@lru_cache(maxsize=4096)
def critical(level: float, pairs: float, freedom: int) -> float:
    """The statistic beyond which, on either side, the mean of both one-sided e-values exceeds ``1 / level``.

    Infinite if none does, because so few runs cannot decide at this level.
    """
    needed = -math.log(level)

    def decides(statistic: float) -> bool:
        return _mixture(statistic, pairs, freedom, sides=(1, -1)) > needed

    if not decides(math.inf):
        return math.inf
    low, high = 0.0, 1.0
    while not decides(high):
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high


def interval(compared: TwoSamples, level: float) -> tuple[float, float]:
    """Confidence interval of the difference at ``1 - level``, valid at all looks together; infinite for few runs."""
    half = critical(level, compared.pairs, compared.freedom)
    width = half * compared.spread / math.sqrt(compared.pairs) if math.isfinite(half) else math.inf
    return compared.difference - width, compared.difference + width


BISECTIONS = 24

NODES = 96
"""Points of the quadrature over the spread: against SciPy's noncentral density, errors are below 1e-6."""

WIDTH = 7.0
"""Half-width of the quadrature around its integrands' modes, in their standard deviations at most."""


def _mixture(statistic: float, pairs: float, freedom: int, sides: Sequence[int]) -> float:
    """ln of the mean over the ``sides`` of the mixed likelihood ratios."""
    effects = np.asarray([side * effect for side in sides for effect in EFFECTS])
    weights = np.log(np.asarray([weight / len(sides) for _ in sides for weight in EFFECTS.values()]))
    return float(_log_sum(weights + _log_ratios(effects, statistic, pairs, freedom)))


def _log_ratios(effects: Array, statistic: float, pairs: float, freedom: int) -> Array:
    """ln of noncentral over central density of Student's t, for each effect.

    With x = t / sqrt(f + t^2) and l = effect sqrt(pairs) it is exp(-l^2/2) E[exp(l x v)], where v has a chi
    distribution of f + 1 degrees of freedom (Johnson, Kotz and Balakrishnan 1995, chapter 31, integrated over it).
    """
    x = (
        math.copysign(1.0, statistic)
        if math.isinf(statistic)
        else statistic / math.hypot(math.sqrt(freedom), statistic)
    )
    shifts = effects * math.sqrt(pairs)
    modes = (shifts * x + np.sqrt((shifts * x) ** 2 + 4 * freedom)) / 2
    usual = math.sqrt(freedom)
    low = max(1e-3, min(usual, float(modes.min())) - WIDTH)
    v = np.linspace(low, max(usual, float(modes.max())) + WIDTH, NODES)
    central = freedom * np.log(v) - v**2 / 2
    tilted = central + v * (shifts * x)[:, None]
    return np.asarray(-(shifts**2) / 2 + _log_sum(tilted) - _log_sum(central))


def _log_sum(logs: Array) -> Array:
    """ln of the sum of exponentials along the last axis."""
    top = logs.max(axis=-1, keepdims=True)
    return np.asarray(top[..., 0] + np.log(np.exp(logs - top).sum(axis=-1)))
