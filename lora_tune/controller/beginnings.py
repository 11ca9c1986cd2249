"""Whether a run's progress began at zero. Pure functions of its log.

A program that finds a checkpoint in a folder that trials share trains only the rest, in a part of the time.
"""

from __future__ import annotations

import math
from itertools import pairwise

from lora_tune.base.text import counted
from lora_tune.logs.failures import Diagnosis, FailureKind
from lora_tune.logs.run import Eval, RunLog, TrainPoint

FASTER = 3.0
"""How many times the fastest later pace is too fast for the way to the first point: compiling and warming up make it
slower. In 2,202 public runs that tell both it is 1.04 times at most (26 November 2026)."""

FARTHER = 2.0
"""Of the longest later stretch between two points, how much the way to the first one must be."""

MISSING_SECONDS = 2.0
"""A run that lacks less than this of its way ranks where it would with it; lines without stamps are seen so late."""


def begun_above_zero(run: RunLog, unit: str = "samples") -> Diagnosis | None:
    """Why a run's first point says that training had begun elsewhere, or None. unit: what the log counts.

    Evals take time, too, so only paces without them are compared: between train points, and of blocks whose evals the
    log marks. Of evals alone each is the end of a stretch with one eval in it: the longest stretch takes longest.
    """
    known: list[Eval | TrainPoint] = [*run.evals, *run.train]
    points = sorted((point.samples, point.seconds) for point in known if math.isfinite(point.seconds))
    fastest = _fastest_later(run)
    if len(points) < 3 or not 0 < fastest < math.inf:
        return None if run.train else _by_evals(run, unit)
    samples, seconds = points[0]
    farthest = max(after - before for (before, _), (after, _) in pairwise(points))
    missing = samples / fastest - seconds
    if seconds <= 0 or samples < FARTHER * farthest or missing <= MISSING_SECONDS:
        return None
    if samples / seconds <= FASTER * fastest:
        return None
    return _elsewhere(
        f"the log has {counted(samples, unit)} after {seconds:.1f} s, for which its own pace later needs "
        f"{samples / fastest:.1f} s"
    )


def _by_evals(run: RunLog, unit: str) -> Diagnosis | None:
    """That the first eval came sooner than any later one came after the one before, though after ``FASTER`` times the
    progress of each."""
    evals = sorted((e.samples, e.seconds) for e in run.evals if math.isfinite(e.seconds))
    if len(evals) < 3:
        return None
    (samples, seconds), later = evals[0], [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(evals)]
    farthest, shortest = max(done for done, _ in later), min(took for _, took in later)
    if samples < FASTER * farthest or seconds <= 0 or shortest - seconds <= MISSING_SECONDS:
        return None
    return _elsewhere(
        f"the log has {counted(samples, unit)} after {seconds:.1f} s, and {shortest:.1f} s or more before each later "
        f"eval, for {counted(farthest, unit)} at most"
    )


def _elsewhere(evidence: str) -> Diagnosis:
    return Diagnosis(
        FailureKind.CLOCK,
        evidence,
        "the trial is measured again; where its program goes on from another trial's checkpoint, give each trial a "
        "folder of its own ({folder} in the command), or tell it to begin anew",
    )


def _fastest_later(run: RunLog) -> float:
    """The highest pace after the first point, evals left out; 0 where none is known."""
    train = [point for point in run.train if math.isfinite(point.seconds)]
    between = ((b.samples - a.samples) / (b.seconds - a.seconds) for a, b in pairwise(train) if b.seconds > a.seconds)
    return max((pace for pace in (*run.throughput[1:], *between) if pace > 0), default=0.0)
