"""Lower bounds in a Gaussian process, as Gaussian sites found by expectation propagation.

Exact readings enter first; the sites are then found in the belief that these leave of the bounded values. So a sweep
factorises a matrix of as many rows as there are bounds, not readings.
Rasmussen and Williams (2006), chapter 3.6 (expectation propagation for one-sided sites).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.linalg.lapack import dpotrf, dpotrs, dtrtrs
from scipy.special import log_ndtr

Array = npt.NDArray[np.float64]
Pair = tuple[Array, Array]

SWEEPS = 6
LARGEST_VARIANCE = 1e8


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """y and variance (n) of every reading, those of bounds found; log_evidence: of all readings."""

    y: Array
    variance: Array
    log_evidence: float


def sites(kernel: Array, offset: Array, variance: Array, below: npt.NDArray[np.bool_]) -> Sites:
    """The sites of readings with this prior covariance (n, n), distance from the prior mean and variance (n).

    below: (n) True where the reading is only a lower bound; of at least one.
    """
    exact, bounds = np.flatnonzero(~below), np.flatnonzero(below)
    mean, belief, evidence = _after(kernel, offset, variance, (exact, bounds))
    bound, spread = offset[bounds], variance[bounds]
    site: Pair = (bound.copy(), np.full(len(bounds), LARGEST_VARIANCE))
    for _ in range(SWEEPS):
        cavity, _ = _cavity(mean, belief, site)
        site = _matched(cavity, site, bound, spread)
    cavity, more = _cavity(mean, belief, site)
    y, all_variance = offset.copy(), variance.copy()
    y[bounds], all_variance[bounds] = site
    evidence += more + _corrections(cavity, site, bound, spread) - 0.5 * len(offset) * math.log(2 * math.pi)
    return Sites(y=y, variance=all_variance, log_evidence=evidence)


Rows = npt.NDArray[np.intp]


def _after(kernel: Array, offset: Array, variance: Array, rows: tuple[Rows, Rows]) -> tuple[Array, Array, float]:
    """Mean (b) and covariance (b, b) of the bounded values after the exact readings, whose evidence is the third."""
    exact, bounds = rows
    own = kernel[np.ix_(bounds, bounds)]
    if not len(exact):
        return np.zeros(len(bounds)), own, 0.0
    among = kernel[np.ix_(exact, exact)]
    among.flat[:: len(exact) + 1] += variance[exact]
    factor = lower_factor(among)
    half, told = half_solved(factor, kernel[np.ix_(exact, bounds)]), half_solved(factor, offset[exact])
    return half.T @ told, own - half.T @ half, -0.5 * float(told @ told) - float(np.log(factor.diagonal()).sum())


def _cavity(mean: Array, belief: Array, site: Pair) -> tuple[Pair, float]:
    """Mean and variance of each bounded value without its own site, and what the sites add to the evidence."""
    together = belief.copy()
    together.flat[:: len(mean) + 1] += site[1]
    factor = lower_factor(together)
    half, apart = half_solved(factor, belief), half_solved(factor, site[0] - mean)
    now = mean + half.T @ apart
    spread = np.maximum(belief.diagonal() - (half**2).sum(0), 1e-12)
    precision = np.maximum(1 / spread - 1 / site[1], 1e-9)
    evidence = -0.5 * float(apart @ apart) - float(np.log(factor.diagonal()).sum())
    return ((now / spread - site[0] / site[1]) / precision, 1 / precision), evidence


def _corrections(cavity: Pair, site: Pair, bound: Array, variance: Array) -> float:
    """What the bounds add to the Gaussian evidence of their sites: equation 3.65 of the book, less shared terms."""
    (mean, spread), (site_y, site_variance) = cavity, site
    total = spread + site_variance
    normal = 0.5 * np.log(2 * math.pi * total) + (mean - site_y) ** 2 / (2 * total)
    return float((log_ndtr((mean - bound) / np.sqrt(variance + spread)) + normal).sum())


def _matched(cavity: Pair, site: Pair, bound: Array, variance: Array) -> Pair:
    """One damped sweep: sites whose moments match Phi((f - bound) / sd); equations 3.58, 3.59 of the book."""
    (mean, spread), (site_y, site_variance) = cavity, site
    scale = np.sqrt(variance + spread)
    z = (mean - bound) / scale
    ratio = np.exp(-0.5 * z * z - 0.5 * math.log(2 * math.pi) - log_ndtr(z))
    new_mean = mean + spread * ratio / scale
    new_variance = np.maximum(spread - spread**2 * ratio * (z + ratio) / scale**2, 1e-9)
    tilt = np.minimum(np.maximum(1 / new_variance - 1 / spread, 1 / LARGEST_VARIANCE), 1e9)
    shift = new_mean / new_variance - mean / spread
    damped = 0.5 * tilt + 0.5 / site_variance
    damped_shift = 0.5 * shift + 0.5 * site_y / site_variance
    return damped_shift / damped, 1 / damped
