"""Switches that change arithmetic: whether what they save in seconds a sample is lost in samples to the target. Pure.

ln(samples to the target) of a whole run is the base's plus what each changed arithmetic adds, all with normal priors.
Samples below the reference are taken back by the score, so only those above it count. The next whole run is the one
that improves what would be decided after it most, the knowledge gradient (Frazier, Powell and Dayanik 2008,
doi:10.1137/070693424). Nothing is decided for an arithmetic that no whole run has brought to the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Changes = frozenset[int]
"""The switches that change arithmetic, by number."""

LEVEL_SD = 0.05
"""Sd of the base's ln(samples) around what is expected of it (public submissions: 2.9%, and a site's own)."""
EFFECT_SD = 0.05
"""Sd of what another arithmetic adds to ln(samples): a guess, wider than the 2.9% by which submissions differ."""
MISSED = 0.1
"""What a run that did not reach the target lacked, in ln(samples) beyond its end, at least; also its sd."""
SURE = 0.8
"""Chance that another arithmetic pays, from which on it is kept."""
DRAWS = 512
OUTCOMES = 9
"""Draws of a belief, and outcomes of a run that are looked ahead to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """A whole run at the base's hyperparameters. ln_samples: NaN while it is open. missed: it did not reach the
    target."""

    changes: Changes
    ln_samples: float = math.nan
    sd: float = 0.05
    missed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticChoice:
    """What may be decided for: its changed arithmetic, and its ln(seconds) less the base arithmetic's best, for equal
    samples."""

    changes: Changes
    ln_seconds: float


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """options: the first keeps the base's arithmetic. expected: ln(samples) of the base. reference: samples below it
    count as it, in ln; -inf: none are taken back. run_sd: of one run's ln(samples)."""

    options: tuple[ArithmeticChoice, ...]
    runs: tuple[WholeRun, ...] = ()
    expected: float
    reference: float = -math.inf
    run_sd: float = 0.06

    @cached_property
    def _switches(self) -> tuple[int, ...]:
        seen = [*(o.changes for o in self.options), *(r.changes for r in self.runs)]
        return tuple(sorted(frozenset[int]().union(*seen)))

    def _row(self, changes: Changes) -> Array:
        return np.array([1.0, *(float(at in changes) for at in self._switches)])

    @cached_property
    def _belief(self) -> tuple[Array, Array]:
        """Mean and covariance of the base's ln(samples) and of what each switch adds."""
        mean = np.array([self.expected, *[0.0] * len(self._switches)])
        covariance = np.diag([LEVEL_SD**2, *[EFFECT_SD**2] * len(self._switches)])
        for run in self.runs:
            if math.isfinite(run.ln_samples):
                late = MISSED if run.missed else 0.0
                mean, covariance = _after(
                    mean, covariance, self._row(run.changes), run.ln_samples + late, math.hypot(run.sd, late)
                )
        return mean, covariance

    def above_reference(self) -> float:
        """The expected ln(samples) of the base above the reference, which is all that fewer samples can win.

        Infinite without a reference: then every sample counts.
        """
        if math.isinf(self.reference):
            return math.inf
        mean, sd = float(self._belief[0][0]) - self.reference, math.sqrt(float(self._belief[1][0, 0]))
        from scipy.special import ndtr

        return mean * float(ndtr(mean / sd)) + sd * math.exp(-0.5 * (mean / sd) ** 2) / math.sqrt(2 * math.pi)

    @cached_property
    def _reached(self) -> Changes:
        """The switches with which a run has reached the target."""
        return frozenset(at for r in self.runs if math.isfinite(r.ln_samples) and not r.missed for at in r.changes)

    def decided(self) -> ArithmeticChoice:
        """The option to hand over."""
        return self.options[self._decide(*self._belief, self._reached)[0]]

    def _decide(self, mean: Array, covariance: Array, reached: Changes) -> tuple[int, float]:
        """The number of the best option that may be handed over, and its expected ln(score) less the first's."""
        normal = np.random.default_rng(0).normal(size=(DRAWS, len(mean)))
        draws = mean + normal @ np.linalg.cholesky(covariance + 1e-14 * np.eye(len(mean))).T
        rows = np.array([self._row(o.changes) for o in self.options])
        samples = np.maximum(draws @ rows.T, self.reference)
        score = samples + np.array([o.ln_seconds for o in self.options])
        apart = score - score[:, :1]
        sure = (apart < 0).mean(axis=0) >= SURE
        allowed = [at for at, o in enumerate(self.options) if not o.changes or (o.changes <= reached and sure[at])]
        means = apart.mean(axis=0)
        best = min(allowed, key=lambda at: means[at])
        return best, float(means[best])

    def next_run(self) -> tuple[ArithmeticChoice, float]:
        """The option of which one more run is worth most, and how much, in ln(score) of what is then decided.

        Open runs count as if they would reach the target as expected.
        """
        mean, covariance = self._belief
        reached = self._reached
        for run in self.runs:
            if not math.isfinite(run.ln_samples):
                row = self._row(run.changes)
                mean, covariance = _after(mean, covariance, row, float(row @ mean), self.run_sd)
                reached |= run.changes
        now = self._decide(mean, covariance, reached)[1]
        gains = [self._gain(mean, covariance, reached, option, now) for option in self.options]
        best = int(np.argmax(gains))
        return self.options[best], gains[best]

    def _gain(self, mean: Array, covariance: Array, reached: Changes, option: ArithmeticChoice, now: float) -> float:
        row = self._row(option.changes)
        spread = math.sqrt(float(row @ covariance @ row) + self.run_sd**2)
        after = []
        for outcome in _quantiles(OUTCOMES):
            belief = _after(mean, covariance, row, float(row @ mean) + spread * outcome, self.run_sd)
            after.append(self._decide(*belief, reached | option.changes)[1])
        return now - float(np.mean(after))

    def with_run(self, run: WholeRun) -> Arithmetic:
        """The same after one more run."""
        return replace(self, runs=(*self.runs, run))


def _after(mean: Array, covariance: Array, row: Array, value: float, sd: float) -> tuple[Array, Array]:
    """A normal belief after one reading of ``row``."""
    gain = covariance @ row / float(row @ covariance @ row + sd**2)
    return mean + gain * (value - float(row @ mean)), covariance - np.outer(gain, row @ covariance)


def _quantiles(count: int) -> Sequence[float]:
    """Normal quantiles in the middle of ``count`` equal shares."""
    from scipy.special import ndtri

    return [float(ndtri((at + 0.5) / count)) for at in range(count)]
