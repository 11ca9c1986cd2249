"""Gaussian-process regression with a trend, several sources and one-sided observations. No tuning of anything here.

The model of one quantity y over features x in about [-1, 1]: a linear trend with Gaussian coefficients, a smooth
residual (Matern 5/2), and for every source of data, this study among them, a shift and a residual of its own, so that
old or published figures inform without being believed.
Rasmussen and Williams (2006), chapters 2 (regression, trends) and 3.6 (one-sided sites).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.linalg.lapack import dpotrf, dpotrs, dtrtrs
from scipy.special import log_ndtr, ndtr

Array = npt.NDArray[np.float64]
THIS_STUDY = 0
"""The source number of this study's own data; every other number is another source."""

JITTER = 1e-10
"""Relative to the prior variance: keeps repeated rows from spoiling the factorisation."""
KEPT = 4
"""Parts of prior covariances that data keep."""
LEAST_VARIANCE = 1e-10
"""What is never known better."""
LEAST_TILT = 1e-12
"""Of a bound that says nothing."""
NOISE_RUNS = 8.0
"""Repeated seeds that the belief in the usual noise of readings is worth: an sd of a quarter."""


COLUMNS = ("x", "basis", "y", "sd", "source", "below", "extended")
"""What is known of each reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """n readings: features (n, d), trend basis (n, p), y (n), sd (n) of each reading about the truth at its features.

    extended: (n) sd on top of that, which has nothing to do with how far readings scatter here. source: (n) numbers;
    rows with the same number share a shift. below: (n) True where y is only a lower bound.
    """

    x: Array
    basis: Array
    y: Array
    sd: Array
    source: npt.NDArray[np.int64]
    below: npt.NDArray[np.bool_]
    extended: Array
    _kept: dict[tuple[str, float, bytes], Array] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Parts of the newest prior covariances: of many priors in turn most share most parts."""

    @classmethod
    def local(cls, x: Array, basis: Array, y: Array, sd: float) -> Data:
        """Exact readings of this study, all of this sd."""
        none = np.zeros(len(y))
        return cls(
            x=x, basis=basis, y=y, sd=none + sd, source=np.full(len(y), THIS_STUDY, dtype=np.int64), below=none > 0,
            extended=none,
        )  # fmt: skip

    def beside(self, more: Data) -> Data:
        """These readings and ``more``."""
        return Data(**{name: np.concatenate([getattr(self, name), getattr(more, name)]) for name in COLUMNS})

    def rows(self, keep: npt.NDArray[np.int64]) -> Data:
        """Some of the readings."""
        return Data(**{name: getattr(self, name)[keep] for name in COLUMNS})

    def covariance(self, prior: Prior) -> Array:
        """Prior covariance of what the readings are about (n, n)."""
        smooth = self._part(
            ("smooth", prior.length, prior.weights.tobytes()),
            lambda: matern(self.x * prior.weights, self.x * prior.weights, prior.length),
        )
        trend = self._part(("trend", 0.0, prior.sd.tobytes()), lambda: (self.basis * prior.sd**2) @ self.basis.T)
        return _summed(prior, trend, smooth, (self.source, self.source))

    def _part(self, key: tuple[str, float, bytes], compute: Callable[[], Array]) -> Array:
        if key not in self._kept:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self._kept[key] = compute()
        return self._kept[key]

    def variance(self, noise_scale: float) -> Array:
        """Variance of each reading (n) where they scatter ``noise_scale`` times as far as usual."""
        return np.asarray((noise_scale * self.sd) ** 2 + self.extended**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What is believed before data: trend coefficients (p) with their sd (p), and the scales of the residuals.

    amplitude, length: of the smooth residual; length is in feature units. shift: sd of another source's departure.
    departure: that of this study, which may be unlike all others.
    noise_scale: multiplies every reading's usual sd. weights: (d) relevance of each feature, 1 = as given.
    """

    mean: Array
    sd: Array
    amplitude: float
    length: float
    shift: float = 0.1
    departure: float = 0.1
    noise_scale: float = 1.0
    weights: Array


def repeated_noise(data: Data) -> float:
    """By how much readings of the same hyperparameters here scatter more (or less) than their sd says.

    The pooled spread within settings that ran with several seeds, with ``NOISE_RUNS`` degrees of freedom of a belief
    in 1: what differs between settings has no part in it, so that a rough valley is not taken for noise.
    """
    exact_rows = np.flatnonzero((data.source == THIS_STUDY) & ~data.below & (data.extended == 0))
    settings: dict[bytes, list[int]] = {}
    for at in exact_rows:
        settings.setdefault(data.x[at].tobytes(), []).append(int(at))
    squares, freedom = NOISE_RUNS, NOISE_RUNS
    for rows in settings.values():
        weight = data.sd[rows] ** -2.0
        squares += float((weight * (data.y[rows] - np.average(data.y[rows], weights=weight)) ** 2).sum())
        freedom += len(rows) - 1
    return math.sqrt(squares / freedom)


def positive_part(mean: Array, sd: Array) -> Array:
    """E max(0, x) of x ~ N(mean, sd^2): the expected improvement of Jones, Schonlau and Welch (1998), equation 15."""
    sd = np.maximum(sd, 1e-9)
    z = mean / sd
    return np.asarray(mean * ndtr(z) + sd * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))


def matern(a: Array, b: Array, length: float) -> Array:
    """Matern-5/2 correlation of feature rows ``a`` (n, d) and ``b`` (m, d)."""
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    r = np.sqrt(np.maximum(squares, 0.0) * 5) / length
    return np.asarray((1 + r + r * r / 3) * np.exp(-r))


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """What is believed after data. Predictions are of the truth at this study's own source."""

    prior: Prior
    data: Data
    factor: Array
    weights: Array

    def joint(self, x: Array, basis: Array) -> Joint:
        """The belief at feature rows ``x`` (m, d) with trend rows ``basis`` (m, p)."""
        cross = _covariance(self.prior, (x, basis, np.zeros(len(x), np.int64)), _rows(self.data))
        half = half_solved(self.factor, cross.T)
        mean = basis @ self.prior.mean + cross @ self.weights
        prior_variance = basis**2 @ self.prior.sd**2 + self.prior.amplitude**2 + 2 * self.prior.departure**2
        variance = np.maximum(prior_variance - (half**2).sum(axis=0), 0.0) + LEAST_VARIANCE
        return Joint(prior=self.prior, x=x, basis=basis, half=half, mean=mean, variance=variance)

    def predict(self, x: Array, basis: Array) -> tuple[Array, Array]:
        """Mean (m) and covariance (m, m) at feature rows ``x`` with trend rows ``basis``."""
        joint = self.joint(x, basis)
        return joint.mean, joint.covariance()


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """What is believed of m rows: mean (m) and variance (m), and their covariances where those are asked for."""

    prior: Prior
    x: Array
    basis: Array
    half: Array
    mean: Array
    variance: Array

    def covariance(self) -> Array:
        """Of all rows with all (m, m)."""
        posterior = self.covariance_with(np.arange(len(self.x)))
        return 0.5 * (posterior + posterior.T)

    def covariance_with(self, at: npt.NDArray[np.int64]) -> Array:
        """Of all rows with those at ``at`` (m, k)."""
        posterior = _covariance(self.prior, self._rows_at(np.arange(len(self.x))), self._rows_at(at))
        posterior -= self.half.T @ self.half[:, at]
        posterior[at, np.arange(len(at))] += LEAST_VARIANCE
        return posterior

    def _rows_at(self, at: npt.NDArray[np.int64]) -> Rows:
        return self.x[at], self.basis[at], np.zeros(len(at), np.int64)


Rows = tuple[Array, Array, npt.NDArray[np.int64]]


def _rows(data: Data) -> Rows:
    return data.x, data.basis, data.source


def _covariance(prior: Prior, a: Rows, b: Rows) -> Array:
    xa, xb = a[0] * prior.weights, b[0] * prior.weights
    smooth = matern(xa, xb, prior.length)
    trend = (a[1] * prior.sd**2) @ b[1].T
    return _summed(prior, trend, smooth, (a[2], b[2]))


def _summed(
    prior: Prior, trend: Array, smooth: Array, sources: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
) -> Array:
    first, second = sources
    same = first[:, None] == second[None, :]
    # Every source, this study too, departs from what all share by a shift and as much by a smooth curve of its own.
    departure = np.where(first == THIS_STUDY, prior.departure, prior.shift)[:, None] ** 2
    return np.asarray(trend + prior.amplitude**2 * smooth + same * departure * (1 + smooth))


def condition(data: Data, prior: Prior) -> Posterior:
    """The posterior given ``data``; lower bounds enter as Gaussian sites."""
    kernel, offset, variance = _beforehand(data, prior)
    if data.below.any():
        offset, variance, _ = sites(kernel, offset, variance, data.below)
    factor, weights = _factorised(kernel, offset, variance)
    return Posterior(prior=prior, data=data, factor=factor, weights=weights)


def log_evidence(data: Data, prior: Prior) -> float:
    """ln of the density of ``data``, and of the chance of its bounds, under the prior."""
    kernel, offset, variance = _beforehand(data, prior)
    if data.below.any():
        return sites(kernel, offset, variance, data.below)[2]
    factor, weights = _factorised(kernel, offset, variance)
    constant = 0.5 * len(offset) * math.log(2 * math.pi)
    return float(-0.5 * offset @ weights - np.log(factor.diagonal()).sum() - constant)


def _beforehand(data: Data, prior: Prior) -> tuple[Array, Array, Array]:
    """Prior covariance of the readings (n, n), their distance from the prior mean (n) and their variance (n)."""
    kernel = data.covariance(prior)
    kernel.flat[:: len(kernel) + 1] += JITTER * (kernel.trace() / max(1, len(kernel)))
    return kernel, data.y - data.basis @ prior.mean, data.variance(prior.noise_scale)


def _factorised(kernel: Array, offset: Array, variance: Array) -> tuple[Array, Array]:
    """The factor of the covariance of readings with this variance, and what takes it to ``offset``."""
    noisy = kernel.copy()
    noisy.flat[:: len(noisy) + 1] += variance
    factor = lower_factor(noisy)
    return factor, solved(factor, offset)


# Lower bounds, as Gaussian sites that are taken in one after the other (assumed-density filtering) in the belief that
# the exact readings leave.


def lower_factor(matrix: Array) -> Array:
    """The lower Cholesky factor (n, n). Raises LinAlgError where the matrix is not positive definite.

    LAPACK itself, as scipy calls it: of a few dozen rows scipy's checks take longer than the factorisation.
    """
    if not matrix.size:
        return matrix
    factor, info = dpotrf(matrix, lower=1, clean=1)
    if info:
        raise np.linalg.LinAlgError(f"the matrix is not positive definite in its leading {info} rows")
    return np.asarray(factor)


def solved(factor: Array, right: Array) -> Array:
    """What the matrix of this lower factor takes to ``right``."""
    return np.asarray(dpotrs(factor, right, lower=1)[0]) if factor.size else right


def half_solved(factor: Array, right: Array) -> Array:
    """What the lower factor itself takes to ``right``."""
    return np.asarray(dtrtrs(factor, right, lower=1)[0]) if right.size else right


def sites(kernel: Array, offset: Array, variance: Array, below: npt.NDArray[np.bool_]) -> tuple[Array, Array, float]:
    """y and variance (n) of every reading, those of bounds as sites, and the evidence of all.

    kernel: prior covariance (n, n). offset: distance from the prior mean (n). below: (n) True where the reading is only
    a lower bound. A site has the moments of Phi((f - bound) / sd): equation 3.58 of the book.
    """
    exact, bounds = np.flatnonzero(~below), np.flatnonzero(below)
    mean, covariance, evidence = _after(kernel, offset, variance, (exact, bounds))
    y, spread = offset.copy(), variance.copy()
    for place, at in enumerate(bounds):
        row = covariance[:, place].copy()
        scale = math.sqrt(row[place] + variance[at])
        z = (mean[place] - offset[at]) / scale
        log_chance = float(log_ndtr(z))
        evidence += log_chance
        ratio = math.exp(-0.5 * z * z - log_chance) / math.sqrt(2 * math.pi)
        shrink = max(ratio * (z + ratio) / scale**2, LEAST_TILT)  # of the variance, by its square
        y[at] = mean[place] + ratio / (scale * shrink)
        spread[at] = max(1 / shrink - row[place], LEAST_VARIANCE)
        mean += row * (ratio / scale)
        covariance -= np.outer(row, row) * shrink
    return y, spread, evidence - 0.5 * len(exact) * math.log(2 * math.pi)


def _after(
    kernel: Array, offset: Array, variance: Array, rows: tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]
) -> tuple[Array, Array, float]:
    """Mean (b) and covariance (b, b) of the bounded values after the exact readings, whose evidence is the third."""
    exact, bounds = rows
    block = kernel[np.ix_(bounds, bounds)]
    if not len(exact):
        return np.zeros(len(bounds)), block, 0.0
    among = kernel[np.ix_(exact, exact)]
    among.flat[:: len(exact) + 1] += variance[exact]
    factor = lower_factor(among)
    half, explained = half_solved(factor, kernel[np.ix_(exact, bounds)]), half_solved(factor, offset[exact])
    return (
        half.T @ explained,
        block - half.T @ half,
        -0.5 * float(explained @ explained) - float(np.log(factor.diagonal()).sum()),
    )
