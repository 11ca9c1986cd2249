"""The chance that a layout dies of memory: physics' GiB against the GPU's, corrected by the study's own trials.

ln(peak) = ln(physics) + b . features, with a Gaussian belief in b about zero. A trial that died says that its peak was
beyond the limit, one that lived that it was not, and a measured peak what it was. The posterior is Laplace's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from scipy.special import expit, ndtr

from lora_tune.search.grey_box.gaussian import Array
from lora_tune.search.grey_box.memory import drawn_rates, own_rates, own_weights
from lora_tune.search.physics import LEVEL_SD

FEATURE_SD = 0.04
"""How far physics is off by a feature's worth, beside its LEVEL_SD: 4% of the peak. Its figures for the recorded
four-GPU probes are within 5% (``python -m benchmarks.layout_replay``)."""

FRAGMENTS = 0.02
"""Sd of ln(peak) at the limit: the allocator's fragments decide there."""

MEASURED_SD = 0.01
"""Sd of ln(peak) of a measured peak: what other ranks and libraries hold."""

BEYOND = 2.0
"""A peak that is stated as this many times a GPU's memory is in another unit than GiB, and is passed over."""
STEPS = 40


class Needs(Protocol):
    """What physics says of a point's memory before it ran: ``search.study_physics``."""

    @property
    def limit(self) -> float:
        """GiB of a GPU."""
        ...

    @property
    def level_sd(self) -> float:
        """How far it may be off for all points, in ln(GiB)."""
        ...

    def gib(self, tuned: Mapping[str, Any]) -> float:
        """Peak memory of a GPU, GiB."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """What n trials showed. gib: physics' peak (n). features: (n, d). died: (n). measured: GiB (n), NaN unknown."""

    gib: Array
    features: Array
    died: Sequence[bool]
    measured: Array


@dataclass(frozen=True, slots=True)
class PeakBelief:
    """Corrections of ln(physics): mean (1 + d) and covariance; limit: GiB of a GPU."""

    mean: Array
    covariance: Array
    limit: float

    def risk(self, gib: Array, features: Array) -> Array:
        """Chance (n) that layouts of these physics' peaks (n) and features (n, d) die of memory."""
        over, sd = self._over(gib, features)
        return np.asarray(ndtr(over / np.hypot(sd, FRAGMENTS)))

    def expected(self, gib: Array, features: Array) -> Array:
        """Expected peaks, GiB (n)."""
        return np.asarray(self.limit * np.exp(self._over(gib, features)[0]))

    def _over(self, gib: Array, features: Array) -> tuple[Array, Array]:
        rows = np.c_[np.ones(len(gib)), features]
        sd = np.sqrt(np.einsum("ij,jk,ik->i", rows, self.covariance, rows))
        return np.log(gib / self.limit) + rows @ self.mean, sd


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The belief as the grey box asks for it, each layout's own record beside it; rows (n, 1 + d) begin with the GiB.

    A :class:`lora_tune.search.grey_box.memory.MemoryModel` of another kind: where that one learns from features alone
    which layouts die, this one begins with their GiB.
    """

    belief: PeakBelief
    record: Mapping[tuple[float, ...], tuple[int, int]]

    def probability(self, x: Array) -> Array:
        """Chance of death (n)."""
        return own_rates(self.belief.risk(x[:, 0], x[:, 1:]), x, self.record)

    def draws(self, x: Array, rng: np.random.Generator, count: int) -> Array:
        """Death rates (n, count) drawn jointly: untried layouts share physics' error, others have a record."""
        b = self.belief
        drawn = rng.multivariate_normal(b.mean, b.covariance, count)
        over = np.log(x[:, 0] / b.limit)[:, None] + np.c_[np.ones(len(x)), x[:, 1:]] @ drawn.T
        return drawn_rates(np.asarray(ndtr(over / FRAGMENTS)), self.probability(x), self.weight(x), rng)

    def weight(self, x: Array) -> Array:
        """Runs that each probability rests on (n)."""
        return own_weights(x, self.record)


def learn(peaks: Peaks, limit: float, level_sd: float = LEVEL_SD) -> PeakBelief:
    """The belief after ``peaks``, on GPUs of ``limit`` GiB. level_sd: how far physics may be off for all layouts."""
    n, width = len(peaks.gib), peaks.features.shape[1]
    rows = np.c_[np.ones(n), peaks.features]
    offset, died = np.log(peaks.gib / limit), np.array(peaks.died, dtype=np.float64)
    known = peaks.measured < BEYOND * limit  # not where it is unknown, NaN
    target = np.where(known, np.log(np.where(known, peaks.measured, 1.0) / limit) - offset, 0.0)
    slope = 1.702 / FRAGMENTS  # the logistic that is nearest to the normal distribution
    precision = np.diag(1 / np.r_[level_sd, np.full(width, FEATURE_SD)] ** 2)
    weight = known / MEASURED_SD**2

    def gradients(beta: Array) -> tuple[float, Array, Array]:
        over = slope * (offset + rows @ beta)
        p, off = expit(over), rows @ beta - target
        value = died @ over - np.logaddexp(0.0, over).sum()
        value -= 0.5 * (weight * off**2).sum() + 0.5 * beta @ precision @ beta
        first = rows.T @ (slope * (died - p) - weight * off) - precision @ beta
        second = rows.T @ (rows * (slope**2 * p * (1 - p) + weight)[:, None]) + precision
        return float(value), first, second

    beta = np.zeros(1 + width)
    value, first, second = gradients(beta)
    for _ in range(STEPS):
        step = np.linalg.solve(second, first)
        derivatives = gradients(beta + step)
        while derivatives[0] < value - 1e-9 and np.abs(step).max() > 1e-8:
            step = 0.5 * step
            derivatives = gradients(beta + step)
        beta, (value, first, second) = beta + step, derivatives
        if np.abs(step).max() < 1e-7:
            break
    return PeakBelief(beta, np.asarray(np.linalg.inv(second), dtype=np.float64), limit)
