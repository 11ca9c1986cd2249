"""The configurations of a race, with the runs that they have had and the spread between seeds that they share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lora_tune.config.study import Study
from lora_tune.curves.family import LARGEST_EXPONENT
from lora_tune.search.race_limits import PRIOR_FREEDOM

PRIOR_SD = 0.05
"""Sd of ln(seconds) between seeds where the runs do not say and seconds are those of the fitted curve: 4.7% of samples
on the public runs, plus eval steps."""

RAW_SD = 0.068
"""The same where seconds are those of the raw stop: that within public test submissions at GBS 8."""

THROUGHPUT_SD = 0.002
"""The same of ln(samples/s): a warm block measures it (public runs: 0.14% between runs)."""

LEAST_SD = 1e-4
"""Runs that agree more closely than this are no evidence: clocks are read to the millisecond."""


def seed_spread(study: Study) -> float:
    """How much ln(objective) varies between seeds, where runs do not say: less by the fitted curve than by the stop."""
    if study.objective.score == "throughput":
        return THROUGHPUT_SD
    return PRIOR_SD if study.objective.estimator == "curve" else RAW_SD


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run of a configuration: seconds to target (infinite when it did not get there) and its node-hours."""

    seconds: float
    node_hours: float = 0.0


@dataclass(frozen=True, slots=True)
class Contender:
    """A configuration: ln(seconds) of its runs that reached the target, how many did not, its node-hours a run."""

    name: str
    logs: tuple[float, ...]
    failures: int
    node_hours: float

    @property
    def runs(self) -> int:
        return len(self.logs) + self.failures

    @property
    def mean(self) -> float:
        return float(np.mean(self.logs)) if self.logs else math.inf


def pooled_sd(configs: Sequence[Contender], prior_sd: float) -> tuple[float, float]:
    """Sd of ln(seconds) within configurations and its degrees of freedom; ``prior_sd`` fills in for missing ones."""
    own = sum(max(0, len(c.logs) - 1) for c in configs)
    missing = max(0, PRIOR_FREEDOM - own)
    squares = missing * prior_sd**2 + sum(float(((np.array(c.logs) - c.mean) ** 2).sum()) for c in configs if c.logs)
    return max(math.sqrt(squares / (missing + own)), LEAST_SD), float(missing + own)


def means(
    results: Mapping[str, Sequence[RunSummary]], prior_sd: float = PRIOR_SD
) -> dict[str, tuple[float, float, float]]:
    """Mean seconds (geometric) of each configuration that reached the target, with its 90% interval, low and high.

    Student's interval on ln(seconds), with the spread between seeds that all configurations share.
    """
    from scipy.special import stdtrit

    configs = [contender(name, runs) for name, runs in results.items()]
    sd, freedom = pooled_sd(configs, prior_sd)
    width = float(stdtrit(freedom, 0.95)) * sd
    reached = [(c, width / math.sqrt(len(c.logs))) for c in configs if c.logs]
    return {
        c.name: (bounded_exp(c.mean), bounded_exp(c.mean - half), bounded_exp(c.mean + half)) for c, half in reached
    }


def bounded_exp(x: float) -> float:
    """exp(x), held within a double's range."""
    return math.exp(max(-LARGEST_EXPONENT, min(LARGEST_EXPONENT, x)))


def contender(name: str, runs: Sequence[RunSummary]) -> Contender:
    logs = tuple(math.log(r.seconds) for r in runs if 0 < r.seconds < math.inf)
    hours = [r.node_hours for r in runs if math.isfinite(r.node_hours)]
    return Contender(name, logs, len(runs) - len(logs), float(np.mean(hours)) if hours else 0.0)


def pairs_of(leader: Contender, rival: Contender) -> float:
    """Pairs of runs that are worth as much as these unequal numbers: their harmonic mean."""
    return 2 / (1 / len(leader.logs) + 1 / len(rival.logs))
