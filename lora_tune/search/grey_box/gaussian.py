"""Gaussian-process regression with a trend, several sources and one-sided observations. No tuning of anything here.

The model of one quantity y over features x in about [-1, 1]: a linear trend with Gaussian coefficients, a smooth
residual (Matern 5/2), and for every source of data, this study among them, a shift and a residual of its own, so that
old or published figures inform without being believed: how far sources depart is learned from the data.
Rasmussen and Williams (2006), chapters 2 (regression, trends) and 3.6 (expectation propagation for one-sided sites).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.special import log_ndtr

Array = npt.NDArray[np.float64]
HERE = 0
"""The source number of this study's own data; every other number is another source."""

EP_SWEEPS = 6
LARGEST_VARIANCE = 1e8
JITTER = 1e-10
"""Relative to the prior variance: keeps repeated rows from spoiling the factorisation."""
NOISE_RUNS = 8.0
"""Repeated seeds that the belief in the usual noise of readings is worth: an sd of a quarter."""


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
    own = np.flatnonzero((data.source == HERE) & ~data.below & (data.extended == 0))
    settings: dict[bytes, list[int]] = {}
    for at in own:
        settings.setdefault(data.x[at].tobytes(), []).append(int(at))
    squares, freedom = NOISE_RUNS, NOISE_RUNS
    for rows in settings.values():
        weight = data.sd[rows] ** -2.0
        squares += float((weight * (data.y[rows] - np.average(data.y[rows], weights=weight)) ** 2).sum())
        freedom += len(rows) - 1
    return math.sqrt(squares / freedom)


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
    log_evidence: float

    def predict(self, x: Array, basis: Array) -> tuple[Array, Array]:
        """Mean (m) and covariance (m, m) at feature rows ``x`` with trend rows ``basis``."""
        cross = _covariance(self.prior, (x, basis, np.zeros(len(x), np.int64)), _rows(self.data))
        half = solve_triangular(self.factor, cross.T, lower=True)
        here = (x, basis, np.zeros(len(x), np.int64))
        mean = basis @ self.prior.mean + cross @ self.weights
        covariance = _covariance(self.prior, here, here) - half.T @ half
        return mean, 0.5 * (covariance + covariance.T) + 1e-10 * np.eye(len(x))

    def predict_each(self, x: Array, basis: Array) -> tuple[Array, Array]:
        """The same mean (m), and the variance of each row alone (m)."""
        cross = _covariance(self.prior, (x, basis, np.zeros(len(x), np.int64)), _rows(self.data))
        half = solve_triangular(self.factor, cross.T, lower=True)
        mean = basis @ self.prior.mean + cross @ self.weights
        alone = basis**2 @ self.prior.sd**2 + self.prior.amplitude**2 + 2 * self.prior.departure**2
        return mean, np.maximum(alone - (half**2).sum(axis=0), 0.0) + 1e-10


Rows = tuple[Array, Array, npt.NDArray[np.int64]]


def _rows(data: Data) -> Rows:
    return data.x, data.basis, data.source


def _covariance(prior: Prior, a: Rows, b: Rows) -> Array:
    xa, xb = a[0] * prior.weights, b[0] * prior.weights
    smooth = matern(xa, xb, prior.length)
    trend = (a[1] * prior.sd**2) @ b[1].T
    same = a[2][:, None] == b[2][None, :]
    # Every source, this study too, departs from what all share by a shift and as much by a smooth curve of its own.
    departure = np.where(a[2] == HERE, prior.departure, prior.shift)[:, None] ** 2
    return np.asarray(trend + prior.amplitude**2 * smooth + same * departure * (1 + smooth))


