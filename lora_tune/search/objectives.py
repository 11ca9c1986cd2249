"""What the trials of a sweep are compared by: one class a kind, named by ``objective.score``."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lora_tune import curves
from lora_tune.base.registry import OBJECTIVES
from lora_tune.base.text import duration
from lora_tune.config.study import Study
from lora_tune.curves.points import usable_loss
from lora_tune.logs.run import Eval, RunLog
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Trial, Verdict

__all__ = [
    "BestValue", "FinalValue", "Finished", "MlperfScore", "NodeHours", "Objective", "Throughput", "TimeToTarget",
    "objective_of", "objectives_of",
]  # fmt: skip

ROUNDING = 1e-9
"""Samples are products of steps and batch sizes; the last one within the budget is within it."""


def objective_of(study: Study) -> Objective:
    """The objective that ranks the study's trials."""
    return _made(study.objective.score, study)


def objectives_of(study: Study) -> tuple[Objective, ...]:
    """The objective, and behind it the second one where the study weighs two against each other."""
    names = (study.objective.score, study.objective.second)
    return tuple(_made(name, study) for name in names if name is not None)


def _made(name: str, study: Study) -> Objective:
    objective: Objective = OBJECTIVES.make(name, OBJECTIVES.load(name), study)
    return objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that is over. seconds: to the target, as the study estimates them; None where it was not reached.

    metrics: what else is known of its trial, all but the objectives.
    """

    trial: Trial
    run: RunLog
    metrics: TrialMetrics
    seconds: float | None = None


class Objective(abc.ABC):
    """What the trials of a sweep are compared by. Made of a study; pure.

    Attributes
    ----------
    maximise : bool
        A larger value is better.
    has_target : bool
        A run ends with the first eval at ``study.target``, and only then has a value.
    timed : bool
        The value is a time to the target, in seconds: it has an interval, forecasts and races.
    power_of_seconds : int
        How a value goes with the pace of the machine: 1 for a time, -1 for a speed, 0 for what is neither.
    judges_evals : bool
        Evals tell good runs from bad ones, so that curves are drawn, compared and pruned.
    unit : str
        What a value counts, behind its number; "" where the number says it.
    heading : str
        A column's heading.
    """

    maximise = False
    has_target = False
    timed = False
    power_of_seconds = 0
    judges_evals = False
    unit = ""
    heading = ""

    def __init__(self, study: Study) -> None:
        self.study = study

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What is compared, for people: "time to eval loss 0.5"."""

    @property
    @abc.abstractmethod
    def nothing(self) -> str:
        """What to say of a sweep without a value: "no trial reached eval loss 0.5"."""

    @abc.abstractmethod
    def measured(self, trial: Trial, run: RunLog, *, ended: bool) -> str:
        """What a run measured, in words; "" while it has no value. ended: it came to its own end, without an error."""

    @abc.abstractmethod
    def value(self, done: Finished) -> float | None:
        """The value of a run that is over; None where it has none."""

    def text(self, value: float) -> str:
        """A value for people, with its unit."""
        return self.scalar(value)

    def scalar(self, value: float) -> str:
        """A value as a number of four digits, with its unit, for lines that programs may read."""
        return f"{value:.4g} {self.unit}".rstrip()

    def stop(self, run: RunLog) -> Eval | None:
        """The eval that reached the target; None before it, and where there is none."""
        return None

    def over(self, trial: Trial, run: RunLog) -> str:
        """Why a run has no more to show although it goes on, in words; "" while it has."""
        return ""

    def reported(self, loss: float) -> float | None:
        """An eval as the sampler is shown it while the run goes on; None where evals say nothing of the value."""
        return None

    def verdict_name(self, verdict: Verdict) -> str:
        """A verdict for people: a trial that has its value has "reached" a target, or else is "measured"."""
        return "measured" if verdict is Verdict.REACHED and not self.has_target else str(verdict)

    def better(self, value: float, other: float) -> bool:
        """Whether one value is better than another."""
        return value > other if self.maximise else value < other


class TimeToTarget(Objective):
    """Seconds until an eval is at the target, at best."""

    has_target = True
    timed = True
    power_of_seconds = 1
    judges_evals = True
    unit = "s to the target"
    heading = "Time to target"

    @property
    def name(self) -> str:
        return f"time to {self.study.goal}"

    @property
    def nothing(self) -> str:
        return f"no trial reached {self.study.goal}"

    def text(self, value: float) -> str:
        return duration(value)

    def stop(self, run: RunLog) -> Eval | None:
        return run.reached(self.study.target)

    def measured(self, trial: Trial, run: RunLog, *, ended: bool) -> str:
        stop = self.stop(run)
        if stop is None:
            return ""
        packed = run.packed_seconds
        time = f"{stop.seconds:.1f} s" + ("" if packed is None else f" alone ({packed:.1f} s in its pack)")
        return f"{self.study.eval_text(stop)}, {time}"

    def value(self, done: Finished) -> float | None:
        return done.seconds

    def reported(self, loss: float) -> float | None:
        return loss


class MlperfScore(TimeToTarget):
    """The time to the target as MLPerf scores it: a run that converges faster than the reference is scaled back."""

    @property
    def name(self) -> str:
        return f"{super().name}, RCP-normalised"

    def value(self, done: Finished) -> float | None:
        score = done.metrics.mlperf_score
        return done.seconds if score is None else score


class NodeHours(TimeToTarget):
    """What a trial that reached its goal cost: node-hours of all its attempts, start-up included."""

    has_target = True
    timed = False
    unit = "node-hours"
    heading = "Node-hours"

    @property
    def name(self) -> str:
        return f"node-hours to {self.study.goal}" if self.study.objective.target is not None else "node-hours"

    def text(self, value: float) -> str:
        return self.scalar(value)

    def value(self, done: Finished) -> float | None:
        return done.metrics.node_hours


# The best or the last value of a metric within a budget of steps, samples or seconds.


class BestValue(Objective):
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
        return f"{word} {self.study.eval_text(chosen)}"

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


class Throughput(Objective):
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
