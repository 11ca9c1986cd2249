"""The interval of a time to the target."""

from __future__ import annotations

from dataclasses import replace

from lora_tune.review.summary import time_interval
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Trial, Verdict

SEEN = Trial(
    number=0,
    seed=1,
    tuned={"LR": 1e-3},
    parameters={"LR": 1e-3},
    verdict=Verdict.REACHED,
    seconds=6.8,
    samples=30.0,
    metrics=TrialMetrics(crossing_low=29.0, crossing_high=30.0, pace_spread=0.01),
)


def test_a_time_that_was_seen_lies_within_its_crossing_and_its_pace() -> None:
    low, high = time_interval(SEEN)
    assert 6.5 < low < 6.8 < high < 6.95


def test_what_nobody_saw_pass_may_have_been_longer_or_shorter_by_as_much() -> None:
    """A driver that was away for the first second placed the first evals 0.5 s too late in a run of 7.3 s."""
    low, high = time_interval(replace(SEEN, metrics=replace(SEEN.metrics, estimated_seconds=0.55)))
    assert low <= 6.25
    assert high >= 7.35
    assert time_interval(replace(SEEN, metrics=replace(SEEN.metrics, estimated_seconds=6.8)))[0] == 0.0
