"""Is a run worse than every run that got there? A conformal comparison over whole lives, exact for any shape of curve.

Nonconformity of a run beside others: over its life, how far its best loss so far lies above the highest of theirs at
the same place, in units of the distance between their highest and lowest,

    A = max_u (y(u) - U(u)) / (U(u) - L(u) + F),    U, L: highest and lowest of the others, F: 1% of their whole range.

A run is outside at rate a when its A is larger than the k-th largest that the n references have beside one another,
k = max(1, floor(a (n + 1))). An eval that is a spike waits for the next one. A falls when more runs are compared with:
``(y - U) / (U - L + F)`` does in each place where it is positive. So if the run and its references are exchangeable, a
run outside is among the k largest of all n + 1, each beside the n others: probability at most k / (n + 1), whatever
the curves look like and however often it is asked (Vovk, Gammerman and Shafer 2005, section 2.2; bands over whole
curves: Diquigiovanni, Fontana and Vantini 2022).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lora_tune.curves.points import Array, Points, eval_interval

FEWEST = 3
"""References (or kinds of them) from which on each has two others to be compared with."""

FLOOR = 0.01
"""Share of the references' whole range that is added to their distance at a place, where they may all be equal."""

SPIKE = 0.5
"""An eval above the best by more than this share of the fall so far waits for the next one: spikes recover by then."""

MOST_PLACES = 256
"""Places of a life that are looked at; more evals are thinned."""

ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A run as it is compared, and what its curve's shape depends on.

    curve: its usable evals, lower is better. length: samples after which its training ends by itself; None: unknown.
    kind: runs of one kind are alike (batch, length of schedule, warm-up, precision). free: nothing could have stopped
    it early, so that it tells how bad a good run may look; others only how bad a run may look that was let through.
    """

    curve: Points
    length: float | None = None
    kind: Hashable = ()
    free: bool = True

    def stop(self, target: float) -> float:
        """Samples at the first eval at or under ``target``; infinite where there is none."""
        reached = np.flatnonzero(self.curve.loss <= target)
        return float(self.curve.samples[reached[0]]) if len(reached) else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What references say of a run.

    outside: whether it lies further outside than the rate allows; at: samples where it first did (NaN: nowhere).
    supported: the share of good runs that may lie there, at most, k / (n + 1); 1 where too few references say nothing.
    references: how many were compared with. way: "like" (of the run's own kind), "pooled" (of all kinds, its own
    among them), "unlike" (of other kinds alone: the band is as wide as these kinds differ), "none".
    limit: by samples, the loss above which a run is outside, infinite where nothing is said; usual: the references'
    median there.
    """

    outside: bool = False
    supported: float = 1.0
    references: int = 0
    way: str = "none"
    at: float = math.nan
    limit: Points = field(default_factory=lambda: Points(np.empty(0), np.empty(0)))
    usual: Array = field(default_factory=lambda: np.empty(0))


def allowed(rate: float, count: int) -> int:
    """How many of ``count`` references may lie further outside than a run that is stopped, and one more; at least 1."""
    return max(1, math.floor(rate * (count + 1) * (1 + ROUNDING)))


def supported(rate: float, count: int) -> float:
    """The rate that ``count`` references support where ``rate`` is asked for: at most it, if that many can."""
    return allowed(rate, count) / (count + 1)


def needed(rate: float) -> int:
    """The references from which on ``rate`` is supported: 99 for 1%."""
    return math.ceil(1 / rate * (1 - ROUNDING)) - 1


def compare(run: Course, references: Sequence[Course], *, target: float, rate: float) -> Comparison:
    """Compare a run's evals so far with finished runs that reached ``target``.

    Runs are laid over one another by share of training where all lengths are known, else by samples. They are seen at
    the coarser of the run's and the references' usual distance between evals, so that dense and sparse evals get the
    same answer. References of the run's own kind are taken where they alone support the rate; else all of them; and
    where none is of its kind, the whole kinds are what is compared, each with the others.
    """
    references = [r for r in references if math.isfinite(r.stop(target))]
    like = [r for r in references if r.kind == run.kind]
    if sum(r.free for r in like) >= max(FEWEST, needed(rate)):
        return _beside(run, like, list(range(len(like))), "like", target, rate)
    if like:
        return _beside(run, references, list(range(len(references))), "pooled", target, rate)
    kinds = list(dict.fromkeys(r.kind for r in references))
    return _beside(run, references, [kinds.index(r.kind) for r in references], "unlike", target, rate)


