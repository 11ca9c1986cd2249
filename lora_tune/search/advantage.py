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


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """What is believed of a configuration beside another.

    ln_saved, sd: of ln(the other's seconds over its own), of runs that live. deaths, other_deaths: of memory, both
    empty where both have the same layout.
    """

    ln_saved: float
    sd: float
    deaths: Deaths = field(default_factory=Deaths)
    other_deaths: Deaths = field(default_factory=Deaths)

    @property
    def share(self) -> float:
        """The share of the other's seconds that it is expected to save, deaths included."""
        costs, shares = self.deaths.costs()
        return -math.expm1(float(shares @ costs) - self.ln_saved - self._kept())

    def gain_and_loss(self) -> tuple[float, float]:
        """Expected ln(seconds) gained where it is better, and lost where it is worse."""
        costs, shares = self.deaths.costs()
        mean, sd = self.ln_saved + self._kept() - costs, max(self.sd, 1e-9)
        from scipy.special import ndtr

        z = mean / sd
        gain = mean * ndtr(z) + sd * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return float(shares @ gain), float(shares @ (gain - mean))

    @property
    def is_clear(self) -> bool:
        """Whether what may be lost is little beside what is gained."""
        gain, loss = self.gain_and_loss()
        return gain > 0 and gain >= LEAST_ODDS * loss

    def survivals_wanted(self) -> int | None:
        """Runs that its layout has to live through before it is clearly better; None where these alone do not tell."""
        for more in range(MOST_SURVIVALS + 1):
            if replace(self, deaths=replace(self.deaths, lived=self.deaths.lived + more)).is_clear:
                return more
        return None

    def _kept(self) -> float:
        """What the other's deaths cost, on average."""
        costs, shares = self.other_deaths.costs()
        return float(shares @ costs)
