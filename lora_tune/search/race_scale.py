"""What the runs of a race are compared on: the logarithm of a time, a speed or a cost; a metric's value as it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lora_tune.config.spent import counts_node_hours, spent_phrase
from lora_tune.config.study import Study
from lora_tune.curves.family import LARGEST_EXPONENT
from lora_tune.search.objectives import objective_of

PRIOR_FREEDOM = 4
"""Degrees of freedom of the spread between seeds, which the prior makes up while the runs have fewer. From three runs
of two configurations on it counts no more: a prior of 5% let 18% of equal pairs be separated where it was 10%."""

PRIOR_SD = 0.05
"""Sd of ln(seconds) between seeds where the runs do not say and seconds are those of the fitted curve: 4.7% of samples
on the public runs, plus eval steps."""

RAW_SD = 0.068
"""The same where seconds are those of the raw stop: that within public test submissions at GBS 8."""

THROUGHPUT_SD = 0.002
"""The same of ln(samples/s): a warm block measures it (public runs: 0.14% between runs)."""

LEAST_SD = 1e-4
"""Runs that agree more closely than this, relative to their size, are no evidence: clocks are read to the millisecond,
and scripts print four digits."""


LARGEST = 1e100
"""A value beyond is none: the run blew up, and squares of it are no numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceScale:
    """Turns results into numbers of which a smaller one is better and whose differences mean the same everywhere.

    Parameters
    ----------
    relative : bool
        Logarithms are compared, and differences are shares; else the values, which may be of either sign.
    maximise : bool
        A larger result is better.
    prior_sd : float
        Spread between seeds on this scale, where the runs do not say.
    prior_freedom : int
        Degrees of freedom that it is worth; 0 where nothing is known of a spread before there are runs.
    timed : bool
        A better result is a faster one.
    got, missed : str
        What a run did that has a result, and what one did that has none.
    machine_time : bool
        What runs cost is said in machine time, not in node-hours.
    """

    relative: bool = True
    maximise: bool = False
    prior_sd: float = PRIOR_SD
    prior_freedom: int = PRIOR_FREEDOM
    timed: bool = True
    got: str = "reached the target"
    missed: str = "did not reach the target"
    machine_time: bool = False

    @property
    def better(self) -> str:
        """What the leading one is, for people."""
        return "faster" if self.relative and self.timed else "better"

    def inward(self, result: float) -> float | None:
        """A result as it is compared; None where it is none."""
        if not abs(result) <= LARGEST or (self.relative and result <= 0):
            return None
        return self._sign * (math.log(result) if self.relative else result)

    def order(self, result: float | None) -> float:
        """What results are sorted by, the best first; those that are none come last."""
        place = None if result is None else self.inward(result)
        return math.inf if place is None else place

    def outward(self, x: float) -> float:
        """The reverse of :meth:`inward`, held within a double's range."""
        return bounded_exp(self._sign * x) if self.relative else self._sign * x + 0.0  # no "-0"

    def interval(self, middle: float, half: float) -> tuple[float, float, float]:
        """(middle, low, high) as results, of a place and a half-width on this scale."""
        low, high = sorted((self.outward(middle - half), self.outward(middle + half)))
        return self.outward(middle), low, high

    def difference(self, x: float) -> float:
        """How far two results lie apart: a share, or in their own unit."""
        return bounded_exp(x) - 1 if self.relative else x

    def text(self, difference: float) -> str:
        """A :meth:`difference` for people."""
        return f"{100 * difference:.1f}%" if self.relative else f"{difference:.3g}"

    def spent(self, node_hours: float) -> str:
        """What runs cost, for people."""
        return spent_phrase(node_hours, machine_time=self.machine_time)

    def least_sd(self, places: Sequence[float]) -> float:
        """The spread below which runs are no evidence. places: of all runs."""
        size = 1.0 if self.relative else max(map(abs, places), default=1.0)
        return LEAST_SD * (size or 1.0)

    @property
    def _sign(self) -> float:
        return -1.0 if self.maximise else 1.0


TIMES = RaceScale()
"""Times to a target."""


def scale_of(study: Study) -> RaceScale:
    """What the runs of a study's race are compared on."""
    objective, spread, by_machine_time = objective_of(study), seed_spread(study), not counts_node_hours(study)
    if objective.has_target:
        return RaceScale(prior_sd=spread, timed=objective.timed, machine_time=by_machine_time)
    valued = RaceScale(
        maximise=objective.maximise, prior_sd=spread, got="measured a value", missed="measured no value",
        machine_time=by_machine_time,
    )  # fmt: skip
    return replace(valued, relative=False, prior_sd=0.0, prior_freedom=0) if objective.judges_evals else valued


def seed_spread(study: Study) -> float:
    """How much ln(objective) varies between seeds, where runs do not say: less by the fitted curve than by the stop."""
    if study.objective.score == "throughput":
        return THROUGHPUT_SD
    return PRIOR_SD if study.objective.estimator == "curve" else RAW_SD


def bounded_exp(x: float) -> float:
    """exp(x), held within a double's range."""
    return math.exp(max(-LARGEST_EXPONENT, min(LARGEST_EXPONENT, x)))
