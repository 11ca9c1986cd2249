"""Compares a run with the published runs of its workload: a calibrated envelope, and whether it applies to a study.

A study declares its curves to be like the published ones; its own runs may contradict that. Good runs among the
published ones confirm the envelope, at their global batch size alone; the first one outside rejects it for the whole
study.
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
"""90% quantile of the standard normal distribution: upper bound for the mean of a study's own good runs."""

LEAST_DELAY = 1.1
"""A run forecast to need less than this times the samples of the median curve is slow, not stalled."""

PUBLISHED_STEP = 384.0
"""Eval interval in samples of the public runs, for which their envelope is calibrated."""

UNLIKELY = 0.01
"""A good run further outside an envelope than this share of good runs ever is contradicts the envelope; the study's own
rate counts if it is lower."""


@dataclass(frozen=True, slots=True)
class StallVerdict:
    """``stop`` and why, in one sentence that is stored with the trial. reason: "", "diverged", "stalled", "capped"."""

    stop: bool
    sentence: str
    reason: str = ""


CONTINUE = StallVerdict(False, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The range of good runs of a workload: a median curve and how far above it they go, two evals in a row.

    thresholds: (rate, excess) pairs: at most a share ``rate`` of good runs has, at any time of its life, two evals in
    a row further above the family's curve than ``excess``, in units of sqrt(noise^2 + spread^2). ``rate`` falls,
    ``excess`` rises.
    """

    family: Family
    thresholds: tuple[tuple[float, float], ...]

    def threshold(self, rate: float) -> float:
        """The smallest tabled excess whose rate is at most ``rate``; the largest one if there is none."""
        return next((excess for share, excess in self.thresholds if share <= rate), self.thresholds[-1][1])

    def limit(self, rate: float, shown: Sequence[float] = ()) -> float:
        """The excess above which a run is outside at ``rate``, given the excesses ``shown`` by the study's good runs.

        The published runs give the scatter of good runs, the study's own their level, see :func:`higher`; the limit is
        never below the excess of a good run. Without any it is the threshold of the published runs.
        """
        return max(self.threshold(rate) + higher(shown), *shown) if shown else self.threshold(rate)

    def supported(self, rate: float) -> float:
        """The largest tabled rate that is at most ``rate``; the smallest one if there is none."""
        return next((share for share, _ in self.thresholds if share <= rate), self.thresholds[-1][0])

    def rate_of(self, excess: float) -> float:
        """The share of good runs with this excess, by the table (log-linear between its rows)."""
        rates, excesses = np.array(self.thresholds).T
        return float(np.exp(np.interp(excess, excesses, np.log(rates))))


def higher(shown: Sequence[float]) -> float:
    """How much higher than the published runs a study's good runs may lie, from the excesses that they have shown.

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
        return CONTINUE
    above = float((usable.loss[-IN_A_ROW:] - family.loss_at(usable.samples[-IN_A_ROW:])).min())
    if family.samples_at(target - above) < LEAST_DELAY * family.samples_at(target):
        return CONTINUE
    share = envelope.rate_of(float(scaled.min()) - higher(shown))
    return StallVerdict(
        True,
        f"stalled: two evals in a row {above:.4f} above the median curve ({family.name}); "
        f"at most {100 * share:.1f}% of good runs look like this",
        "stalled",
    )


def highest_pair(usable: Points, family: Family) -> float:
    """The largest excess shared by two consecutive evals, in units of sqrt(noise^2 + spread^2).

    usable: points before the target; -inf with fewer than two of them from the family's first knot on.
    """
    scaled = _excesses(usable, family)
    return float(np.minimum(scaled[:-1], scaled[1:]).max()) if len(scaled) >= IN_A_ROW else -math.inf


def _excesses(usable: Points, family: Family) -> Array:
    """Excess of each eval from the family's first knot on over its curve, in sqrt(noise^2 + spread^2)."""
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
    """A run that reached the target, and the envelope at its batch, which applies from ``begin`` samples on."""

    run: ComparedRun
    envelope: Envelope
    begin: float = 0.0


@dataclass(frozen=True, slots=True)
class Credibility:
    """Evidence of a study's good runs on the published curves, by task (the global batch size).

    shown: the value of :func:`shown_by` of each, in order. confirmed: index of the run that confirmed the envelope.
    contradicted: index of the first run that was outside; None: there is none.
    """

    shown: Mapping[Hashable, Sequence[float]]
    confirmed: Mapping[Hashable, int]
    contradicted: int | None


def credibility(good: Iterable[BesideEnvelope], target: float, rate: float) -> Credibility:
    """Judge the envelope by a study's good runs in the order of their ends. rate: its false-prune rate."""
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
    """The largest excess of a run over the envelope before it reached the target.

    0, the published median, if it got there before two evals. begin: as in :func:`contradicts`.
    """
    excess = highest_pair(every(run.curve, PUBLISHED_STEP, begin, run.stop(target)), envelope.family)
    return excess if math.isfinite(excess) else 0.0


def contradicts(
    run: ComparedRun, target: float, envelope: Envelope, rate: float, begin: float = 0.0, shown: Sequence[float] = ()
) -> bool:
    """Whether a run that reached the target was outside the envelope before, so that the rule would have stopped it.

    A study with such a run is not like the runs of the calibration. rate: the study's false-prune rate. begin: samples
    before which the envelope does not apply to the run. shown: values of :func:`shown_by` of the study's good runs that
    ended before.
    """
    rate = min(rate, UNLIKELY)
    if not math.isfinite(run.stop(target)) or shown_by(run, target, envelope, begin) <= envelope.limit(rate, shown):
        return False
    before = every(run.curve, PUBLISHED_STEP, begin, run.stop(target))
    lives = (Points(before.samples[:n], before.loss[:n]) for n in range(IN_A_ROW, len(before.samples) + 1))
    return any(outside(life, target, envelope, rate, shown).stop for life in lives)


def confirms(shown: Sequence[float], envelope: Envelope) -> bool:
    """Whether a study's good runs, by their values of :func:`shown_by`, lie within the envelope and so confirm it.

    The upper 90% bound of their mean is no further outside than 1% of the published runs. The envelope stops no run
    before: if it did not fit the study's curves, it would stop most good runs, and none would be left to contradict it.
    """
    return bool(shown) and higher(shown) <= envelope.threshold(UNLIKELY)