def _beside(
    run: Course, references: Sequence[Course], units: Sequence[int], way: str, target: float, rate: float
) -> Comparison:
    """Compare with ``references``; those of one unit are left out together when one of them is judged."""
    free = len({unit for unit, r in zip(units, references, strict=True) if r.free})
    if free < FEWEST or len(run.curve.samples) == 0:
        return Comparison()
    frame = _frame(run, references)
    curves = np.array([_best_so_far(r, frame, target) for r in references])
    spiky = np.array([_spike_at(r, frame, target) for r in references])
    judged = np.where(spiky, math.inf, np.array([_best_nearby(r, frame, target) for r in references]))
    worst = _worst_beside_others(judged, curves, np.array(units), target)
    bound = max(0.0, sorted(worst, reverse=True)[allowed(rate, free) - 1])
    high, low, said = _edges(curves, _quorum(len(curves)))
    floor, seen = _floor(curves), frame.places <= frame.now
    own = np.where(seen & ~_spike_at(run, frame, target), _best_so_far(run, frame, target), math.inf)
    above = np.flatnonzero(_excess(own, high, low, said, floor, target) > bound)
    unit = frame.unit(run)
    with np.errstate(invalid="ignore"):
        limit = np.where(said, high + bound * (high - low + floor), math.inf)
    return Comparison(
        outside=len(above) > 0, supported=supported(rate, free), references=len(references), way=way,
        at=float(frame.places[above[0]]) * unit if len(above) else math.nan,
        limit=Points(frame.places * unit, limit), usual=np.median(curves, axis=0),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where curves are compared. places: rising, over the whole life; now: the last that the run has an eval at.

    step: distance between evals that count. by_share: places are shares of training, else samples.
    """

    places: Array
    now: float
    step: float
    by_share: bool

    def unit(self, course: Course) -> float:
        """Samples in one unit of a place."""
        return course.length if self.by_share and course.length else 1.0


def _frame(run: Course, references: Sequence[Course]) -> _Frame:
    by_share = all(c.length is not None and c.length > 0 for c in (run, *references))
    frame = _Frame(np.empty(0), 0.0, 0.0, by_share)
    own, *theirs = (c.curve.samples / frame.unit(c) for c in (run, *references))
    end = 1.0 if by_share else max(float(x[-1]) for x in (own, *theirs) if len(x))
    usual = float(np.median([eval_interval(x) or end for x in theirs]))
    step = max(eval_interval(own), usual, end / MOST_PLACES)
    seen = own[thinned(own, step)]
    later = np.arange(seen[-1] + step, end * (1 + ROUNDING), step)
    return _Frame(np.append(seen, later), float(seen[-1]), step, by_share)


def thinned(places: Array, step: float) -> NDArray[np.int64]:
    """Indices of the first of ``places`` (rising) at or after each multiple of ``step``."""
    return np.unique(np.floor(places / step + ROUNDING), return_index=True)[1]


def _best_so_far(course: Course, frame: _Frame, target: float) -> Array:
    """The lowest loss that a run has shown by each place, between its evals on a line; ``target`` from its stop on.

    Infinite before its first eval.
    """
    places = course.curve.samples / frame.unit(course)
    stop = course.stop(target) / frame.unit(course)
    kept = thinned(places, frame.step)
    kept = kept[places[kept] < stop]
    x, lowest = places[kept], np.minimum.accumulate(course.curve.loss[kept])
    if math.isfinite(stop):
        x, lowest = np.append(x, stop), np.append(lowest, target)
    return np.interp(frame.places, x, lowest, left=math.inf) if len(x) else np.full(len(frame.places), math.inf)


def _best_nearby(course: Course, frame: _Frame, target: float) -> Array:
    """The lowest loss that a run has shown by the eval nearest to each place, as a run that is judged shows it.

    A line between two evals has less noise than an eval, by which a run would look worse than its references.
    """
    places = course.curve.samples / frame.unit(course)
    stop = course.stop(target) / frame.unit(course)
    kept = thinned(places, frame.step)
    kept = kept[places[kept] < stop]
    done = frame.places >= stop * (1 - ROUNDING)
    if not len(kept):
        return np.where(done, target, math.inf)
    lowest = np.minimum.accumulate(course.curve.loss[kept])
    middles = (places[kept][1:] + places[kept][:-1]) / 2
    found = lowest[np.searchsorted(middles, frame.places)]
    return np.where(done, target, np.where(frame.places < places[kept[0]] * (1 - ROUNDING), math.inf, found))


def _spike_at(course: Course, frame: _Frame, target: float) -> NDArray[np.bool_]:
    """Whether the last eval by each place is a spike, and the first of its kind in a row."""
    places = course.curve.samples / frame.unit(course)
    kept = thinned(places, frame.step)
    loss = course.curve.loss[kept]
    best = np.minimum.accumulate(np.append(loss[:1], loss[:-1]))
    spike = loss - best > SPIKE * np.maximum(loss[:1] - best, 0.0)
    spike &= best < loss[:1]
    alone = spike & ~np.append(False, spike[:-1])
    at = np.searchsorted(places[kept], frame.places * (1 + ROUNDING), side="right")
    return np.append(False, alone)[at] & (frame.places < course.stop(target) / frame.unit(course))


def _worst_beside_others(judged: Array, curves: Array, units: NDArray[np.int64], target: float) -> list[float]:
    """The nonconformity of each unit's worst member, as it is ``judged``, beside the ``curves`` of the other units."""
    order = np.argsort(units, kind="stable")
    judged, curves = judged[order], curves[order]
    starts, sizes = np.unique(units[order], return_index=True, return_counts=True)[1:]
    of = np.repeat(np.arange(len(starts)), sizes)
    known = np.isfinite(curves)
    lifted = np.where(known, curves, -math.inf)
    high = _of_others(np.maximum.reduceat(lifted, starts))[of]
    low = -_of_others(-np.minimum.reduceat(curves, starts))[of]
    top = _of_others(np.maximum.reduceat(lifted.max(axis=1), starts)[:, None])[of]
    bottom = -_of_others(-np.minimum.reduceat(curves.min(axis=1), starts)[:, None])[of]
    counts = known.sum(axis=0) - np.add.reduceat(known.astype(np.int64), starts)[of]
    enough = counts >= np.maximum(1, _quorum(len(curves)) - sizes[of])[:, None]
    scores = _excess(judged, high, low, enough, FLOOR * (top - bottom), target).max(axis=1)
    return [float(worst) for worst in np.maximum.reduceat(scores, starts)]


def _of_others(values: Array) -> Array:
    """For each row the largest of the other rows, by column."""
    first = values.argmax(axis=0)
    rest = values.copy()
    np.put_along_axis(rest, first[None, :], -math.inf, axis=0)
    own_first = np.arange(len(values))[:, None] == first
    return np.asarray(np.where(own_first, rest.max(axis=0), values.max(axis=0)), dtype=np.float64)


def _edges(curves: Array, quorum: int) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Highest and lowest curve by place, and whether enough of them are known there."""
    known = np.isfinite(curves)
    return np.where(known, curves, -math.inf).max(axis=0), curves.min(axis=0), known.sum(axis=0) >= quorum


def _floor(curves: Array) -> Array:
    return np.asarray(FLOOR * np.ptp(curves[np.isfinite(curves)]))


def _quorum(count: int) -> int:
    """References with an eval by a place, without which nothing is said there."""
    return max(2, math.ceil(count / 2))


def _excess(own: Array, high: Array, low: Array, said: NDArray[np.bool_], floor: Array, target: float) -> Array:
    """How far a curve lies above ``high``, by place; -inf where it is at the target or nothing is ``said``."""
    with np.errstate(invalid="ignore", divide="ignore"):
        excess = (own - high) / (high - low + floor)
    return np.where(said & np.isfinite(own) & (own > target) & ~np.isnan(excess), excess, -math.inf)
