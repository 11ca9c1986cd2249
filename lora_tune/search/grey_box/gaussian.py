"""Gaussian-process regression with a trend, several sources and censored observations; hyperparameters are fixed here.

The model of a quantity y over features x in about [-1, 1]: a linear trend with Gaussian coefficients, a smooth residual
(Matern 5/2), and per source, including this study, a shift and another residual, so that old or published results
inform without full trust. Rasmussen and Williams (2006), chapters 2 (regression, trends) and 3.6 (one-sided sites).
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
"""Source number of this study's data; other numbers are other sources."""

JITTER = 1e-10
"""Jitter relative to the prior variance, for the Cholesky factorisation with repeated rows."""
KEPT = 4
"""Maximum number of cached parts of prior covariances."""
LEAST_VARIANCE = 1e-10
"""Lower limit of posterior variances."""
LEAST_TILT = 1e-12
"""Lower limit of a bound's precision, for a bound without information."""
NOISE_RUNS = 8.0
"""Degrees of freedom of the prior on the noise scale: an sd of a quarter."""


COLUMNS = ("x", "basis", "y", "sd", "source", "below", "extended")
"""Columns of :class:`Data`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """n readings: features (n, d), trend basis (n, p), y (n), noise sd (n).

    extended: (n) additional sd, independent of the noise scale. source: (n) numbers; rows with the same number share a
    shift. below: (n) True if y is only a lower bound (censored).
    """

    x: Array
    basis: Array
    y: Array
    sd: Array
    source: npt.NDArray[np.int64]
    below: npt.NDArray[np.bool_]
    extended: Array
    _kept: dict[tuple[str, float, bytes], Array] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of parts of prior covariances, since successive priors share most parts."""

    @classmethod
    def local(cls, x: Array, basis: Array, y: Array, sd: float) -> Data:
        """Uncensored readings of this study with one sd."""
        none = np.zeros(len(y))
        return cls(
            x=x, basis=basis, y=y, sd=none + sd, source=np.full(len(y), THIS_STUDY, dtype=np.int64), below=none > 0,
            extended=none,
        )  # fmt: skip

    def beside(self, more: Data) -> Data:
        """These readings and ``more``, concatenated."""
        return Data(**{name: np.concatenate([getattr(self, name), getattr(more, name)]) for name in COLUMNS})

    def rows(self, keep: npt.NDArray[np.int64]) -> Data:
        """A subset of the readings."""
        return Data(**{name: getattr(self, name)[keep] for name in COLUMNS})

    def covariance(self, prior: Prior) -> Array:
        """Prior covariance of the latent values (n, n)."""
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
        """Variance of each reading (n) for a noise scale."""
        return np.asarray((noise_scale * self.sd) ** 2 + self.extended**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Prior: trend coefficients (p) with sd (p), and scales of the residuals.

    amplitude, length: of the smooth residual; length (lengthscale) in feature units. shift: sd of another source's
    offset. departure: sd of this study's offset. noise_scale: multiplies every reading's sd. weights: (d) relevance of
    each feature (inverse lengthscale), 1 = unchanged.
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
    """Noise scale: ratio of the observed spread of repeats in this study to the readings' sd.

    The pooled spread within settings with several seeds, with ``NOISE_RUNS`` prior degrees of freedom at 1. Differences
    between settings are not used, so that a rough surface does not count as noise.
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
    """E max(0, x) for x ~ N(mean, sd^2): the expected improvement of Jones, Schonlau and Welch (1998), equation 15."""
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
    """Posterior. Predictions are of the latent values for this study's source."""

    prior: Prior
    data: Data
    factor: Array
    weights: Array

    def joint(self, x: Array, basis: Array) -> Joint:
        """Posterior at feature rows ``x`` (m, d) with trend rows ``basis`` (m, p)."""
        cross = _covariance(self.prior, (x, basis, np.zeros(len(x), np.int64)), _rows(self.data))
        half = triangular_solve(self.factor, cross.T)
        mean = basis @ self.prior.mean + cross @ self.weights
        prior_variance = basis**2 @ self.prior.sd**2 + self.prior.amplitude**2 + 2 * self.prior.departure**2
        variance = np.maximum(prior_variance - (half**2).sum(axis=0), 0.0) + LEAST_VARIANCE
        return Joint(prior=self.prior, x=x, basis=basis, half=half, mean=mean, variance=variance)

    def predict(self, x: Array, basis: Array) -> tuple[Array, Array]:
        """Posterior mean (m) and covariance (m, m) at feature rows ``x`` with trend rows ``basis``."""
        joint = self.joint(x, basis)
        return joint.mean, joint.covariance()


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """Joint posterior of m rows: mean (m) and variance (m); covariances on demand."""

    prior: Prior
    x: Array
    basis: Array
    half: Array
    mean: Array
    variance: Array

    def covariance(self) -> Array:
        """Covariance of all rows (m, m)."""
        posterior = self.covariance_with(np.arange(len(self.x)))
        return 0.5 * (posterior + posterior.T)

    def covariance_with(self, at: npt.NDArray[np.int64]) -> Array:
        """Covariance of all rows with those at ``at`` (m, k)."""
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
    # Every source, including this study, has a shift and a smooth residual of the same variance.
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
    """Log marginal likelihood of ``data``, including the probability of its bounds."""
    kernel, offset, variance = _beforehand(data, prior)
    if data.below.any():
        return sites(kernel, offset, variance, data.below)[2]
    factor, weights = _factorised(kernel, offset, variance)
    constant = 0.5 * len(offset) * math.log(2 * math.pi)
    return float(-0.5 * offset @ weights - np.log(factor.diagonal()).sum() - constant)


def _beforehand(data: Data, prior: Prior) -> tuple[Array, Array, Array]:
    """Prior covariance of the latent values (n, n), residuals from the prior mean (n), noise variances (n)."""
    kernel = data.covariance(prior)
    kernel.flat[:: len(kernel) + 1] += JITTER * (kernel.trace() / max(1, len(kernel)))
    return kernel, data.y - data.basis @ prior.mean, data.variance(prior.noise_scale)


def _factorised(kernel: Array, offset: Array, variance: Array) -> tuple[Array, Array]:
    """Cholesky factor of the covariance with noise, and its solution for ``offset``."""
    noisy = kernel.copy()
    noisy.flat[:: len(noisy) + 1] += variance
    factor = lower_factor(noisy)
    return factor, solved(factor, offset)


# Lower bounds as Gaussian sites, processed one by one (assumed-density filtering) after the exact readings.


def lower_factor(matrix: Array) -> Array:
    """The lower Cholesky factor (n, n). Raises LinAlgError if the matrix is not positive definite.

    Calls LAPACK directly: for a few dozen rows scipy's checks take longer than the factorisation.
    """
    if not matrix.size:
        return matrix
    factor, info = dpotrf(matrix, lower=1, clean=1)
    if info:
        raise np.linalg.LinAlgError(f"the matrix is not positive definite in its leading {info} rows")
    return np.asarray(factor)


def solved(factor: Array, right: Array) -> Array:
    """Solve A x = ``right`` for A = L L' with lower factor L."""
    return np.asarray(dpotrs(factor, right, lower=1)[0]) if factor.size else right


def triangular_solve(factor: Array, right: Array) -> Array:
    """Solve L x = ``right`` for the lower factor L."""
    return np.asarray(dtrtrs(factor, right, lower=1)[0]) if right.size else right


def sites(kernel: Array, offset: Array, variance: Array, below: npt.NDArray[np.bool_]) -> tuple[Array, Array, float]:
    """y and variance (n) of all readings, with bounds replaced by sites, and the log evidence.

    kernel: prior covariance (n, n). offset: residual from the prior mean (n). below: (n) True for a lower bound. A site
    matches the moments of Phi((f - bound) / sd): equation 3.58 of Rasmussen and Williams.
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
        shrink = max(ratio * (z + ratio) / scale**2, LEAST_TILT)  # decrease of the variance over its square
        y[at] = mean[place] + ratio / (scale * shrink)
        spread[at] = max(1 / shrink - row[place], LEAST_VARIANCE)
        mean += row * (ratio / scale)
        covariance -= np.outer(row, row) * shrink
    return y, spread, evidence - 0.5 * len(exact) * math.log(2 * math.pi)


def _after(
    kernel: Array, offset: Array, variance: Array, rows: tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]
) -> tuple[Array, Array, float]:
    """Mean (b) and covariance (b, b) of the bounded values given the exact readings, and these readings' log
    evidence."""
    exact, bounds = rows
    block = kernel[np.ix_(bounds, bounds)]
    if not len(exact):
        return np.zeros(len(bounds)), block, 0.0
    among = kernel[np.ix_(exact, exact)]
    among.flat[:: len(exact) + 1] += variance[exact]
    factor = lower_factor(among)
    half, explained = triangular_solve(factor, kernel[np.ix_(exact, bounds)]), triangular_solve(factor, offset[exact])
    return (
        half.T @ explained,
        block - half.T @ half,
        -0.5 * float(explained @ explained) - float(np.log(factor.diagonal()).sum()),
    )
