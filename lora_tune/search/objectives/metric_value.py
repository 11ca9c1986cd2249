"""The best or the last value of a metric within a budget of steps, samples or seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lora_tune import curves
from lora_tune.config.study import Study
from lora_tune.curves.points import usable_loss
from lora_tune.logs.run import Eval, RunLog
from lora_tune.search.objectives.base import Finished, Ranking
from lora_tune.store.records import Trial

ROUNDING = 1e-9
"""Samples are products of steps and batch sizes; the last one within the budget is within it."""


class BestValue(Ranking):
    """The lowest eval of a run, or its highest with ``direction = "maximize"``."""

    judges_evals = True
    has_budget = True
    which = "lowest"
    rising = "highest"

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        self.maximise = study.rising
        self.heading = self.unit = study.measure

    @property
    def name(self) -> str:
        word = self.rising if self.maximise else self.which
        within = self._within()
        return f"{word} {self.study.measure}{within and f' within{within}'}"

    @property
    def nothing(self) -> str:
        return f"no trial measured its {self.name}"

    def text(self, value: float) -> str:
        return f"{value:.5g}"

    def scalar(self, value: float) -> str:
        return f"{self.unit} {value:.5g}"

    def over(self, trial: Trial, run: RunLog) -> str:
        limit, seconds = self._samples(trial), self.study.objective.within_seconds
        done = any(e.samples >= limit * (1 - ROUNDING) for e in run.evals)
        # A train point at the limit comes before the eval there.
        done = done or any(p.samples > limit * (1 + ROUNDING) for p in run.train[-1:])
        if seconds is not None and run.run_start_ms is not None and run.last_ms is not None:
            done = done or (run.last_ms - run.run_start_ms) / 1000 > seconds
        return f"used its budget of{self._within()}" if done else ""

    def measured(self, trial: Trial, run: RunLog, *, ended: bool) -> str:
        chosen = self._chosen(trial, run)
        if chosen is None or not (ended or self.over(trial, run)):
            return ""
        word = self.rising if self.maximise else self.which
        return f"{word} {self.study.eval_words(chosen)}"

    def value(self, done: Finished) -> float | None:
        chosen = self._chosen(done.trial, done.run)
        return None if chosen is None else self.study.shown(chosen.loss)

    def reported(self, loss: float) -> float | None:
        return self.study.shown(loss)

    def _chosen(self, trial: Trial, run: RunLog) -> Eval | None:
        """The eval that counts; the earliest of equal ones."""
        return min(self._counted(trial, run), key=lambda e: e.loss, default=None)

    def _counted(self, trial: Trial, run: RunLog) -> Sequence[Eval]:
        """The evals within the budget whose values are numbers."""
        limit, seconds = self._samples(trial) * (1 + ROUNDING), self.study.objective.within_seconds
        return [
            e
            for e in run.evals
            if usable_loss(e.loss) and e.samples <= limit and (seconds is None or e.seconds <= seconds)
        ]

    def _samples(self, trial: Trial) -> float:
        """Samples after which no eval counts; infinite where the study says none."""
        settings = self.study.objective
        batch = self.study.samples_a_step(trial.parameters) or 1.0
        steps = math.inf if settings.within_steps is None else settings.within_steps * batch
        return min(steps, math.inf if settings.within_samples is None else settings.within_samples)

    def _within(self) -> str:
        """The budget in words, with a blank before it; "" where a run's own end is all there is."""
        budget = " and ".join(f"{limit:g} {unit}" for limit, unit in self.study.objective.within)
        return f" {budget}" if budget else ""


class FinalValue(BestValue):
    """The last eval of a run within its budget."""

    which = rising = "final"

    def _chosen(self, trial: Trial, run: RunLog) -> Eval | None:
        return max(self._counted(trial, run), key=lambda e: e.samples, default=None)


# Samples a second: no target, and losses say nothing.


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
