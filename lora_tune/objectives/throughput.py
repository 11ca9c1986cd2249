"""Samples a second: no target, and losses say nothing."""

from __future__ import annotations

from lora_tune import curves
from lora_tune.logs.run import RunLog
from lora_tune.objectives.base import Finished, Ranking
from lora_tune.store.records import Trial


class Throughput(Ranking):
    """Warm samples/s, at most."""

    maximise = True
    unit = "samples/s"
    heading = "Samples/s"
    name = "throughput"
    nothing = "no trial measured its throughput"

    def measured(self, trial: Trial, run: RunLog, *, ended: bool) -> str:
        speed = curves.measured_throughput(run)
        return f"measured {speed:.4g} samples/s" if speed else ""

    def value(self, done: Finished) -> float | None:
        return done.metrics.samples_per_second
