"""A run beside the published runs of its workload: a calibrated envelope, and whether a study believes in it.

The study says that its curves are like the published ones; its own machine may say otherwise. Good runs that lie among
them begin the belief, at their global batch size alone; the first that lay outside ends it for the whole study.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lora_tune.curves.comparison import IN_A_ROW, ROUNDING, ComparedRun
from lora_tune.curves.family import Family
from lora_tune.curves.points import Array, Points

UPPER_90 = 1.2816
"""Of a normal distribution, in standard deviations: where the mean of a study's own good runs lies at most."""

LEAST_DELAY = 1.1
"""A run forecast to need less than this times the samples of the median curve is slow, not stalled."""

PUBLISHED_STEP = 384.0
"""Samples between the evals of the public runs, by which their envelope is calibrated."""

UNLIKELY = 0.01
"""A run further outside of an envelope than this share of good runs ever lies speaks against the envelope, if it is
good; at a study's own rate, where that is lower."""


@dataclass(frozen=True, slots=True)
class StallVerdict:
    """``stop`` and why, in one sentence that is stored with the trial. reason: "", "diverged", "stalled", "capped"."""

    stop: bool
    sentence: str
    reason: str = ""


GO_ON = StallVerdict(False, "")


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


def outside(
    usable: Points, target: float, envelope: Envelope, rate: float, shown: Sequence[float] = ()
) -> StallVerdict:
    """Whether a run's last two evals lie further above the envelope than ``rate`` of good runs ever do.

    Both must also be later than the median curve by ``LEAST_DELAY``. shown: see :meth:`Envelope.limit`.
    """
    family = envelope.family
    scaled = _excesses(usable, family)[-IN_A_ROW:]
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
    scaled = _excesses(usable, family)
    return float(np.minimum(scaled[:-1], scaled[1:]).max()) if len(scaled) >= IN_A_ROW else -math.inf


def _excesses(usable: Points, family: Family) -> Array:
    """How far each eval from the family's first knot on lies above its curve, in sqrt(noise^2 + spread^2)."""
    samples, loss = Points(*(v[usable.samples >= 0.999 * np.exp(family.log_samples[0])] for v in usable))
    scale = np.sqrt(family.noise_at(samples) ** 2 + family.spread**2)
    return np.asarray((loss - family.loss_at(samples)) / scale, dtype=np.float64)


def every(curve: Points, step: float, begin: float, end: float = math.inf) -> Points:
    """The evals from ``begin`` on and before ``end``, one in each ``step`` samples."""
    kept = _thinned(curve.samples, step)
    kept = kept[(curve.samples[kept] >= begin) & (curve.samples[kept] < end)]
    return Points(curve.samples[kept], curve.loss[kept])


def _thinned(samples: Array, step: float) -> NDArray[np.int64]:
    """Indices of the first of ``samples`` (rising) at or after each multiple of ``step``."""
    multiples = np.floor(samples / step + ROUNDING)
    return np.flatnonzero(np.append(True, multiples[1:] != multiples[:-1])[: len(samples)])


@dataclass(frozen=True, slots=True)
class BesideEnvelope:
    """A run that reached the target, and the envelope at its batch, which says nothing before ``begin`` samples."""

    run: ComparedRun
    envelope: Envelope
    begin: float = 0.0


@dataclass(frozen=True, slots=True)
class Credibility:
    """What a study's good runs say of the published curves, by task (the global batch size).

    shown: what :func:`shown_by` says of each, in order. confirmed: index of the run with which they first lay among the
    published ones, where they do. contradicted: index of the first run that had lain outside; None: there is none.
    """

    shown: Mapping[Hashable, Sequence[float]]
    confirmed: Mapping[Hashable, int]
    contradicted: int | None


def credibility(good: Iterable[BesideEnvelope], target: float, rate: float) -> Credibility:
    """Judge the envelope by a study's good runs in the order in which they ended. rate: its false-prune rate."""
    shown = defaultdict[Hashable, list[float]](list)
    confirmed = dict[Hashable, int]()
    contradicted: int | None = None
    for index, one in enumerate(good):
        before = shown[one.run.task]
        if contradicted is None and contradicts(one.run, target, one.envelope, rate, one.begin, before):
            contradicted = index
        before.append(shown_by(one.run, target, one.envelope, one.begin))
        if confirms(before, one.envelope):
            confirmed.setdefault(one.run.task, index)
    return Credibility(shown, confirmed, contradicted)


def shown_by(run: ComparedRun, target: float, envelope: Envelope, begin: float = 0.0) -> float:
    """How far a run lay outside of the envelope before it reached the target.

    0, the published median, where it got there before two evals could tell. begin: as in :func:`contradicts`.
    """
    excess = highest_pair(every(run.curve, PUBLISHED_STEP, begin, run.stop(target)), envelope.family)
    return excess if math.isfinite(excess) else 0.0


def contradicts(
    run: ComparedRun, target: float, envelope: Envelope, rate: float, begin: float = 0.0, shown: Sequence[float] = ()
) -> bool:
    """Whether a run that reached the target had lain outside of the envelope before, where the rule stops others.

    A study that has such a run is not what the envelope was calibrated on. rate: the study's false-prune rate.
    begin: samples before which the envelope says nothing of the run. shown: what :func:`shown_by` says of the study's
    good runs that ended before.
    """
    rate = min(rate, UNLIKELY)
    if not math.isfinite(run.stop(target)) or shown_by(run, target, envelope, begin) <= envelope.limit(rate, shown):
        return False
    before = every(run.curve, PUBLISHED_STEP, begin, run.stop(target))
    lives = (Points(before.samples[:n], before.loss[:n]) for n in range(IN_A_ROW, len(before.samples) + 1))
    return any(outside(life, target, envelope, rate, shown).stop for life in lives)


def confirms(shown: Sequence[float], envelope: Envelope) -> bool:
    """Whether a study's good runs, by what :func:`shown_by` says of them, speak for the envelope: they lie among its.

    The upper 90% bound of their mean is no further outside than 1% of the published runs. Where ``envelope`` is of
    other curves than the study's, most good runs lie outside, and if they are all stopped none is left to contradict
    it. So it stops no run before it is confirmed.
    """
    return bool(shown) and higher(shown) <= envelope.threshold(UNLIKELY)
