"""The chance that a layout dies of memory: learned across layouts by structure, and for each from its own runs.

Out of memory can be certain or a matter of luck. A logistic regression over the degrees of parallelism says what an
untried layout risks; its own deaths and survivals then correct it, so a layout that died once in five runs is flaky,
not impossible. What needs as much as one that died is as likely to, whatever the regression says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from lora_tune.search.grey_box.gaussian import Array

_BELIEF: Mapping[str, tuple[float, float]] = {
    "tp": (-1.5, 1.0), "cp": (-1.0, 1.0), "pp": (-0.8, 1.0), "mbs": (1.5, 1.0), "sp": (-0.3, 0.5), "vp": (0.0, 0.5),
    "FP8_PARAMS": (-1.0, 1.0), "FP8_ACT": (-0.5, 1.0), "RECOMPUTE_GRANULARITY=full": (-2.0, 1.5),
    "RECOMPUTE_GRANULARITY=selective": (-0.7, 1.0), "RECOMPUTE_GRANULARITY=": (0.5, 1.0),
    "RECOMPUTE_NUM_LAYERS": (-0.5, 1.0),
}  # fmt: skip
"""Log-odds of death per feature, mean and sd: splitting a model further saves memory, larger micro-batches cost it;
frozen weights in FP8 alone, activations stored in FP8 and recomputed ones save it."""
_SWITCH = (0.0, 1.0)
"""The same of a switch that nothing is known of."""
OWN_WEIGHT = 0.15
"""Runs that the regression's word is worth against a layout's own record.

Peak memory differs by tens of GB between layouts and by about one between runs, so about one layout in seven is a
matter of luck: a Beta of this weight has 16% of its mass between rates of 0.1 and 0.9.
"""

FEWEST_STEPS, MOST_STEPS = 11, 50
"""Newton steps; it settles in fewer than the least where few runs were seen."""


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Fitted log-odds ``coefficients`` (1 + d) with their ``covariance``, and each layout's own record.

    labels (d): what the features are.
    """

    coefficients: Array
    covariance: Array
    record: Mapping[tuple[float, ...], tuple[int, int]]
    labels: tuple[str, ...]

    def probability(self, x: Array) -> Array:
        """Chance of death for speed-feature rows ``x`` (n, d)."""
        own, (low, high) = own_rates(self._regressed(x), x, self.record), self._bounds(x)
        died, lived = np.array([self.record.get(tuple(row.tolist()), (0, 0)) for row in x]).reshape(len(x), 2).T
        # What others did says nothing against a layout's own runs.
        return np.clip(own, np.where(lived > 0, 0.0, low), np.where(died + lived > 0, 1.0, high))

    def draws(self, x: Array, rng: np.random.Generator, count: int) -> Array:
        """Death rates (n, count) drawn jointly: untried layouts share the regression's error, others have a record."""
        coefficients = rng.multivariate_normal(self.coefficients, self.covariance, count)
        low, high = self._bounds(x)
        rates = np.clip(expit(np.c_[np.ones(len(x)), x] @ coefficients.T), low[:, None], high[:, None])
        return drawn_rates(rates, self.probability(x), self.weight(x), rng)

    def _regressed(self, x: Array) -> Array:
        rows = np.c_[np.ones(len(x)), x]
        odds = rows @ self.coefficients
        variance = np.einsum("ij,jk,ik->i", rows, self.covariance, rows)
        # The logistic averaged over a Gaussian: MacKay (1992), "The evidence framework", equation 10.
        return np.asarray(expit(odds / np.sqrt(1 + np.pi * variance / 8)))

    def _bounds(self, x: Array) -> tuple[Array, Array]:
        """The least and the largest chance (n) of rows (n, d) by layouts that always died, or lived, on less, or more.

        Deaths of what needs less, and survivals of what needs more, count as a layout's own: one may be bad luck, as
        its own first may, and each further one says more. The regression alone would have each of the many try.
        """
        tried = np.array(list(self.record)).reshape(len(self.record), x.shape[1])
        runs = np.array(list(self.record.values()), dtype=np.float64).reshape(len(tried), 2)
        died, lived = np.where(runs[:, ::-1] == 0, runs, 0.0).T
        more, less = _as_much(x, tried, self.labels), _as_much(tried, x, self.labels).T
        p, deaths, lives = self._regressed(x), (more & ~less) @ died, (less & ~more) @ lived
        low = np.where(deaths > 0, (OWN_WEIGHT * p + deaths) / (OWN_WEIGHT + deaths), 0.0)
        high = np.where(lives > 0, OWN_WEIGHT * p / (OWN_WEIGHT + lives), 1.0)
        return low, np.maximum(low, high)

    def weight(self, x: Array) -> Array:
        """Runs that each probability rests on, the regression's word included: after a survival p becomes p w/(w+1)."""
        return own_weights(x, self.record)


