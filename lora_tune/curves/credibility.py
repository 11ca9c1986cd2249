"""Whether the published curves are believed in a study: what its good runs showed beside them, in order of their ends.

The study says that its curves are like the published ones; its own machine may say otherwise. Good runs that lie among
them begin the belief, at their global batch size alone; the first that lay outside ends it for the whole study.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lora_tune.curves.overlay import ComparedRun, thinned
from lora_tune.curves.points import Points
from lora_tune.curves.stall import IN_A_ROW, Envelope, higher, highest_pair, outside

PUBLISHED_STEP = 384.0
"""Samples between the evals of the public runs, by which their envelope is calibrated."""

UNLIKELY = 0.01
"""A run further outside of an envelope than this share of good runs ever lies speaks against the envelope, if it is
good; at a study's own rate, where that is lower."""


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
    """Hear a study's good runs in the order in which they ended. rate: its false-prune rate."""
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
    return math.isfinite(run.stop(target)) and _strays(run, target, envelope, min(rate, UNLIKELY), begin, shown)


def confirms(shown: Sequence[float], envelope: Envelope) -> bool:
    """Whether a study's good runs, by what :func:`shown_by` says of them, speak for the envelope: they lie among its.

    The upper 90% bound of their mean is no further outside than 1% of the published runs. Where ``envelope`` is of
    other curves than the study's, most good runs lie outside, and if they are all stopped none is left to contradict
    it. So it stops no run before it is confirmed.
    """
    return bool(shown) and higher(shown) <= envelope.threshold(UNLIKELY)


def _strays(
    run: ComparedRun, target: float, envelope: Envelope, rate: float, begin: float, shown: Sequence[float] = ()
) -> bool:
    """Whether the rule at ``rate`` would have stopped the run before it reached the target."""
    if shown_by(run, target, envelope, begin) <= envelope.limit(rate, shown):
        return False
    before = every(run.curve, PUBLISHED_STEP, begin, run.stop(target))
    lives = (Points(before.samples[:n], before.loss[:n]) for n in range(IN_A_ROW, len(before.samples) + 1))
    return any(outside(life, target, envelope, rate, shown).stop for life in lives)


def every(curve: Points, step: float, begin: float, end: float = math.inf) -> Points:
    """The evals from ``begin`` on and before ``end``, one in each ``step`` samples."""
    kept = thinned(curve.samples, step)
    kept = kept[(curve.samples[kept] >= begin) & (curve.samples[kept] < end)]
    return Points(curve.samples[kept], curve.loss[kept])
