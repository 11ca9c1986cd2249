"""Whether a configuration is handed over in place of another: by what may be gained and lost, deaths included."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

LEAST_ODDS = 13.0
"""Expected gain over expected loss from which on another configuration replaces what the user has.

Of a Gaussian belief that is one standard deviation, at which it is better with a chance of 84%.
"""
CLEAR_SDS = 1.0
"""The same in standard deviations."""
RUNS = (1, 3, 8)
"""Further runs of one configuration by which it is asked whether they would decide."""
MOST_SURVIVALS = 8
"""Short runs that a layout is given to show that it lives before it replaces the one of today."""
_RATES = 1 / (1 + np.exp(-np.linspace(-8.0, 7.0, 91)))
"""Chances of death between which a belief in one is summed."""


def death_logs(p: Array) -> Array:
    """ln of the factor that dying of memory with chance ``p`` costs: runs are repeated, a death costs half a run."""
    p = np.minimum(p, 0.999)
    return np.asarray(np.log1p(0.5 * p / (1 - p)))


@dataclass(frozen=True, slots=True)
class Deaths:
    """A Beta belief in the chance to die of memory: runs that died and lived, what was believed before included."""

    died: float = 0.0
    lived: float = 0.0

    def costs(self) -> tuple[Array, Array]:
        """Values (k) of ln(factor that deaths cost) with their shares (k) of the belief."""
        if not self.died > 0:
            return np.zeros(1), np.ones(1)
        from scipy.special import betainc

        below = betainc(self.died, max(self.lived, 1e-9), _RATES)
        shares = np.diff(np.r_[0.0, below, 1.0])
        between = np.sqrt(_RATES[1:] * _RATES[:-1])
        return death_logs(np.r_[0.0, between, 1.0]), shares


@dataclass(frozen=True, slots=True)
class SeedDoubt:
    """What is believed of the part of two configurations that runs scatter in, ln(samples).

    own, other, shared: variances of both and their covariance. run_sd: sd of one run.
    """

    own: float = 0.0
    other: float = 0.0
    shared: float = 0.0
    run_sd: float = 0.0

    @property
    def variance(self) -> float:
        """Of the difference."""
        return max(0.0, self.own + self.other - 2 * self.shared)

    def settled(self, runs: int, *, of_other: bool) -> float:
        """The part of :attr:`variance` that so many more runs of one of the two would settle."""
        alone = self.other if of_other else self.own
        told = alone + self.run_sd**2 / runs
        return min(self.variance, (alone - self.shared) ** 2 / told) if told > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Further runs of one of two configurations, and what they may decide.

    of_other: of the one that would be replaced. worth: ln(seconds) that each is expected to save.
    """

    runs: int
    of_other: bool
    worth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """What is believed of a configuration beside another.

    ln_saved, sd: of ln(the other's seconds over its own), of runs that live. seeds: the part of sd that more runs would
    settle. looks: how often the question was put. deaths, other_deaths: of memory, both empty where both have the same
    layout.
    """

    ln_saved: float
    sd: float
    seeds: SeedDoubt = SeedDoubt()
    looks: int = 1
    deaths: Deaths = field(default_factory=Deaths)
    other_deaths: Deaths = field(default_factory=Deaths)

    @property
    def share(self) -> float:
        """The share of the other's seconds that it is expected to save, deaths included."""
        return -math.expm1(-self._expected)

    @property
    def doubt(self) -> float:
        """The sd with what many looks add to it.

        One that is believed best of what ran is believed so by luck, too, and the question is put after every run. The
        luckiest of m errors is sqrt(2 ln m) standard deviations off, and n looks at much the same runs are worth
        sqrt(n) at others. Of forty looks at twelve that are no better one in ten is wrong once (a test), without this
        two in three.
        """
        return math.sqrt(self.sd**2 + self._luck * self.seeds.variance)

    def gain_and_loss(self) -> tuple[float, float]:
        """Expected ln(seconds) gained where it is better, and lost where it is worse."""
        costs, shares = self.deaths.costs()
        mean, sd = self.ln_saved + self._kept() - costs, max(self.doubt, 1e-9)
        from scipy.special import ndtr

        z = mean / sd
        gain = mean * ndtr(z) + sd * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return float(shares @ gain), float(shares @ (gain - mean))

    def after(self, survivals: int) -> Advantage:
        """The same once its layout has lived through so many more runs."""
        return replace(self, deaths=replace(self.deaths, lived=self.deaths.lived + survivals))

    @property
    def is_clear(self) -> bool:
        """Whether what may be lost is little beside what is gained."""
        gain, loss = self.gain_and_loss()
        return gain > 0 and gain >= LEAST_ODDS * loss

    def survivals_wanted(self) -> int | None:
        """Runs that its layout has to live through before it is clearly better; None where these alone do not tell."""
        return next((more for more in range(MOST_SURVIVALS + 1) if self.after(more).is_clear), None)

    def decision(self) -> Decision:
        """The further runs of one of the two that are worth most by what they may decide; worth nothing where it is
        clear."""
        if self.is_clear:
            return Decision(runs=0, of_other=False, worth=0.0)
        valued = [
            Decision(runs, other, self._decided(runs, of_other=other)) for runs in RUNS for other in (True, False)
        ]
        return max(valued, key=lambda decision: decision.worth)

    def _decided(self, runs: int, *, of_other: bool) -> float:
        """E[saved; clear] a run, the mean after them being Gaussian about today's: what is not clear saves nothing."""
        from scipy.special import ndtr

        mean, settled = self._expected, self.seeds.settled(runs, of_other=of_other)
        moved = math.sqrt(max(settled, 1e-18))
        left = math.sqrt(max(0.0, self.doubt**2 - (1 + self._luck) * settled))
        z = (mean - CLEAR_SDS * left) / moved
        return float(mean * ndtr(z) + moved * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)) / runs

    @property
    def _luck(self) -> float:
        """Variance that the looks so far add, in variances of the samples."""
        return math.log(max(1, self.looks))

    @property
    def _expected(self) -> float:
        """ln of the other's seconds over its own, deaths included."""
        costs, shares = self.deaths.costs()
        return self.ln_saved + self._kept() - float(shares @ costs)

    def _kept(self) -> float:
        """What the other's deaths cost, on average."""
        costs, shares = self.other_deaths.costs()
        return float(shares @ costs)