Record = Mapping[tuple[float, ...], tuple[int, int]]
"""Deaths and survivals of each layout, by its row."""


def own_rates(p: Array, x: Array, record: Record) -> Array:
    """Chances (n) of rows (n, d) after each one's own record."""
    chances = p.copy()
    for at, row in enumerate(x):
        died, lived = record.get(tuple(row.tolist()), (0, 0))
        chances[at] = (OWN_WEIGHT * p[at] + died) / (OWN_WEIGHT + died + lived)
    return chances


def drawn_rates(rates: Array, p: Array, weight: Array, rng: np.random.Generator) -> Array:
    """Drawn death rates (n, count), those of layouts with a record by that, of mean ``p`` and ``weight`` runs (n)."""
    drawn = rates.copy()
    for at in np.flatnonzero(weight > OWN_WEIGHT):
        safe = min(1 - 1e-6, max(1e-6, p[at]))
        drawn[at] = rng.beta(safe * weight[at], (1 - safe) * weight[at], rates.shape[1])
    return drawn


def own_weights(x: Array, record: Record) -> Array:
    """Runs that the chances of rows (n, d) rest on, a model's word included."""
    return np.array([OWN_WEIGHT + sum(record.get(tuple(row.tolist()), (0, 0))) for row in x])


def recorded(x: Array, died: Sequence[bool]) -> Record:
    """The record of each layout, of runs of rows ``x`` (n, d)."""
    dead: Counter[tuple[float, ...]] = Counter()
    alive: Counter[tuple[float, ...]] = Counter()
    for row, d in zip(x, died, strict=True):
        (dead if d else alive)[tuple(row.tolist())] += 1
    return {key: (dead[key], alive[key]) for key in dead.keys() | alive.keys()}


def needs_as_much(x: Array, dead: Array, labels: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Whether each of ``x`` (n, d) needs at least the memory of one of ``dead`` (m, d), by the beliefs' directions.

    True (n) where some dead row saves at least as much in every feature whose direction is known, and equals the row
    in the others.
    """
    return np.asarray(_as_much(x, dead, labels).any(axis=1))


def _as_much(x: Array, than: Array, labels: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Whether each of ``x`` (n, d) needs at least the memory of each of ``than`` (m, d): (n, m)."""
    way = np.array([_BELIEF.get(name, _SWITCH)[0] for name in labels])
    more = (x[:, None, :] - than[None, :, :]) * np.where(way == 0, 1, np.sign(way))
    return np.asarray(np.where(way == 0, more == 0, more >= 0).all(axis=2))


def fit(x: Array, died: Sequence[bool], labels: Sequence[str]) -> MemoryModel:
    """From speed features ``x`` (n, d) of runs and whether each died of memory; labels name the features."""
    layouts = "tp" in labels
    mean = np.array([-1.0 if layouts else -4.0, *(_BELIEF.get(name, _SWITCH)[0] for name in labels)])
    sd = np.array([1.5, *(_BELIEF.get(name, _SWITCH)[1] for name in labels)])
    rows, y = np.c_[np.ones(len(x)), x], np.array(died, dtype=np.float64)
    beta, precision = mean.copy(), np.diag(1 / sd**2)

    def log_posterior(at: Array) -> float:
        odds = rows @ at
        return float(y @ odds - np.logaddexp(0.0, odds).sum() - 0.5 * ((at - mean) ** 2 / sd**2).sum())

    for taken in range(MOST_STEPS):
        p = expit(rows @ beta)
        hessian = rows.T @ (rows * (p * (1 - p))[:, None]) + precision
        step = np.linalg.solve(hessian, rows.T @ (y - p) - precision @ (beta - mean))
        # Newton's whole step throws hundreds of runs of well separated layouts to where every chance is 0 or 1.
        while log_posterior(beta + step) < log_posterior(beta) - 1e-9:
            step = 0.5 * step
        beta = beta + step
        if taken >= FEWEST_STEPS and np.abs(step).max() < 1e-6:
            break
    return MemoryModel(beta, np.linalg.inv(hessian), recorded(x, died), tuple(labels))
