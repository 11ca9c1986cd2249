"""Curves of several runs laid over one another: where they are compared, and what each had shown by there."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lora_tune.curves.points import Array, Points, eval_interval, usable, usable_samples
from lora_tune.curves.stall import IN_A_ROW
from lora_tune.logs.run import Eval

SPIKE = 0.5
"""An eval above the best by more than this share of the fall so far waits for the next one: spikes recover by then."""

MOST_PLACES = 256
"""Places of a life that are looked at; more evals are thinned."""

ROUNDING = 1e-6

LATELY = 0.9
"""Evals from this share of a run's samples on must all agree that it has diverged, so that dense evals say no more."""

AGAIN = 2.0
"""A metric that was no number for a while and came back may be none for this many times as long."""

LARGEST_VALUE = 1e100
"""A metric beyond this, either sign, is no number. Comparisons know no scale: one may be in dollars or a perplexity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run as it is compared, and what its curve's shape depends on.

    curve: its usable evals, lower is better. length: samples after which its training ends by itself; None: unknown.
    task: what a run must share with one of them for references to say anything of it (benchmark, batch). kind: runs of
    one kind and about one length are alike (warm-up, precision). free: nothing could have stopped it early, so that it
    tells how bad a good run may look; others only how bad a run may look that was let through.
    blank: samples of the last eval before its first number, where at least two were none; 0: its metric was a number
    from the start on. hole: samples from a number, or from 0, to the next one where evals between them were none, the
    most of the run; 0: there were no such evals.
    """

    curve: Points
    length: float | None = None
    task: Hashable = ()
    kind: Hashable = ()
    free: bool = True
    blank: float = 0.0
    hole: float = 0.0

    @property
    def alike(self) -> Hashable:
        """What runs with curves of one shape share: kind, and length within a factor of about 1.4."""
        return self.task, self.kind, round(2 * math.log2(self.length)) if self.length else None

    def stop(self, target: float) -> float:
        """Samples at the first eval at or under ``target``; infinite where there is none."""
        reached = np.flatnonzero(self.curve.loss <= target)
        return float(self.curve.samples[reached[0]]) if len(reached) else math.inf


def comparable(evals: Sequence[Eval]) -> Points:
    """The evals that a comparison can use: all that are numbers, in order."""
    return usable(evals, LARGEST_VALUE)


def course(
    evals: Sequence[Eval], *, length: float | None = None, task: Hashable = (), kind: Hashable = (), free: bool = True
) -> ComparedRun:
    """A run as it is compared, from its evals as they were read."""
    curve, holes = comparable(evals), without_number(evals)
    before = holes[holes < curve.samples.min(initial=math.inf)]
    return ComparedRun(
        curve=curve, length=length, task=task, kind=kind, free=free,
        blank=float(before[-1]) if len(before) >= IN_A_ROW else 0.0, hole=_longest_hole(curve.samples, holes),
    )  # fmt: skip


def without_number(evals: Sequence[Eval]) -> Array:
    """Samples, rising, at which evals were no numbers, in none of their readings."""
    known = {e.samples for e in evals if abs(e.loss) <= LARGEST_VALUE}
    return np.array(sorted({e.samples for e in evals if usable_samples(e.samples)} - known), dtype=np.float64)


def _longest_hole(numbers: Array, holes: Array) -> float:
    """The most samples from a number, or from 0, to the next one with any of ``holes`` between them."""
    after = np.searchsorted(numbers, holes[holes < numbers.max(initial=0.0)])
    return float((numbers[after] - np.append(0.0, numbers)[after]).max(initial=0.0))


def broke_off(evals: Sequence[Eval], hole: float = 0.0) -> bool:
    """Whether a run's metric was a number and is none any more: in its latest evals, two at least.

    hole: samples for which the metric was none before it came back; it is gone when it is none for over twice as many.
    """
    numbers, holes = comparable(evals).samples, without_number(evals)
    if not len(numbers) or not len(holes):
        return False
    if int((holes > numbers[-1]).sum()) < IN_A_ROW or not numbers[-1] < LATELY * holes[-1]:
        return False
    return bool(holes[-1] - numbers[-1] > AGAIN * hole)


