"""Would a run become the best? Its curve beside those of the best finished runs, by their ranks alone.

A run that becomes the best is among the best m + 1 of all; so it is compared with the best m of those that ended, and
its worst moment with theirs. A run's height is how far its lowest loss so far lies above the lowest that the others
came to, in units of their median's height there (plus 2% of its usual height):

    H = max over its life of (y(u) - L) / (M(u) - L + F)

A run is outside when its H is larger than the k-th largest that the m have beside one another,
k = max(1, floor(rate (m + 1))). If all runs are exchangeable, those that come among the best m + 1 are, too: at most
k / (m + 1) of them are outside over their whole lives (Vovk, Gammerman and Shafer 2005, section 2.2), whatever the
curves look like, with a target or without. That the best of them is outside no more often than the rest is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lora_tune.curves.points import Array, Points, usable, usable_samples
from lora_tune.logs.run import Eval

FEWEST = 3
"""Finished runs that a run is compared with, the best ones, each with two others: of four that come among the best at
most one looks worse. Of runs that become the best far fewer do (``benchmarks.stopping --part first``)."""

FLOOR = 0.02
"""Share of the median's usual height that is added to it where it may be next to none."""

PLACES = 96
"""Places of a life at which curves are compared."""

SPIKE = 0.5
"""An eval above the best by more than this share of the fall so far counts when the next one agrees: spikes recover."""

IN_A_ROW = 2
"""Evals that must agree before they say something: spikes of one eval recover by the next."""

LATELY = 0.9
"""Evals from this share of a run's samples on must all agree that it has diverged, so that dense evals say no more."""

AGAIN = 2.0
"""A metric that was no number for a while and came back may be none for this many times as long."""

