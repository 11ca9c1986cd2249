"""Time: the cost of a layout per sample and per eval, and the predicted duration of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from lora_tune.curves.family import Z90, Crossing
from lora_tune.curves.points import Array, eval_interval, points
from lora_tune.logs.run import RunLog

LARGEST_READING = 1e15
"""Largest plausible speed or duration; larger ones are corrupt."""

MIN_BLOCKS = 3
"""Fewest warm blocks for an estimate of their spread."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The deterministic part of a run's time.

    samples_per_second: training speed, evals excluded; NaN if the log does not state it.
    seconds_per_eval: duration of one eval; NaN if unknown.
    warm: False if only the cold first block was measured (about 1.5% slow on the public runs).
    healed: the second phase of a run that changes precision; the values above are then those of its first.
    """

    samples_per_second: float
    seconds_per_eval: float
    warm: bool = True
    healed: Healed | None = None

    def at(self, samples: float) -> Timing:
        """The timing of the phase that contains ``samples``."""
        if self.healed is None or samples < self.healed.samples:
            return self
        return Timing(self.healed.samples_per_second, self.healed.seconds_per_eval)


@dataclass(frozen=True, slots=True)
class Healed:
    """The second phase of a run that changes precision after ``samples``.

    switch_seconds: cost of the change itself (graphs are captured again), if a whole block of the second phase
    separates it from slower training; else ``samples_per_second`` includes it.
    """

    samples: float
    samples_per_second: float
    seconds_per_eval: float
    switch_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """An eval schedule: first at ``first_samples``, then every ``interval_samples``."""

    first_samples: float
    interval_samples: float


def timing(run: RunLog, healing: float = 0.0) -> Timing:
    """Medians over the run's warm blocks and evals; the first of each is dropped if there are more.

    Without logged throughput, from the evals' time stamps: the median over pairs of consecutive evals of the samples
    between them, divided by the seconds between them less the eval itself. healing: samples at which the run changed
    precision, 0 for never; each phase is then measured separately.
    """
    if healing > 0 and run.evals and run.evals[-1].samples > healing:
        first = _one_phase(_blocks(run, 0.0, healing))
        return replace(first, healed=_healed(run, first, healing))
    return _one_phase(run)


def _one_phase(run: RunLog) -> Timing:
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


def _blocks(run: RunLog, start: float, end: float) -> RunLog:
    """The run's training blocks within ``start`` to ``end`` samples, each with the eval at its end."""
    begins = (0.0, *(e.samples for e in run.evals[:-1]))
    kept = [
        i for i, (begin, e) in enumerate(zip(begins, run.evals, strict=True)) if start <= begin and e.samples <= end
    ]
    count = len(run.evals)
    return RunLog(
        evals=tuple(run.evals[i] for i in kept),
        throughput=tuple(run.throughput[i] for i in kept) if len(run.throughput) == count else (),
        eval_seconds=tuple(run.eval_seconds[i] for i in kept) if len(run.eval_seconds) == count else (),
    )


def _healed(run: RunLog, first: Timing, healing: float) -> Healed:
    """The second phase, from its whole blocks, else from the block in which it began."""
    whole = _blocks(run, healing, math.inf)
    evals = [s for e, s in zip(run.evals, run.eval_seconds, strict=False) if e.samples > healing and s > 0]
    aligned = len(run.eval_seconds) == len(run.evals) and evals
    per_eval = float(np.median(evals)) if aligned else first.seconds_per_eval
    at = next(i for i, e in enumerate(run.evals) if e.samples > healing)
    begin, end = (run.evals[at - 1].samples if at else 0.0), run.evals[at].samples
    speed = run.throughput[at] if len(run.throughput) == len(run.evals) else math.nan
    rest = (end - begin) / speed - (healing - begin) / first.samples_per_second if speed > 0 else math.nan
    speeds = _positive(whole.throughput)
    if not speeds:
        return Healed(healing, (end - healing) / rest if rest > 0 else first.samples_per_second, per_eval)
    later = float(np.median(speeds))
    switch = rest - (end - healing) / later
    return Healed(healing, later, per_eval, max(0.0, switch) if math.isfinite(switch) else 0.0)


