"""A run against the public runs of its workload: a calibrated envelope, and how far outside of it a run may lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lora_tune.curves.family import Family
from lora_tune.curves.points import Array, Points

IN_A_ROW = 2
"""Evals that must agree before a run is stopped: spikes of one eval recover by the next."""

UPPER_90 = 1.2816
"""Of a normal distribution, in standard deviations: where the mean of a study's own good runs lies at most."""

LEAST_DELAY = 1.1
"""A run forecast to need less than this times the samples of the median curve is slow, not stalled."""


@dataclass(frozen=True, slots=True)
class StallVerdict:
    """``stop`` and why, in one sentence that is stored with the trial. reason: "", "diverged", "stalled", "capped"."""

    stop: bool
    sentence: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What good runs of a workload look like: a median curve and how far above it they go, two evals in a row.

    thresholds: (rate, excess) pairs: at most a share ``rate`` of good runs has, at any time of its life, two evals in
    a row further above the family's curve than ``excess``, in units of sqrt(noise^2 + spread^2). ``rate`` falls,
    ``excess`` rises.
    """

    family: Family
    thresholds: tuple[tuple[float, float], ...]

    def threshold(self, rate: float) -> float:
        """The smallest tabled excess whose rate is at most ``rate``; the largest one when none is."""
        return next((excess for share, excess in self.thresholds if share <= rate), self.thresholds[-1][1])

    def limit(self, rate: float, shown: Sequence[float] = ()) -> float:
        """The excess above which a run is outside at ``rate``, in a study whose good runs had the excesses ``shown``.

        The published runs tell how far good runs scatter, the study's own where they lie, see :func:`higher`; and no
        limit is below what a good run has shown. Without any the threshold is that of the published runs.
        """
        return max(self.threshold(rate) + higher(shown), *shown) if shown else self.threshold(rate)

    def supported(self, rate: float) -> float:
        """The largest tabled rate that is at most ``rate``; the smallest one when none is."""
        return next((share for share, _ in self.thresholds if share <= rate), self.thresholds[-1][0])

    def rate_of(self, excess: float) -> float:
        """The share of good runs with this excess, by the table (log-linear between its rows)."""
        rates, excesses = np.array(self.thresholds).T
        return float(np.exp(np.interp(excess, excesses, np.log(rates))))


def higher(shown: Sequence[float]) -> float:
    """How much higher the good runs of a study may lie than the published ones, by the excesses that they have shown.

    A configuration that needs more samples lies higher. The upper 90% bound of the mean excess, whose standard error
    is at most a unit over the root of their count; never below 0.
    """
    return max(0.0, float(np.mean(shown))) + UPPER_90 / math.sqrt(len(shown)) if shown else 0.0


GO_ON = StallVerdict(False, "")


def outside(
    usable: Points, target: float, envelope: Envelope, rate: float, shown: Sequence[float] = ()
) -> StallVerdict:
    """Whether a run's last two evals lie further above the envelope than ``rate`` of good runs ever do.

    Both must also be later than the median curve by ``LEAST_DELAY``. shown: see :meth:`Envelope.limit`.
    """
    family = envelope.family
    scaled = excesses(usable, family)[-IN_A_ROW:]
    if len(scaled) < IN_A_ROW or float(scaled.min()) <= envelope.limit(rate, shown):
        return GO_ON
    above = float((usable.loss[-IN_A_ROW:] - family.loss_at(usable.samples[-IN_A_ROW:])).min())
    if family.samples_at(target - above) < LEAST_DELAY * family.samples_at(target):
        return GO_ON
    share = envelope.rate_of(float(scaled.min()) - higher(shown))
    return StallVerdict(
        True,
        f"stalled: two evals in a row {above:.4f} above the median curve ({family.name}); "
        f"at most {100 * share:.1f}% of good runs look like this",
        "stalled",
    )


def highest_pair(usable: Points, family: Family) -> float:
    """The largest excess that two evals in a row both show, in units of sqrt(noise^2 + spread^2).

    usable: points before the target; -inf with fewer than two of them from the family's first knot on.
    """
    scaled = excesses(usable, family)
    return float(np.minimum(scaled[:-1], scaled[1:]).max()) if len(scaled) >= IN_A_ROW else -math.inf


def excesses(usable: Points, family: Family) -> Array:
    """How far each eval from the family's first knot on lies above its curve, in sqrt(noise^2 + spread^2)."""
    samples, loss = Points(*(v[usable.samples >= 0.999 * np.exp(family.log_samples[0])] for v in usable))
    scale = np.sqrt(family.noise_at(samples) ** 2 + family.spread**2)
    return np.asarray((loss - family.loss_at(samples)) / scale, dtype=np.float64)