LARGEST_VALUE = 1e100
"""A metric beyond this, either sign, is no number. Comparisons know no scale: one may be in dollars or a perplexity."""

ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run as it is compared.

    curve: its usable evals, lower is better. length: samples after which its training ends by itself; None: unknown.
    task: what runs must share for one to say anything of the other (batch, precision).
    blank: samples of the last eval before its first number, where at least two were none; 0: its metric was a number
    from the start on. hole: samples from a number, or from 0, to the next one where evals between them were none, the
    most of the run; 0: there were no such evals.
    longer: how many times as long it took for the same samples as the run that is compared with it, where a time is
    what counts; at least 1, so that a run is compared with what slower ones had come to in as many seconds.
    """

    curve: Points
    length: float | None = None
    task: Hashable = ()
    blank: float = 0.0
    hole: float = 0.0
    longer: float = 1.0

    def stop(self, target: float) -> float:
        """Samples at the first eval at or under ``target``; infinite where there is none."""
        reached = np.flatnonzero(self.curve.loss <= target)
        return float(self.curve.samples[reached[0]]) if len(reached) else math.inf

    @property
    def lowest(self) -> float:
        """The lowest loss; infinite where none is a number."""
        return float(self.curve.loss.min(initial=math.inf))


def comparable(evals: Sequence[Eval]) -> Points:
    """The evals that a comparison can use: all that are numbers, in order."""
    return usable(evals, LARGEST_VALUE)


def compared_run(evals: Sequence[Eval], *, length: float | None = None, task: Hashable = ()) -> ComparedRun:
    """A run as it is compared, from its evals as they were read."""
    curve, holes = comparable(evals), _without_number(evals)
    before = holes[holes < curve.samples.min(initial=math.inf)]
    after = np.searchsorted(curve.samples, holes[holes < curve.samples.max(initial=0.0)])
    hole = (curve.samples[after] - np.append(0.0, curve.samples)[after]).max(initial=0.0)
    blank = float(before[-1]) if len(before) >= IN_A_ROW else 0.0
    return ComparedRun(curve=curve, length=length, task=task, blank=blank, hole=float(hole))


def _without_number(evals: Sequence[Eval]) -> Array:
    """Samples, rising, at which evals were no numbers, in none of their readings."""
    known = {e.samples for e in evals if abs(e.loss) <= LARGEST_VALUE}
    return np.array(sorted({e.samples for e in evals if usable_samples(e.samples)} - known), dtype=np.float64)


def broke_off(evals: Sequence[Eval], hole: float = 0.0) -> bool:
    """Whether a run's metric was a number and is none any more: in its latest evals, two at least.

    hole: samples for which the metric was none before it came back; it is gone when it is none for over twice as many.
    """
    numbers, holes = comparable(evals).samples, _without_number(evals)
    if not len(numbers) or not len(holes):
        return False
    if int((holes > numbers[-1]).sum()) < IN_A_ROW or not numbers[-1] < LATELY * holes[-1]:
        return False
    return bool(holes[-1] - numbers[-1] > AGAIN * hole)


def allowed(rate: float, count: int) -> int:
    """How many of ``count`` references may look worse than a run that is stopped, and one more; at least 1."""
    return max(1, math.floor(rate * (count + 1) * (1 + ROUNDING)))


def supported(rate: float, count: int) -> float:
    """The risk that ``count`` references support where ``rate`` is asked for: at most it, if that many can."""
    return allowed(rate, count) / (count + 1)


def needed(rate: float) -> int:
    """The references from which on ``rate`` is supported: 99 for 1%."""
    return math.ceil(1 / rate * (1 - ROUNDING)) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the best finished runs say of one that goes on.

    outside: whether it once looked worse than the rate allows; at: samples where it first did (NaN: nowhere).
    references: how many it was compared with; 0: too few of its task have ended. finished: of how many.
    limit: by samples, the loss above which a run is outside, infinite where nothing is said; usual: the references'
    median there.
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

    finished: runs that nothing stopped, the best first; one more than ``count`` is asked for. Curves are laid over one
    another by share of training where all lengths are known, else by samples. target: minus infinity for none.
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
    """Samples in one unit of a place."""
    return run.length if by_share and run.length else 1.0


def _lowest(run: ComparedRun, places: Array, target: float) -> Array:
    """The lowest loss that a run has shown by each place, between its evals on a line; infinite before its first."""
    samples, loss = _without_spikes(run.curve)
    return np.interp(places, samples, np.maximum(np.minimum.accumulate(loss), target), left=math.inf)


def _without_spikes(curve: Points) -> Points:
    """The evals without those that lie far above the best so far, and whose forerunner does not."""
    loss = curve.loss
    best = np.minimum.accumulate(np.append(loss[:1], loss[:-1]))
    high = (loss - best > SPIKE * np.maximum(loss[:1] - best, 0.0)) & (best < loss[:1])
    kept = ~high | np.append(False, high[:-1])
    return Points(curve.samples[kept], loss[kept])


def _scale(curves: Array) -> tuple[Array, Array, float]:
    """The median curve, its height above the lowest of all (infinite where nothing is compared), and that lowest."""
    usual, low = np.median(curves, axis=0), float(curves.min())
    compared = np.isfinite(usual)
    above = usual[compared & (usual > low)] - low
    floor = FLOOR * float(np.median(above)) if len(above) else math.inf
    return usual, np.where(compared, usual - low + floor, math.inf), low


def _heights(own: Array, others: Array) -> Array:
    """The heights of a run beside others, where they say anything."""
    _, scale, low = _scale(others)
    known = np.isfinite(own) & np.isfinite(scale)
    return np.asarray((own[known] - low) / scale[known], dtype=np.float64)


def _outside_at(run: ComparedRun, samples: Array, limit: Array, target: float) -> float:
    """Samples at which a run first lay above the limit, as far as it has come; NaN where it did not."""
    if len(run.curve.samples) < IN_A_ROW:
        return math.nan
    own, shown = _lowest(run, samples, target), _without_spikes(run.curve).samples
    seen = np.isfinite(own) & (samples <= shown[-1] * (1 + ROUNDING))
    above = np.flatnonzero(seen & (own > limit))
    return float(samples[above[0]]) if len(above) else math.nan
