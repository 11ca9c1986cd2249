"""Would a run become the best? Compares its curve with those of the best finished runs, by ranks alone.

A run that becomes the best is among the best m + 1 of all; so it is compared with the best m finished runs, and its
worst moment with theirs. A run's height is the difference of its lowest loss so far and the lowest loss of the others,
in units of their median's height there (plus 2% of its usual height):

    H = max over its life of (y(u) - L) / (M(u) - L + F)

A run is outside if its H is larger than the k-th largest that the m have against one another,
k = max(1, floor(rate (m + 1))). If all runs are exchangeable, those among the best m + 1 are, too: at most k / (m + 1)
of them are outside over their whole lives (Vovk, Gammerman and Shafer 2005, section 2.2), whatever the shape of the
curves, with a target or without. It is assumed that the best of them is outside no more often than the rest.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lora_tune.curves.points import Array, Points, usable, usable_samples
from lora_tune.logs.run import Eval

FEWEST = 3
"""Fewest finished runs for a comparison, each then compared with two others: of the four best at most one looks worse.
Of runs that become the best far fewer do (``benchmarks.stopping --part first``)."""

FLOOR = 0.02
"""Share of the median's usual height that is added to it, as it may be nearly zero."""

PLACES = 96
"""Number of points of a life at which curves are compared."""

SPIKE = 0.5
"""An eval above the best by more than this share of the fall so far counts only if the next agrees: spikes recover."""

IN_A_ROW = 2
"""Consecutive evals that must agree, because a spike of one eval recovers by the next."""

LATELY = 0.9
"""All evals from this share of a run's samples on must agree on divergence, so that dense evals weigh no more."""

AGAIN = 2.0
"""A metric that was NaN for a while and recovered may be NaN again for this many times as long."""

LARGEST_VALUE = 1e100
"""Largest magnitude of a metric; beyond it counts as NaN. It is large because a metric may have any scale."""

ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run in a comparison.

    curve: its usable evals, lower is better. length: samples at which its training ends by itself; None: unknown.
    task: equal for comparable runs (batch, precision).
    blank: samples of the last eval before its first number, if at least two were NaN; 0: its metric was a number from
    the start. hole: the longest stretch in samples from a number, or from 0, to the next one with NaN evals between;
    0: there was none.
    longer: its time per sample relative to the run compared with it, at least 1, if time is what counts: the run is
    then compared with what slower runs had reached in as many seconds.
    """

    curve: Points
    length: float | None = None
    task: Hashable = ()
    blank: float = 0.0
    hole: float = 0.0
    longer: float = 1.0

    def stop(self, target: float) -> float:
        """Samples at the first eval at or under ``target``; infinite if there is none."""
        reached = np.flatnonzero(self.curve.loss <= target)
        return float(self.curve.samples[reached[0]]) if len(reached) else math.inf

    @property
    def lowest(self) -> float:
        """The lowest loss; infinite if none is a number."""
        return float(self.curve.loss.min(initial=math.inf))


def comparable(evals: Sequence[Eval]) -> Points:
    """The evals usable in a comparison: all that are numbers, in order."""
    return usable(evals, LARGEST_VALUE)


def compared_run(evals: Sequence[Eval], *, length: float | None = None, task: Hashable = ()) -> ComparedRun:
    """The :class:`ComparedRun` of raw evals."""
    curve, holes = comparable(evals), _without_number(evals)
    before = holes[holes < curve.samples.min(initial=math.inf)]
    after = np.searchsorted(curve.samples, holes[holes < curve.samples.max(initial=0.0)])
    hole = (curve.samples[after] - np.append(0.0, curve.samples)[after]).max(initial=0.0)
    blank = float(before[-1]) if len(before) >= IN_A_ROW else 0.0
    return ComparedRun(curve=curve, length=length, task=task, blank=blank, hole=float(hole))


def _without_number(evals: Sequence[Eval]) -> Array:
    """Samples, rising, of evals with no reading that is a number."""
    known = {e.samples for e in evals if abs(e.loss) <= LARGEST_VALUE}
    return np.array(sorted({e.samples for e in evals if usable_samples(e.samples)} - known), dtype=np.float64)


def broke_off(evals: Sequence[Eval], hole: float = 0.0) -> bool:
    """Whether a run's metric was a number and is now NaN: in its latest evals, at least two.

    hole: longest stretch in samples after which the metric recovered; it must now be NaN for over twice as long.
    """
    numbers, holes = comparable(evals).samples, _without_number(evals)
    if not len(numbers) or not len(holes):
        return False
    if int((holes > numbers[-1]).sum()) < IN_A_ROW or not numbers[-1] < LATELY * holes[-1]:
        return False
    return bool(holes[-1] - numbers[-1] > AGAIN * hole)


def allowed(rate: float, count: int) -> int:
    """One plus how many of ``count`` references may look worse than a run that is stopped; at least 1."""
    return max(1, math.floor(rate * (count + 1) * (1 + ROUNDING)))


def supported(rate: float, count: int) -> float:
    """The risk that ``count`` references support if ``rate`` is requested: at most it, given enough of them."""
    return allowed(rate, count) / (count + 1)


def needed(rate: float) -> int:
    """The fewest references that support ``rate``: 99 for 1%."""
    return math.ceil(1 / rate * (1 - ROUNDING)) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of an unfinished run with the best finished ones.

    outside: whether it ever looked worse than the rate allows; at: samples where it first did (NaN: nowhere).
    references: how many it was compared with; 0: too few of its task have ended. finished: of how many.
    limit: by samples, the loss above which a run is outside, infinite where undecided; usual: the references' median
    there.
    """

    outside: bool = False
    at: float = math.nan
    references: int = 0
    finished: int = 0
    limit: Points = field(default_factory=lambda: Points(np.empty(0), np.empty(0)))
    usual: Array = field(default_factory=lambda: np.empty(0))