def condition(data: Data, prior: Prior) -> Posterior:
    """The posterior given ``data``; lower bounds enter as Gaussian sites found by expectation propagation."""
    kernel = _covariance(prior, _rows(data), _rows(data))
    kernel += JITTER * (kernel.trace() / max(1, len(kernel))) * np.eye(len(kernel))
    offset = data.y - data.basis @ prior.mean
    variance = data.variance(prior.noise_scale)
    site_y, site_variance = offset.copy(), variance.copy()
    bounds = np.flatnonzero(data.below)
    site_variance[bounds] = LARGEST_VARIANCE
    for _ in range(EP_SWEEPS if len(bounds) else 0):
        factor = cholesky(kernel + np.diag(site_variance), lower=True)
        sites = (site_y[bounds], site_variance[bounds])
        cavity = _cavity(kernel, factor, site_y, sites, bounds)
        site_y[bounds], site_variance[bounds] = _one_sided_sites(cavity, sites, offset[bounds], variance[bounds])
    factor = cholesky(kernel + np.diag(site_variance), lower=True)
    weights = cho_solve((factor, True), site_y)
    evidence = -0.5 * site_y @ weights - np.log(np.diag(factor)).sum() - 0.5 * len(site_y) * math.log(2 * math.pi)
    if len(bounds):
        sites = (site_y[bounds], site_variance[bounds])
        cavity = _cavity(kernel, factor, site_y, sites, bounds)
        evidence += _corrections(cavity, sites, offset[bounds], variance[bounds])
    return Posterior(prior=prior, data=data, factor=factor, weights=weights, log_evidence=float(evidence))


Pair = tuple[Array, Array]


def _cavity(kernel: Array, factor: Array, site_y: Array, site: Pair, bounds: npt.NDArray[np.int64]) -> Pair:
    """Mean and variance of each bounded value without its own site; ``factor`` is of kernel plus site variances."""
    half = solve_triangular(factor, kernel[:, bounds], lower=True)
    mean = kernel[bounds] @ cho_solve((factor, True), site_y)
    spread = np.maximum(np.diag(kernel)[bounds] - (half**2).sum(0), 1e-12)
    precision = np.maximum(1 / spread - 1 / site[1], 1e-9)
    return (mean / spread - site[0] / site[1]) / precision, 1 / precision


def _corrections(cavity: Pair, site: Pair, bound: Array, variance: Array) -> float:
    """What the bounds add to the Gaussian evidence of their sites: equation 3.65 of the book, less shared terms."""
    (mean, spread), (site_y, site_variance) = cavity, site
    total = spread + site_variance
    normal = 0.5 * np.log(2 * math.pi * total) + (mean - site_y) ** 2 / (2 * total)
    return float((log_ndtr((mean - bound) / np.sqrt(variance + spread)) + normal).sum())


def _one_sided_sites(cavity: Pair, site: Pair, bound: Array, variance: Array) -> Pair:
    """One damped sweep: sites whose moments match Phi((f - bound) / sd); equations 3.58, 3.59 of the book."""
    (mean, spread), (site_y, site_variance) = cavity, site
    scale = np.sqrt(variance + spread)
    z = (mean - bound) / scale
    ratio = np.exp(-0.5 * z * z - 0.5 * math.log(2 * math.pi) - log_ndtr(z))
    new_mean = mean + spread * ratio / scale
    new_variance = np.maximum(spread - spread**2 * ratio * (z + ratio) / scale**2, 1e-9)
    tilt = np.clip(1 / new_variance - 1 / spread, 1 / LARGEST_VARIANCE, 1e9)
    shift = new_mean / new_variance - mean / spread
    damped = 0.5 * tilt + 0.5 / site_variance
    damped_shift = 0.5 * shift + 0.5 * site_y / site_variance
    return damped_shift / damped, 1 / damped


Belief = Callable[[Prior], float]


def fit(data: Data, start: Prior, log_belief: Belief, *, sweeps: int = 2) -> Prior:
    """Scales of ``start`` moved to the best evidence times belief, one scale after the other on a coarse grid.

    A coarse grid (factors of 2) suffices: beliefs are weak, and a finer optimum changes no decision.
    """
    best = start
    best_value = condition(data, best).log_evidence + log_belief(best)
    for _ in range(sweeps):
        for name, factor in STEPS:
            for direction in (factor, 1 / factor):
                for _ in range(LONGEST_WALK):
                    trial = replace(best, **{name: getattr(best, name) * direction})
                    value = condition(data, trial).log_evidence + log_belief(trial)
                    if value <= best_value + 1e-6:
                        break
                    best, best_value = trial, value
    return best


LONGEST_WALK = 6
"""Steps of one scale in one direction: a factor of 64, beyond which no belief reaches."""
STEPS = (("departure", 2.0), ("shift", 2.0), ("amplitude", 2.0), ("length", 2.0), ("noise_scale", 1.25))
"""Scales that are fitted, and the factors by which they are moved."""
