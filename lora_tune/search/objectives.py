"""Objectives by which the trials of a sweep are compared, selected by ``objective.score``."""

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
"""Tolerance for the last samples within a budget, since samples are products of steps and batch sizes."""


def objective_of(study: Study) -> Objective:
    """The objective that ranks the study's trials."""
    return _made(study.objective.score, study)


def objectives_of(study: Study) -> tuple[Objective, ...]:
    """The objective, followed by the second one if the study has two."""
    names = (study.objective.score, study.objective.second)
    return tuple(_made(name, study) for name in names if name is not None)


def _made(name: str, study: Study) -> Objective:
    objective: Objective = OBJECTIVES.make(name, OBJECTIVES.load(name), study)
    return objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A finished run. seconds: to the target, by the study's estimator; None if it was not reached.

    metrics: of its trial, except the objectives.
    """

    trial: Trial
    run: RunLog
    metrics: TrialMetrics
    seconds: float | None = None


class Objective(abc.ABC):
    """Objective by which trials are compared. Constructed from a study; pure.

    Attributes
    ----------
    maximise : bool
        A larger value is better.
    has_target : bool
        A run ends with the first eval at ``study.target``, and only then has a value.
    timed : bool
        The value is a time to the target in seconds, with interval, forecasts and races.
    power_of_seconds : int
        Exponent of the machine's slowdown in a value: 1 for a time, -1 for a speed, 0 otherwise.
    judges_evals : bool
        Evals distinguish good runs from bad ones, so that curves are drawn, compared and pruned.
    unit : str
        Unit after the number; "" if the text includes it.
    heading : str
        Column heading.
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
        """Description for people: "time to eval loss 0.5"."""

    @property
    @abc.abstractmethod
    def nothing(self) -> str:
        """Message for a sweep without a value: "no trial reached eval loss 0.5"."""

    @abc.abstractmethod
    def measured(self, trial: Trial, run: RunLog, *, ended: bool) -> str:
        """What a run measured, in words; "" if it has no value yet. ended: it ended by itself without an error."""

    @abc.abstractmethod
    def value(self, done: Finished) -> float | None:
        """Value of a finished run; None if it has none."""

    def text(self, value: float) -> str:
        """A value for people, with its unit."""
        return self.scalar(value)

    def scalar(self, value: float) -> str:
        """A value with four digits and its unit, for lines that programs may read."""
        return f"{value:.4g} {self.unit}".rstrip()

    def stop(self, run: RunLog) -> Eval | None:
        """The eval that reached the target; None before it, or without a target."""
        return None

    def over(self, trial: Trial, run: RunLog) -> str:
        """Why a running trial can be ended, in words; "" if it cannot."""
        return ""

    def reported(self, loss: float) -> float | None:
        """An eval as reported to the sampler while the run continues; None if evals are no evidence on the value."""
        return None

    def verdict_name(self, verdict: Verdict) -> str:
        """A verdict for people: a trial with a value has "reached" a target, or else is "measured"."""
        return "measured" if verdict is Verdict.REACHED and not self.has_target else str(verdict)

    def better(self, value: float, other: float) -> bool:
        """Whether one value is better than another."""
        return value > other if self.maximise else value < other


class TimeToTarget(Objective):
    """Seconds to the first eval at the target; minimised."""

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
    """Time to the target as MLPerf scores it: normalised if a run converges faster than the reference."""

    @property
    def name(self) -> str:
        return f"{super().name}, RCP-normalised"

    def value(self, done: Finished) -> float | None:
        score = done.metrics.mlperf_score
        return done.seconds if score is None else score


class NodeHours(TimeToTarget):
    """Cost of a trial that reached its goal: node-hours of all its attempts, including start-up."""

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
        """The finite evals within the budget."""
        limit, seconds = self._samples(trial) * (1 + ROUNDING), self.study.objective.within_seconds
        return [
            e
            for e in run.evals
            if usable_loss(e.loss) and e.samples <= limit and (seconds is None or e.seconds <= seconds)
        ]

    def _samples(self, trial: Trial) -> float:
        """Samples after which evals are ignored; infinite without a limit."""
        settings = self.study.objective
        batch = self.study.samples_a_step(trial.parameters) or 1.0
        steps = math.inf if settings.within_steps is None else settings.within_steps * batch
        return min(steps, math.inf if settings.within_samples is None else settings.within_samples)

    def _within(self) -> str:
        """The budget in words, with a leading blank; "" without one."""
        budget = " and ".join(f"{limit:g} {unit}" for limit, unit in self.study.objective.within)
        return f" {budget}" if budget else ""


class FinalValue(BestValue):
    """The last eval of a run within its budget."""

    which = rising = "final"

    def _chosen(self, trial: Trial, run: RunLog) -> Eval | None:
        return max(self._counted(trial, run), key=lambda e: e.samples, default=None)


# Throughput: no target, and losses are ignored.


class Throughput(Objective):
    """Warm samples/s, or the log's unit of progress per second; maximised."""

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
