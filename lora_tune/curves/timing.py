"""Seconds: what a layout costs per sample and per eval, and what a run will therefore take."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lora_tune.curves.points import eval_interval, points
from lora_tune.logs.mllog import RunLog

LARGEST_READING = 1e15
"""A speed or a duration beyond this is a corrupt reading."""

MIN_BLOCKS = 3
"""Warm blocks before their spread says anything."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The deterministic half of a run's time.

    samples_per_second: training speed, evals excluded; NaN when the log says nothing of it.
    seconds_per_eval: length of one eval; NaN when unknown.
    warm: False when only the cold first block was there to measure (about 1.5% slow on the public runs).
    """

    samples_per_second: float
    seconds_per_eval: float
    warm: bool = True


@dataclass(frozen=True, slots=True)
class Schedule:
    """When a run evaluates: first at ``first_samples``, then every ``interval_samples``."""

    first_samples: float
    interval_samples: float

    def evals_until(self, samples: float) -> int:
        """Evals made up to and including the one that can see a crossing at ``samples`` (at least 1)."""
        if not self.interval_samples > 0 or not math.isfinite(samples):
            return 1
        return 1 + max(0, math.ceil((samples - self.first_samples) / self.interval_samples - 1e-9))

    def stop_after(self, samples: float) -> float:
        """The samples of the first eval at or after a crossing at ``samples``."""
        return self.first_samples + (self.evals_until(samples) - 1) * max(0.0, self.interval_samples)


def timing(run: RunLog) -> Timing:
    """Medians over the run's warm blocks and evals: the first of each is dropped when there are more.

    Falls back to the evals' time stamps when the log carries no throughput: the median over pairs of evals of
    samples between them, per second between them less the eval itself.
    """
    speeds = _positive(run.throughput)
    evals = _positive(run.eval_seconds)
    seconds_per_eval = float(np.median(evals[1:] if len(evals) > 1 else evals)) if evals else math.nan
    if len(speeds) > 1:
        return Timing(float(np.median(speeds[1:])), seconds_per_eval)
    if len(run.evals) > 2:
        speed = _speed_from_stamps(run, 0.0 if math.isnan(seconds_per_eval) else seconds_per_eval)
        if speed is not None:
            return Timing(speed, seconds_per_eval)
    return Timing(speeds[0] if speeds else math.nan, seconds_per_eval, warm=False)


def pace_spread(run: RunLog) -> float:
    """How much the run's own speed varied, as a relative standard deviation over its warm blocks; 0 when unknown.

    Robust (1.4826 times the median absolute deviation, over the median): one hiccup is not a noisy machine.
    """
    speeds = np.array(_positive(run.throughput)[1:])
    if len(speeds) < MIN_BLOCKS:
        return 0.0
    middle = float(np.median(speeds))
    return 1.4826 * float(np.median(np.abs(speeds - middle))) / middle


def samples_between_evals(run: RunLog) -> float:
    """The median distance between evals in samples; 0 when there are fewer than two."""
    return eval_interval(points(run.evals).samples)


def predicted_seconds(samples: float, speed: Timing, schedule: Schedule) -> float:
    """Seconds from ``run_start`` to the stop of a run whose curve crosses the target at ``samples``.

    ``time = samples_to_target / samples_per_second + evals * seconds_per_eval``, with the crossing equally likely
    anywhere between two evals, so the stop is expected half an interval after it, and not before the first eval.
    NaN where the speed is unknown, infinite where the crossing is. Unknown eval seconds count as 0.
    """
    if not math.isfinite(samples):
        return math.nan if math.isnan(samples) else math.inf
    interval = max(0.0, schedule.interval_samples)
    stop = max(schedule.first_samples, samples + interval / 2)
    evals = 1.0 + (stop - schedule.first_samples) / interval if interval else 1.0
    per_eval = 0.0 if math.isnan(speed.seconds_per_eval) else speed.seconds_per_eval
    return stop / speed.samples_per_second + evals * per_eval if speed.samples_per_second > 0 else math.nan


def _positive(values: tuple[float, ...]) -> list[float]:
    return [v for v in values if 0 < v <= LARGEST_READING]


def _speed_from_stamps(run: RunLog, seconds_per_eval: float) -> float | None:
    pairs = zip(run.evals, run.evals[1:], strict=False)
    speeds = [
        (b.samples - a.samples) / (b.seconds - a.seconds - seconds_per_eval)
        for a, b in pairs
        if b.samples > a.samples and b.seconds - a.seconds > seconds_per_eval
    ]
    readable = [s for s in speeds if 0 < s <= LARGEST_READING]
    return float(np.median(readable)) if readable else None