@dataclass(frozen=True, slots=True)
class Frame:
    """Where curves are compared. places: rising, over the whole life; now: the last that the run has an eval at.

    step: distance between evals that count. by_share: places are shares of training, else samples.
    """

    places: Array
    now: float
    step: float
    by_share: bool

    def unit(self, course: ComparedRun) -> float:
        """Samples in one unit of a place."""
        return course.length if self.by_share and course.length else 1.0


def frame_of(run: ComparedRun, references: Sequence[ComparedRun]) -> Frame:
    """The run's own evals, and later ones as far apart, at the coarser of its and the references' usual spacing.

    By share of training where every length is known.
    """
    by_share = all(c.length is not None and c.length > 0 for c in (run, *references))
    frame = Frame(np.empty(0), 0.0, 0.0, by_share)
    shown = run.curve.samples if len(run.curve.samples) else np.array([run.blank])
    own, *theirs = (s / frame.unit(c) for s, c in ((shown, run), *((r.curve.samples, r) for r in references)))
    end = 1.0 if by_share else max(float(x[-1]) for x in (own, *theirs) if len(x))
    step = max(_spacing(own), float(np.median([_spacing(x) for x in theirs])), end / MOST_PLACES)
    seen = own[thinned(own, step)]
    later = np.arange(seen[-1] + step, end * (1 + ROUNDING), step)
    return Frame(np.append(seen, later), float(seen[-1]), step, by_share)


def _spacing(places: Array) -> float:
    """Distance between two evals; with one alone, the way to it: a single eval is no sign of dense ones."""
    return eval_interval(places) or float(places[0])


def thinned(places: Array, step: float) -> NDArray[np.int64]:
    """Indices of the first of ``places`` (rising) at or after each multiple of ``step``."""
    multiples = np.floor(places / step + ROUNDING)
    return np.flatnonzero(np.append(True, multiples[1:] != multiples[:-1])[: len(places)])


@dataclass(frozen=True, slots=True)
class Laid:
    """A run in a frame. places, loss: its evals there, thinned to the frame's step; stop: where it met the target."""

    places: Array
    loss: Array
    stop: float

    @property
    def before(self) -> int:
        """How many of the evals lie before the stop."""
        return int(self.places.searchsorted(self.stop))


def lay(course: ComparedRun, frame: Frame, target: float) -> Laid:
    """The run's evals as a frame counts them."""
    unit = frame.unit(course)
    places = course.curve.samples / unit
    kept = thinned(places, frame.step)
    return Laid(places[kept], course.curve.loss[kept], course.stop(target) / unit)


def best_so_far(laid: Laid, frame: Frame, target: float) -> Array:
    """The lowest loss that a run has shown by each place, between its evals on a line; ``target`` from its stop on.

    Infinite before its first eval.
    """
    x, lowest = laid.places[: laid.before], np.minimum.accumulate(laid.loss[: laid.before])
    if math.isfinite(laid.stop):
        x, lowest = np.append(x, laid.stop), np.append(lowest, target)
    return np.interp(frame.places, x, lowest, left=math.inf) if len(x) else np.full(len(frame.places), math.inf)


def best_nearby(laid: Laid, frame: Frame, target: float) -> Array:
    """The lowest loss that a run has shown by the eval nearest to each place, as a run that is judged shows it.

    A line between two evals has less noise than an eval, by which a run would look worse than its references.
    """
    places, done = laid.places[: laid.before], frame.places >= laid.stop * (1 - ROUNDING)
    if not len(places):
        return np.where(done, target, math.inf)
    lowest = np.minimum.accumulate(laid.loss[: laid.before])
    nearby = lowest[((places[1:] + places[:-1]) / 2).searchsorted(frame.places)]
    return np.where(done, target, np.where(frame.places < places[0] * (1 - ROUNDING), math.inf, nearby))


def spike_at(laid: Laid, frame: Frame) -> NDArray[np.bool_]:
    """Whether the last eval by each place is a spike, and the first of its kind in a row."""
    loss = laid.loss
    best = np.minimum.accumulate(np.append(loss[:1], loss[:-1]))
    spike = loss - best > SPIKE * np.maximum(loss[:1] - best, 0.0)
    spike &= best < loss[:1]
    alone = spike & ~np.append(False, spike[:-1])
    at = laid.places.searchsorted(frame.places * (1 + ROUNDING), side="right")
    return np.append(False, alone)[at] & (frame.places < laid.stop)
