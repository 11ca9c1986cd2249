"""The port of an objective, and what most of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lora_tune.config.study import Study
from lora_tune.logs.run import Eval, RunLog
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that is over. seconds: to the target, as the study estimates them; None where it was not reached.

    metrics: what else is known of its trial, all but the objectives.
    """

    trial: Trial
    run: RunLog
    metrics: TrialMetrics
    seconds: float | None = None


class Objective(Protocol):
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

    maximise: bool
    has_target: bool
    timed: bool
    power_of_seconds: int
    judges_evals: bool
    unit: str
    heading: str

    @property
    def name(self) -> str:
        """What is compared, for people: "time to eval loss 0.5"."""
        ...

    @property
    def nothing(self) -> str:
        """What to say of a sweep without a value: "no trial reached eval loss 0.5"."""
        ...

    def text(self, value: float) -> str:
        """A value for people, with its unit."""
        ...

    def scalar(self, value: float) -> str:
        """A value as a number of four digits, with its unit, for lines that programs may read."""
        ...

    def stop(self, run: RunLog) -> Eval | None:
        """The eval that reached the target; None before it, and where there is none."""
        ...

    def over(self, trial: Trial, run: RunLog) -> str:
        """Why a run has no more to show although it goes on, in words; "" while it has."""
        ...

    def measured(self, trial: Trial, run: RunLog, *, ended: bool) -> str:
        """What a run measured, in words; "" while it has no value.

        Parameters
        ----------
        trial : Trial
            The trial, whose parameters may say how many samples a step has.
        run : RunLog
            What its log says.
        ended : bool
            The run came to its own end, without an error.
        """
        ...

    def value(self, done: Finished) -> float | None:
        """The value of a run that is over; None where it has none."""
        ...

    def reported(self, loss: float) -> float | None:
        """An eval as the sampler is told it while the run goes on; None where evals say nothing of the value."""
        ...

    def ranked(self, sweep: StudyRecords) -> list[Trial]:
        """The trials with a value, best first."""
        ...

    def better(self, value: float, other: float) -> bool:
        """Whether one value is better than another."""
        ...

    def word(self, verdict: Verdict) -> str:
        """A verdict for people: a trial that has its value has "reached" a target, or else is "measured"."""
        ...


class Ranking:
    """Order among values, the same for every objective."""

    maximise = False
    has_target = False
    timed = False
    power_of_seconds = 0
    judges_evals = False
    unit = ""
    heading = ""

    def __init__(self, study: Study) -> None:
        self.study = study

    def text(self, value: float) -> str:
        return self.scalar(value)

    def scalar(self, value: float) -> str:
        return f"{value:.4g} {self.unit}".rstrip()

    def stop(self, run: RunLog) -> Eval | None:
        return None

    def over(self, trial: Trial, run: RunLog) -> str:
        return ""

    def reported(self, loss: float) -> float | None:
        return None

    def ranked(self, sweep: StudyRecords) -> list[Trial]:
        done = [t for t in sweep.trials.values() if t.verdict is Verdict.REACHED and t.metrics.objective is not None]
        return sorted(done, key=lambda t: t.objective, reverse=self.maximise)

    def word(self, verdict: Verdict) -> str:
        return "measured" if verdict is Verdict.REACHED and not self.has_target else str(verdict)

    def better(self, value: float, other: float) -> bool:
        return value > other if self.maximise else value < other
