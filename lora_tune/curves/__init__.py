"""Eval curves: where a run crosses the target, its cost per sample, and when to stop it.

Pure functions of evals that never raise on bad data. See docs/statistics.md for the formulas and their calibration.
"""

from lora_tune.curves.family import Crossing, Family, estimate, learn_family, log_linear
from lora_tune.curves.forecast import Forecast, chance_text, expected_stop, forecast
from lora_tune.curves.phases import recognised, second_phase
from lora_tune.curves.published import Envelope, StallVerdict
from lora_tune.curves.timing import (
    EvalPlan,
    Healed,
    Schedule,
    Timing,
    choose_schedule,
    clock_seconds,
    fastest_pace,
    measured_throughput,
    pace_spread,
    predicted_seconds,
    samples_between_evals,
    timing,
)

__all__ = [
    "Crossing",
    "Envelope",
    "EvalPlan",
    "Family",
    "Forecast",
    "Healed",
    "Schedule",
    "StallVerdict",
    "Timing",
    "chance_text",
    "choose_schedule",
    "clock_seconds",
    "estimate",
    "expected_stop",
    "fastest_pace",
    "forecast",
    "learn_family",
    "log_linear",
    "measured_throughput",
    "pace_spread",
    "predicted_seconds",
    "recognised",
    "samples_between_evals",
    "second_phase",
    "timing",
]
