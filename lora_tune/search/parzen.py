"""Optuna's Parzen estimator with its densities computed by whole arrays: the same numbers, ten times sooner.

Optuna's own evaluates the normal distribution of every (candidate, trial) pair of an integer parameter in Python, one
by one, which is most of what asking TPE costs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from optuna.samplers._tpe.parzen_estimator import _ParzenEstimator
from optuna.samplers._tpe.probability_distributions import _BatchedCategoricalDistributions

Array = npt.NDArray[np.float64]


class ParzenEstimator(_ParzenEstimator):
    """As Optuna's, drawn from by Optuna's own code; :meth:`log_pdf` agrees with its to about 1e-12."""

    def log_pdf(self, samples_dict: dict[str, npt.NDArray[Any]]) -> Array:
        """Log density of m samples, by parameter (m) each: (m). The mixture of the products over the parameters."""
        samples, mixture = self._transform(samples_dict), self._mixture_distribution
        logs = np.tile(np.log(mixture.weights), (len(samples), 1))
        for column, kernels in zip(samples.T, mixture.distributions, strict=True):
            if isinstance(kernels, _BatchedCategoricalDistributions):
                logs += np.log(kernels.weights[:, column.astype(np.int64)]).T
            else:
                logs += _log_density(column, kernels)
        top = logs.max(axis=1)
        top[np.isneginf(top)] = 0.0
        with np.errstate(divide="ignore"):  # a density of 0
            return np.asarray(np.log(np.exp(logs - top[:, None]).sum(axis=1)) + top)


def _log_density(x: Array, kernels: Any) -> Array:
    """Log densities of m values under n truncated normal kernels (m, n); of grid values, their cells' mass."""
    mu, sigma = kernels.mu, kernels.sigma
    inside = log_mass((kernels.adapted_low - mu) / sigma, (kernels.adapted_high - mu) / sigma)
    scale = np.log if kernels.is_log else np.asarray
    if kernels.step == 0.0:
        at = scale(x)
        z = (at[:, None] - mu) / sigma
        logs = -0.5 * z**2 - 0.5 * np.log(2 * np.pi) - np.log(sigma) - inside
        outside = (at < kernels.adapted_low) | (at > kernels.adapted_high)
        return np.asarray(np.where(outside[:, None], -np.inf, logs))
    cells, where = np.unique(x, return_inverse=True)
    ends = [scale(cells + side * kernels.step / 2) for side in (-1, 1)]
    below, above = ((end[:, None] - mu) / sigma for end in ends)
    return np.asarray((log_mass(below, above) - inside)[where])


def log_mass(a: Array, b: Array) -> Array:
    """Log probability of a standard normal between ``a`` and ``b`` > ``a``, both (n) or (m, n), exact in the tails."""
    from scipy.special import log_ndtr  # here: it would double what starting any command takes

    # In the right tail the difference of two numbers next to 1 says nothing: mirrored to the left.
    right = a > 0
    low, high = np.where(right, -b, a), np.where(right, -a, b)
    log_high = log_ndtr(high)
    return np.asarray(log_high + np.log1p(-np.exp(log_ndtr(low) - log_high)))
