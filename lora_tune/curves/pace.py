"""A trial's training speed: what its whole log says, and what can be said before it has measured a whole block."""

from __future__ import annotations

import math
from itertools import pairwise

from lora_tune.curves.timing import timing
from lora_tune.logs.run import RunLog

FEWEST_POINTS = 3
"""Train-loss readings before anything is said; what precedes the first one is cold and left out."""


def fastest_pace(run: RunLog, stamp_seconds: float) -> float | None:
    """The highest samples/s that the run's train-loss readings allow; None while there are too few.

    From the first reading (so that start-up and the cold block do not count) to the last, evals left out. Their times
    may be ``stamp_seconds`` wrong, and their samples by the smallest step between two readings (a trainer may round
    its epochs to hundredths): both count in the run's favour. With 0 stamp_seconds the plain quotient is returned.
    """
    points = run.train
    if len(points) < FEWEST_POINTS:
        return None
    seconds = points[-1].seconds - points[0].seconds - stamp_seconds - sum(run.eval_seconds)
    samples = points[-1].samples - points[0].samples
    if stamp_seconds:
        samples += min(b.samples - a.samples for a, b in pairwise(points))
    return samples / seconds if seconds > 0 and samples > 0 else None


def measured_throughput(run: RunLog) -> float | None:
    """Samples/s: what the program says of the whole run, else the median over warm blocks, else what it said last."""
    warm = timing(run).samples_per_second
    stated = run.stated_throughput[-1] if run.stated_throughput else math.nan
    known = (run.overall_throughput or math.nan, warm, stated)
    return next((speed for speed in known if math.isfinite(speed)), None)