def pace_spread(run: RunLog) -> float:
    """Relative sd of the run's speed over its warm blocks; 0 if unknown.

    Robust (1.4826 times the median absolute deviation, over the median), so that one slow block does not count.
    """
    speeds = np.array(_positive(run.throughput)[1:])
    if len(speeds) < MIN_BLOCKS:
        return 0.0
    middle = float(np.median(speeds))
    return 1.4826 * float(np.median(np.abs(speeds - middle))) / middle


def samples_between_evals(run: RunLog) -> float:
    """The median distance between evals in samples; 0 for fewer than two."""
    return eval_interval(points(run.evals).samples)


def predicted_seconds(samples: float, speed: Timing, schedule: Schedule) -> float:
    """Seconds from ``run_start`` to the stop of a run whose curve crosses the target at ``samples``.

    ``time = samples_to_target / samples_per_second + evals * seconds_per_eval``. The crossing is equally likely
    anywhere between two evals, so the expected stop is half an interval later, and not before the first eval.
    NaN if the speed is unknown, infinite if the crossing is. Unknown eval seconds count as 0.
    """
    if not math.isfinite(samples):
        return math.nan if math.isnan(samples) else math.inf
    interval = max(0.0, schedule.interval_samples)
    stop = max(schedule.first_samples, samples + interval / 2)
    healed = speed.healed
    if healed is None or stop <= healed.samples:
        return _phase_seconds(stop, _evals(stop, schedule), speed)
    early = _evals(healed.samples, schedule) if healed.samples >= schedule.first_samples else 0.0
    late = _evals(stop, schedule) - early
    second = _phase_seconds(stop - healed.samples, late, speed.at(stop))
    return _phase_seconds(healed.samples, early, speed) + healed.switch_seconds + second


def clock_seconds(crossing: Crossing, speed: Timing, schedule: Schedule) -> float | None:
    """The expected seconds of a run's configuration: the run's measured time, corrected for its luck.

    The correction is from the raw stop to the stop expected by the curve, at the run's pace. Time that the pace does
    not explain (a slow first block, a change of precision) is kept. None if the target was not reached; the measured
    time if the curve is doubtful or the pace unknown.
    """
    if crossing.stop_samples is None or crossing.stop_seconds is None:
        return None
    if crossing.by_stop:
        return crossing.stop_seconds
    now = predicted_seconds(crossing.stop_samples - max(0.0, schedule.interval_samples) / 2, speed, schedule)
    luck = predicted_seconds(crossing.samples, speed, schedule) - now
    corrected = crossing.stop_seconds + luck
    return corrected if math.isfinite(corrected) and corrected > 0 else crossing.stop_seconds


def _evals(stop: float, schedule: Schedule) -> float:
    interval = schedule.interval_samples
    return 1.0 + (stop - schedule.first_samples) / interval if interval > 0 else 1.0


def _phase_seconds(samples: float, evals: float, speed: Timing) -> float:
    per_eval = 0.0 if math.isnan(speed.seconds_per_eval) else speed.seconds_per_eval
    return samples / speed.samples_per_second + evals * per_eval if speed.samples_per_second > 0 else math.nan


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


# A trial's training speed: from its whole log, or before it has measured a whole block.


FEWEST_POINTS = 3
"""Fewest train-loss readings; the time before the first one is cold and left out."""


def fastest_pace(run: RunLog, stamp_seconds: float) -> float | None:
    """Upper bound of the run's samples/s by its train-loss readings; None for too few readings.

    From the first reading (which excludes start-up and the cold block) to the last, evals left out. Times may be wrong
    by ``stamp_seconds``, and samples by the smallest step between two readings (a trainer may round its epochs to
    hundredths); both are added in the run's favour. With 0 stamp_seconds the plain quotient is returned.
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
    """Samples/s: the program's figure for the whole run, else the median over warm blocks, else its last figure."""
    warm = timing(run).samples_per_second
    stated = run.stated_throughput[-1] if run.stated_throughput else math.nan
    known = (run.overall_throughput or math.nan, warm, stated)
    return next((speed for speed in known if math.isfinite(speed)), None)


