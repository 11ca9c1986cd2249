"""Samples a second: no target, and losses say nothing."""

from __future__ import annotations

from lora_tune import curves
from lora_tune.config.study import Study
from lora_tune.logs.run import RunLog
from lora_tune.search.objectives.base import Finished, Ranking
from lora_tune.store.records import Trial


class Throughput(Ranking):
    """Warm samples/s, at most; of what the log counts where that is not samples."""

    maximise = True
    power_of_seconds = -1
    name = "throughput"
    nothing = "no trial measured its throughput"

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        self.unit = f"{study.progress_unit}/s"
        self.heading = self.unit.capitalize()

    def measured(self, trial: Trial, run: RunLog, *, ended: bool) -> str:
        speed = curves.measured_throughput(run)
        return f"measured {speed:.4g} {self.unit}" if speed else ""

    def value(self, done: Finished) -> float | None:
        return done.metrics.samples_per_second
