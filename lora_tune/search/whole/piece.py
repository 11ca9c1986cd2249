"""One piece of a run (samples or pace) as a Gaussian process in which every parameter's part is tested by evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lora_tune.search.grey_box.gaussian import Array, Data, Posterior, Prior, condition

DOUBT = 0.7
"""Sd of a bend as a share of it, on top of :data:`LEAST_DOUBT`."""
LEAST_DOUBT = 0.2
SLOPE_SD = 0.5
"""Sd of the change of ln(seconds) over half a range, at least."""
AWAY = 0.6
"""Half ranges by which the best known point may be away from the best one, as far as slopes are concerned."""
TOGETHER = 2.0
"""Sd of the product of two numbers' distances, as a share of the geometric mean of their bends: at twice that mean the
valleys of both are one ridge without an end."""
OFF = 1e-4
"""Sd of the trend along a parameter that has no part in a piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """One reading of how far configurations differ and runs scatter, with its share of the belief.

    amplitude: sd of the smooth residual. noise_scale: multiplies every reading's usual sd. together: whether the best
    value of one number may depend on another.
    """

    amplitude: float
    noise_scale: float = 1.0
    together: bool = True
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Relevance:
    """What a piece sees of each parameter, and the scales of its residual.

    usual: the amplitude expected before data. scales: those that data leave, the likeliest first; shares sum to 1.
    fitted_at: readings at the last fit.
    """

    of: Mapping[str, float]
    usual: float
    scales: tuple[Scale, ...]
    length: float = 1.0
    fitted_at: int = -1

    @property
    def noise_scale(self) -> float:
        """By how much runs scatter more than usual: the root of the mean square over the belief."""
        return math.sqrt(sum(s.share * s.noise_scale**2 for s in self.scales))


@dataclass(frozen=True, kw_only=True)
class Readings:
    """n readings of a piece: features (n, d), y (n), sd (n); ``below`` (n): y is only a lower bound.

    extended: (n) sd on top that is known, such as by how far evals are apart: how far runs scatter does not change it.
    """

    x: Array
    y: Array
    sd: Array
    extended: Array
    below: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class PieceFrame:
    """What all pieces of a model share.

    owners: each feature's parameter. bends: its expected rise at half a range, 0 where it is no number. reach: units
    of smoothness in half a range. centre: of the trend.
    """

    owners: tuple[str, ...]
    bends: Array
    reach: Array
    centre: Array

    @cached_property
    def numbers(self) -> npt.NDArray[np.bool_]:
        """Features of which a middle value may be best."""
        return np.asarray(self.bends > 0)

    def basis(self, x: Array) -> Array:
        """1, the distance from the centre along every feature, and its squares and products along numbers."""
        away = x - self.centre
        bent = away[:, self.numbers]
        first, second = self._pairs
        return np.hstack([np.ones((len(x), 1)), away, bent**2, bent[:, first] * bent[:, second]])

    @cached_property
    def _pairs(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Pairs of numbers: the best value of one may depend on the other's, as of rate and batch."""
        return np.triu_indices(int(self.numbers.sum()), 1)

    def prior(self, r: Relevance, scale: Scale, level: float, bent: bool) -> Prior:
        """The belief in a piece at one of its scales; ``level``: at the centre. bent: it has a best point within."""
        weights = np.array([r.of[name] for name in self.owners])
        seen = np.minimum(weights, 1.0)
        bends = (self.bends * seen if bent else np.zeros(len(seen)))[self.numbers]
        doubt = (seen * LEAST_DOUBT)[self.numbers] + DOUBT * bends
        first, second = self._pairs
        together = scale.together * TOGETHER * np.sqrt(bends[first] * bends[second])
        slopes = seen * np.maximum(SLOPE_SD, 2 * AWAY * self.bends / self.reach if bent else SLOPE_SD)
        return Prior(
            mean=np.concatenate([[level], np.zeros(len(weights)), bends, np.zeros(len(together))]),
            sd=np.concatenate([[1.5], np.maximum(np.concatenate([slopes, doubt, together]), OFF)]),
            amplitude=scale.amplitude, length=r.length, departure=1e-3, noise_scale=scale.noise_scale,
            weights=weights * (self.reach if bent else 1.0),
        )  # fmt: skip

    def data(self, readings: Readings) -> Data:
        """The readings as the Gaussian process takes them in."""
        n = len(readings.y)
        return Data(
            x=readings.x, basis=self.basis(readings.x), y=readings.y, sd=readings.sd,
            source=np.zeros(n, dtype=np.int64), below=readings.below, extended=readings.extended,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece after data: a posterior for each of its scales, in their order."""

    frame: PieceFrame
    posteriors: tuple[Posterior, ...]
    relevance: Relevance

    def predict(self, x: Array) -> tuple[Array, Array]:
        """Mean (m) and variance (m) at feature rows, over all scales."""
        basis, shares = self.frame.basis(x), self._shares
        predicted = [p.predict_each(x, basis) for p in self.posteriors]
        means, variances = np.array([m for m, _ in predicted]), np.array([v for _, v in predicted])
        mean = shares @ means
        return mean, shares @ (variances + (means - mean) ** 2)

    def together(self, x: Array) -> tuple[Array, Array]:
        """Mean (m) and covariance (m, m) at feature rows, over all scales."""
        basis, shares = self.frame.basis(x), self._shares
        joint = [p.predict(x, basis) for p in self.posteriors]
        means = np.array([m for m, _ in joint])
        mean = shares @ means
        off = means - mean
        covariance = np.einsum("k,kij->ij", shares, np.array([c for _, c in joint]) + off[:, :, None] * off[:, None, :])
        return mean, covariance

    @property
    def _shares(self) -> Array:
        return np.array([s.share for s in self.relevance.scales])

    def expecting(self, x: Array, sd: float) -> Piece:
        """The same with runs at feature rows ``x`` (n, d) counted as measured, with the results expected of them."""
        seen, n = self.posteriors[0].data, len(x)
        data = Data(
            x=np.vstack([seen.x, x]), basis=np.vstack([seen.basis, self.frame.basis(x)]),
            y=np.r_[seen.y, self.predict(x)[0]], sd=np.r_[seen.sd, np.full(n, sd)],
            source=np.r_[seen.source, np.zeros(n, dtype=np.int64)],
            below=np.r_[seen.below, np.zeros(n, dtype=np.bool_)], extended=np.r_[seen.extended, np.zeros(n)],
        )  # fmt: skip
        return replace(self, posteriors=tuple(condition(data, p.prior) for p in self.posteriors))


def start(names: Sequence[str], guessed: frozenset[str], usual: float) -> Relevance:
    """What is believed before data: parameters that the piece is guessed to depend on count, others do not."""
    of = {n: 1.0 if n in guessed else 0.0 for n in names}
    return Relevance(of=of, usual=usual, scales=(Scale(amplitude=usual),))
