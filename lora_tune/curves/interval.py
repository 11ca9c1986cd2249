"""The eval schedule of the open division: evals cost time, and rare evals see a crossing late."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lora_tune.curves.crossing import Z90, Crossing
from lora_tune.curves.points import Array
from lora_tune.curves.timing import Schedule, Timing

QUANTILES = 201
INTERVALS = 64
FIRSTS = (0.001, 0.01, 0.05, 0.1, 0.2, 0.35, 0.5)


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The schedule to use, the seconds that a run is expected to take with it, and what it saves."""

    schedule: Schedule
    seconds: float
    saved_seconds: float
    sentence: str


def choose_schedule(
    crossing: Crossing, timing: Timing, *, step: float, current: Schedule, whole: bool = False
) -> EvalPlan:
    """The first eval and the interval, whole multiples of ``step`` (the global batch), of least expected run time.

    A run crosses at a log-normal number of samples with the estimate's interval; it stops at the first eval after
    that, so an interval I costs I/2 samples on average, and each eval its seconds. Luck with noisy evals is not
    counted: evals close together see the same weights on the same data. An estimate or a timing that is not finite
    leaves ``current`` as it is. whole: the first eval is a multiple of the interval, as where early ones are skipped.
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
    if timing.healed is not None:  # the second phase of each run at its own pace
        healed = timing.healed
        past = np.maximum(0.0, stops - healed.samples)
        evals = np.minimum(1 + later, np.ceil(past / schedule.interval_samples))
        slower = 1 / healed.samples_per_second - 1 / timing.samples_per_second
        whole = whole + past * slower + evals * (healed.seconds_per_eval - timing.seconds_per_eval)
        whole = whole + healed.switch_seconds * (past > 0)
    return float(whole.mean())
