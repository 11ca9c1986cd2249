"""Runs in two phases: trained in a low precision first and in a higher one ("healing") from some sample on.

The eval loss falls discontinuously within an eval or two of the change, and training is slower afterwards, so the first
phase says little about the samples and seconds of the second. Every statistic that takes ``healing`` (samples at the
change; 0: one phase) uses the evals of the second phase alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lora_tune.curves.points import Array, evals_of, points
from lora_tune.logs.run import Eval, RunLog

STEEPER = 3.0
"""Fall per ln(samples) at the change, in units of the median fall before it; runs with one phase stay below."""

SLOWER = 1.15
"""Seconds per sample, evals included, in the first interval after the change, relative to those before it."""

FEWEST_BEFORE = 2
"""Fewest intervals between evals before a change, needed to tell an unusual fall."""

FEWEST_AGREEING = 3
"""Runs whose curves must fall at the same place, if their pace does not change there."""

MOST_AGREE = 2 / 3
"""Share of the runs that reached the place in which the fall must occur."""


def second_phase(evals: Sequence[Eval], healing: float) -> Sequence[Eval]:
    """The evals after ``healing`` samples; all of them if it is 0."""
    return [e for e in evals if e.samples > healing] if healing > 0 else evals


def recognised(runs: Sequence[RunLog | Sequence[Eval]]) -> float:
    """Samples after which similar runs fall discontinuously; 0 if they do not.

    A curve falls so if its loss falls ``STEEPER`` times as fast as before, to below everything before. One run is
    enough if its pace drops in the same interval, else ``FEWEST_AGREEING`` runs must fall at the same place. Returns
    the samples of the last eval before the fall, so that later evals belong to the second phase.
    """
    places: Counter[float] = Counter()
    slowed: Counter[float] = Counter()
    curves = [evals_of(run) for run in runs]
    for evals in curves:
        at = _fall(evals)
        if at:
            places[evals[at - 1].samples] += 1
            slowed[evals[at - 1].samples] += _slows(evals, at)
    for place, count in places.most_common():
        came = sum(1 for evals in curves if evals and evals[-1].samples > place)
        if count >= MOST_AGREE * came and (slowed[place] >= MOST_AGREE * count or count >= FEWEST_AGREEING):
            return place
    return 0.0


def _fall(evals: Sequence[Eval]) -> int:
    """Index of the eval at the end of a discontinuous fall; 0 for none."""
    usable = points(evals)
    if len(usable.samples) != len(evals) or len(evals) < FEWEST_BEFORE + 2:
        return 0
    best = np.minimum.accumulate(usable.loss)
    slopes = _slopes(usable.samples, best)
    at = int(np.argmin(slopes[FEWEST_BEFORE:])) + FEWEST_BEFORE
    usual = min(float(np.median(slopes[:at])), 0.0)
    noise = 1.4826 * float(np.median(np.abs(slopes[:at] - usual)))
    return at + 1 if slopes[at] < STEEPER * usual - STEEPER * noise else 0


def _slopes(samples: Array, loss: Array) -> Array:
    return np.asarray(np.diff(loss) / np.diff(np.log(samples)), dtype=np.float64)


def _slows(evals: Sequence[Eval], at: int) -> bool:
    """Whether the interval that ends at eval ``at`` took longer per sample than those before it."""
    paces = [(b.seconds - a.seconds) / (b.samples - a.samples) for a, b in pairwise(evals)]
    before = [pace for pace in paces[: at - 1] if math.isfinite(pace)]
    return bool(before) and paces[at - 1] > SLOWER * float(np.median(before))
