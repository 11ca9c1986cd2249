"""A running trial's training speed, before it has measured a whole block."""

from __future__ import annotations

from lora_tune.mllog import Run

FEWEST_POINTS = 3
"""Train-loss readings before anything is said; the first interval is cold and left out."""


def fastest_pace(run: Run, stamp_seconds: float) -> float | None:
    """The highest samples/s that the run's train-loss readings allow; None while there are too few.

    From the first reading (so that start-up and the cold block do not count) to the last, evals left out. Their times
    may be ``stamp_seconds`` wrong at either end, which counts in the run's favour.
    """
    points = run.train
    if len(points) < FEWEST_POINTS:
        return None
    first, last = points[0], points[-1]
    seconds = last.seconds - first.seconds - stamp_seconds - sum(run.eval_seconds)
    samples = last.samples - first.samples
    return samples / seconds if seconds > 0 and samples > 0 else None