def compare(
    run: ComparedRun, finished: Sequence[ComparedRun], *, target: float, rate: float, count: int = FEWEST
) -> Comparison:
    """Compare a run's evals so far with the best ``count`` of the ``finished`` ones of its task.

    finished: runs that were not stopped, best first; at least ``count + 1`` are needed. Curves are aligned by share of
    training if all lengths are known, else by samples. target: minus infinity for none.
    """
    alike = [r for r in finished if r.task == run.task]
    best = [r for r in alike[:count] if len(r.curve.samples)]
    if len(alike) <= count or len(best) < FEWEST:
        return Comparison()
    by_share = all(c.length is not None and c.length > 0 for c in (run, *best))
    end = 1.0 if by_share else max(r.longer * float(r.curve.samples[-1]) for r in best)
    places = end * np.arange(1, PLACES + 1) / PLACES
    curves = np.array([_lowest(r, places * _unit(r, by_share) / r.longer, target) for r in best])
    heights = [_heights(own, np.delete(curves, i, axis=0)) for i, own in enumerate(curves)]
    bound = max(1.0, float(np.sort([h.max(initial=0.0) for h in heights])[-allowed(rate, len(best))]))
    usual, scale, low = _scale(curves)
    limit = np.where(np.isfinite(scale), low + bound * scale, math.inf)
    unit = _unit(run, by_share)
    at = _outside_at(run, places * unit, limit, target)
    late = AGAIN * max(r.longer * float(r.curve.samples[0]) / _unit(r, by_share) for r in best)
    if math.isnan(at) and not len(run.curve.samples) and run.blank / unit > late:
        at = run.blank
    return Comparison(
        outside=not math.isnan(at), at=at, references=len(best), finished=len(alike),
        limit=Points(places * unit, limit), usual=usual,
    )  # fmt: skip


def _unit(run: ComparedRun, by_share: bool) -> float:
    """Samples per unit of a place."""
    return run.length if by_share and run.length else 1.0


def _lowest(run: ComparedRun, places: Array, target: float) -> Array:
    """The run's lowest loss by each place, linear between evals; infinite before its first."""
    samples, loss = _without_spikes(run.curve)
    return np.interp(places, samples, np.maximum(np.minimum.accumulate(loss), target), left=math.inf)


def _without_spikes(curve: Points) -> Points:
    """The evals without spikes: those far above the best so far whose predecessor is not."""
    loss = curve.loss
    best = np.minimum.accumulate(np.append(loss[:1], loss[:-1]))
    high = (loss - best > SPIKE * np.maximum(loss[:1] - best, 0.0)) & (best < loss[:1])
    kept = ~high | np.append(False, high[:-1])
    return Points(curve.samples[kept], loss[kept])


def _scale(curves: Array) -> tuple[Array, Array, float]:
    """The median curve, its height above the lowest of all (infinite where undefined), and that lowest."""
    usual, low = np.median(curves, axis=0), float(curves.min())
    compared = np.isfinite(usual)
    above = usual[compared & (usual > low)] - low
    floor = FLOOR * float(np.median(above)) if len(above) else math.inf
    return usual, np.where(compared, usual - low + floor, math.inf), low


def _heights(own: Array, others: Array) -> Array:
    """The heights of a run over the others, where defined."""
    _, scale, low = _scale(others)
    known = np.isfinite(own) & np.isfinite(scale)
    return np.asarray((own[known] - low) / scale[known], dtype=np.float64)


def _outside_at(run: ComparedRun, samples: Array, limit: Array, target: float) -> float:
    """Samples at which a run first exceeded the limit, as far as it has come; NaN if it did not."""
    if len(run.curve.samples) < IN_A_ROW:
        return math.nan
    own, shown = _lowest(run, samples, target), _without_spikes(run.curve).samples
    seen = np.isfinite(own) & (samples <= shown[-1] * (1 + ROUNDING))
    above = np.flatnonzero(seen & (own > limit))
    return float(samples[above[0]]) if len(above) else math.nan