# The eval schedule of the open division: evals cost time, and rare evals detect a crossing late.


QUANTILES = 201
INTERVALS = 64
FIRSTS = (0.001, 0.01, 0.05, 0.1, 0.2, 0.35, 0.5)


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """A schedule, the expected seconds of a run with it, and what it saves."""

    schedule: Schedule
    seconds: float
    saved_seconds: float
    sentence: str


def choose_schedule(
    crossing: Crossing, timing: Timing, *, step: float, current: Schedule, whole: bool = False
) -> EvalPlan:
    """The first eval and the interval, multiples of ``step`` (the global batch), with the least expected run time.

    A run crosses at a log-normal number of samples with the estimate's interval and stops at the first eval after
    that, so an interval I costs I/2 samples on average, and each eval its seconds. Lucky noise is not counted, because
    evals close together see the same weights on the same data. Returns ``current`` if the estimate or the timing is
    not finite. whole: make the first eval a multiple of the interval, as when early evals are skipped.
    """
    known = 0 < crossing.samples < math.inf and crossing.low > 0 and crossing.high < math.inf
    if not known or not timing.samples_per_second > 0 or not timing.seconds_per_eval >= 0 or not step > 0:
        return EvalPlan(current, math.nan, 0.0, "the eval schedule stays: no estimate or no timing to choose it by")
    crossings = _crossings(crossing)
    intervals = step * np.unique(np.geomspace(1, max(2.0, crossing.samples / step), INTERVALS).round())
    firsts = {step * max(1, math.floor(np.quantile(crossings, q) / step)) for q in FIRSTS}
    candidates = [_candidate(first, float(interval), whole) for first in sorted(firsts) for interval in intervals]
    best = min(candidates, key=lambda s: _seconds(s, crossings, timing))
    seconds, now = _seconds(best, crossings, timing), _seconds(current, crossings, timing)
    if seconds >= now:
        return EvalPlan(current, now, 0.0, f"the eval schedule stays: none is expected to beat its {now:.0f} s")
    return EvalPlan(
        best, seconds, now - seconds,
        f"first eval at {best.first_samples:g} samples, then every {best.interval_samples:g}: "
        f"{now - seconds:.0f} s less than now, of {now:.0f} s",
    )  # fmt: skip


def _candidate(first: float, interval: float, whole: bool) -> Schedule:
    return Schedule(max(1.0, first // interval) * interval if whole else first, interval)


def _crossings(crossing: Crossing) -> Array:
    sd = math.log(crossing.high / crossing.low) / (2 * Z90)
    from scipy.special import ndtri

    middles = (np.arange(QUANTILES) + 0.5) / QUANTILES
    return np.asarray(crossing.samples * np.exp(np.clip(sd * ndtri(middles), -50, 50)), dtype=np.float64)


def _seconds(schedule: Schedule, crossings: Array, timing: Timing) -> float:
    if not schedule.interval_samples > 0:
        return math.inf
    later = np.ceil(np.maximum(0.0, crossings - schedule.first_samples) / schedule.interval_samples - 1e-9)
    stops = schedule.first_samples + later * schedule.interval_samples
    whole = stops / timing.samples_per_second + (1 + later) * timing.seconds_per_eval
    if timing.healed is not None:  # the second phase of each run runs at its own pace
        healed = timing.healed
        past = np.maximum(0.0, stops - healed.samples)
        evals = np.minimum(1 + later, np.ceil(past / schedule.interval_samples))
        slower = 1 / healed.samples_per_second - 1 / timing.samples_per_second
        whole = whole + past * slower + evals * (healed.seconds_per_eval - timing.seconds_per_eval)
        whole = whole + healed.switch_seconds * (past > 0)
    return float(whole.mean())
