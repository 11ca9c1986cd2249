"""Is a run worse than every run that got there? A conformal comparison over whole lives, exact for any shape of curve.

Nonconformity of a run beside others: over its life, how far its best loss so far lies above the highest of theirs at
the same place, in units of the distance between their highest and lowest,

    A = max_u (y(u) - U(u)) / (U(u) - L(u) + F),    U, L: highest and lowest of the others,

where F is 2% of the highest of their usual heights above the target. A metric that is no number at first counts by how
long it was none, b: at least ``(b - U) / (U - L + a tenth of the life)``, with the longest and shortest of the others.

A run is outside at rate a when its A is larger than the k-th largest that the n references have beside one another,
k = max(1, floor(a (n + 1))). An eval that is a spike waits for the next one. A falls when more runs are compared with:
``(y - U) / (U - L + F)`` does in each place where it is positive. So if the run and its references are exchangeable, a
run outside is among the k largest of all n + 1, each beside the n others: probability at most k / (n + 1), whatever
the curves look like and however often it is asked (Vovk, Gammerman and Shafer 2005, section 2.2; bands over whole
curves: Diquigiovanni, Fontana and Vantini 2022).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lora_tune.curves.overlay import ROUNDING, ComparedRun, Frame, best_nearby, best_so_far, frame_of, lay, spike_at
from lora_tune.curves.points import Array, Points

FEWEST = 3
"""References (or kinds of them) from which on each has two others to be compared with."""

FLOOR = 0.02
"""Share of the references' usual height above the target that is added to their distance, where they may be equal."""


BLANK = 0.1
"""Share of a life that is added to the distance between references' first numbers, where they may be equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What references say of a run.

    outside: whether it lies further outside than the rate allows; at: samples where it first did (NaN: nowhere).
    supported: the share of good runs that may lie there, at most, k / (n + 1); 1 where too few references say nothing.
    references: how many were compared with. way: "like" (of the run's own kind), "pooled" (of all kinds, its own
    among them), "unlike" (of other kinds alone: the band is as wide as these kinds differ), "foreign" (none has the
    run's task), "none" (too few).
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


def compare(run: ComparedRun, references: Sequence[ComparedRun], *, target: float, rate: float) -> Comparison:
    """Compare a run's evals so far with finished runs that reached ``target``.

    Runs are laid over one another by share of training where all lengths are known, else by samples. They are
    seen at the coarser of the run's and the references' usual distance between evals, so that dense and sparse evals
    get the same answer.
    """
    references = [r for r in references if math.isfinite(r.stop(target))]
    if references and not any(r.free and r.task == run.task for r in references):
        return Comparison(way="foreign")
    group = _group(run, references, rate)
    if group.free < FEWEST or not (len(run.curve.samples) or run.blank):
        return Comparison()
    return _beside(run, group, target, rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Who is compared with, and whose place among the others counts.

    units: those of one unit are left out together when one of them is judged. ranked: references whose units' scores
    count. free: how many of these units nothing could have stopped.
    """

    references: Sequence[ComparedRun]
    units: Sequence[Hashable]
    ranked: Sequence[bool]
    way: str

    @property
    def free(self) -> int:
        rows = zip(self.units, self.ranked, self.references, strict=True)
        return len({unit for unit, ranked, r in rows if ranked and r.free})


def _group(run: ComparedRun, references: Sequence[ComparedRun], rate: float) -> _Group:
    """Runs of a kind that supports the rate alone are compared within it, the others among themselves.

    Whether a kind is one of them is settled with the run counted in, and only where the rest supports the rate too:
    then a run and its references fall into the same group whichever of them is the one that is judged, without which
    the rate would not hold for the rest. A run whose kind nobody shares is compared by whole kinds.
    """
    free = Counter(r.alike for r in references if r.free)
    if not free[run.alike]:
        return _Group(references=references, units=[r.alike for r in references], ranked=[True] * len(references),
                      way="unlike")  # fmt: skip
    enough, free[run.alike] = max(FEWEST, needed(rate)), free[run.alike] + 1
    rest = sum(count for count in free.values() if count <= enough)
    split = rest == 0 or rest > enough
    if split and free[run.alike] > enough:
        references, way = [r for r in references if r.alike == run.alike], "like"
    else:
        way = "pooled"
    ranked = [way == "like" or not split or free[r.alike] <= enough for r in references]
    return _Group(references=references, units=range(len(references)), ranked=ranked, way=way)


