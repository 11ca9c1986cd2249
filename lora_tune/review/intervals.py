"""The interval of a trial's time to the target."""

from __future__ import annotations

import math
from statistics import NormalDist

from lora_tune.store.records import Trial


def time_interval(trial: Trial) -> tuple[float, float]:
    """A 90% interval, in seconds, for the time to the target of this configuration on this kind of machine.

    The interval of the crossing in samples, up to one eval interval later (a crossing is seen at the next eval), taken
    to seconds at this run's own pace; that pace varies as it did between the run's own blocks. Widened to hold the run.
    What of its time nobody saw pass may have been longer or shorter by as much, since only its ends are known.
    """
    assert trial.seconds is not None
    assert trial.samples is not None
    metrics, samples = trial.metrics, trial.samples
    low = samples if metrics.crossing_low is None else metrics.crossing_low
    high = (samples if metrics.crossing_high is None else metrics.crossing_high) + (metrics.eval_samples or 0.0)
    pace = NormalDist().inv_cdf(0.95) * (metrics.pace_spread or 0.0)

    def away(bound: float) -> float:
        known = samples > 0 and bound > 0
        return math.exp(math.hypot(math.log(bound / samples) if known else 0.0, pace))

    unseen = metrics.estimated_seconds or 0.0
    shortest, longest = trial.seconds / away(min(low, samples)), trial.seconds * away(max(high, samples))
    return max(0.0, min(shortest, trial.seconds - unseen)), max(longest, trial.seconds + unseen)