def _beside(run: ComparedRun, group: _Group, target: float, rate: float) -> Comparison:
    """Where the run lies further above the group than the rate allows: above the free ones, and above all.

    Those that the rule let through may only widen the band. They come to fill it up to its limit, where each looks
    ordinary beside the others: by them the limit would close in on runs that are as good as the free ones.
    """
    references = group.references
    frame = frame_of(run, references)
    laid, mine = [lay(r, frame, target) for r in references], lay(run, frame, target)
    curves = np.array([best_so_far(r, frame, target) for r in laid])
    spiky = np.array([spike_at(r, frame) for r in laid])
    judged = np.where(spiky, math.inf, np.array([best_nearby(r, frame, target) for r in laid]))
    kinds = list(dict.fromkeys(group.units))
    units = np.array([kinds.index(unit) for unit in group.units])
    rows = _Rows(judged, curves, units, np.array(group.ranked), np.array([r.blank / frame.unit(r) for r in references]))
    free, unit = np.array([r.free for r in references]), frame.unit(run)
    bands = [
        _band(r, frame, target, allowed(rate, group.free)) for r in ((rows,) if free.all() else (rows, rows.only(free)))
    ]
    limit = np.maximum.reduce([band.limit for band in bands])
    own = np.where((frame.places <= frame.now) & ~spike_at(mine, frame), best_so_far(mine, frame, target), target)
    outside = np.isfinite(own) & (own > target) & (own > limit)
    outside |= (frame.places >= frame.now) & (run.blank / unit > max(band.blank for band in bands))
    above = np.flatnonzero(outside)
    return Comparison(
        outside=len(above) > 0, supported=supported(rate, group.free), references=len(references), way=group.way,
        at=float(frame.places[above[0]]) * unit if len(above) else math.nan,
        limit=Points(frame.places * unit, limit), usual=np.median(curves, axis=0),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Rows:
    """References in a frame, a row each.

    judged: losses as those of a run that is judged; curves: as others are compared with them. units, ranked: see
    ``_Group``. blanks: places up to which their metrics were no numbers.
    """

    judged: Array
    curves: Array
    units: NDArray[np.int64]
    ranked: NDArray[np.bool_]
    blanks: Array

    def only(self, kept: NDArray[np.bool_]) -> _Rows:
        """Those of the rows that are ``kept``."""
        return _Rows(
            self.judged[kept], self.curves[kept], self.units[kept], self.ranked[kept], self.blanks[kept]
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Band:
    """The loss above which a run is outside, by place (infinite where nothing is said), and the same for its blank."""

    limit: Array
    blank: float


def _band(rows: _Rows, frame: Frame, target: float, rank: int) -> _Band:
    """What the ``rank``-th largest nonconformity of the references allows."""
    life, numbers = float(frame.places[-1]), np.unique(rows.units)
    worst = np.maximum(
        _worst_beside_others(rows.judged, rows.curves, rows.units, target),
        _blank_beside_others(rows.blanks, rows.units, life),
    )
    bound = max(0.0, float(np.sort(worst[np.isin(numbers, rows.units[rows.ranked])])[-rank]))
    high, low, covered = _edges(rows.curves, _quorum(len(rows.curves)))
    floor = FLOOR * float(_heights(rows.curves, target).max())
    with np.errstate(invalid="ignore"):
        limit = np.where(covered, high + bound * (high - low + floor), math.inf)
    return _Band(limit, float(rows.blanks.max() + bound * (np.ptp(rows.blanks) + BLANK * life)))


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
    floor = FLOOR * _of_others(np.maximum.reduceat(_heights(curves, target), starts)[:, None])[of]
    counts = known.sum(axis=0) - np.add.reduceat(known.astype(np.int64), starts)[of]
    enough = counts >= np.maximum(1, _quorum(len(curves)) - sizes[of])[:, None]
    scores = _excess(judged, high, low, enough, floor, target).max(axis=1)
    return [float(worst) for worst in np.maximum.reduceat(scores, starts)]


def _blank_beside_others(blanks: Array, units: NDArray[np.int64], life: float) -> Array:
    """The nonconformity of each unit's last first number beside those of the other units."""
    return np.array([_later(float(blanks[units == u].max()), blanks[units != u], life) for u in np.unique(units)])


def _later(blank: float, good: Array, life: float) -> float:
    """How much longer a metric was no number than those of good runs, in units of their range."""
    return float((blank - good.max()) / (np.ptp(good) + BLANK * life)) if len(good) else 0.0


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


def _heights(curves: Array, target: float) -> Array:
    """The median height of each curve above the target before its stop: a first eval far off does not count."""
    above = np.where(np.isfinite(curves) & (curves > target), curves - target, math.nan)
    above[np.isnan(above).all(axis=1), 0] = 0.0
    return np.asarray(np.nanmedian(above, axis=1), dtype=np.float64)


def _quorum(count: int) -> int:
    """References with an eval by a place, without which nothing is said there."""
    return max(2, math.ceil(count / 2))


def _excess(
    own: Array, high: Array, low: Array, covered: NDArray[np.bool_], floor: Array | float, target: float
) -> Array:
    """How far a curve lies above ``high``, by place; -inf where it is at the target or nothing is ``covered``."""
    with np.errstate(invalid="ignore", divide="ignore"):
        excess = (own - high) / (high - low + floor)
    return np.where(covered & np.isfinite(own) & (own > target) & ~np.isnan(excess), excess, -math.inf)
