"""Probability that a configuration runs out of memory: one model, on the memory model's GiB or on layout features.

ln(peak over the GPU's memory) is linear in the memory features, added to the prediction of
:mod:`lora_tune.search.physics`; without it the log-odds of failure are linear. A failed trial means a peak beyond the
limit, a successful one a peak below it, a measured peak its value; the posterior is a Laplace approximation. So one
failure informs about all layouts. Each layout's own failures and successes then correct it: one failure in five runs
means flaky, not impossible.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy.special import expit, ndtr

from lora_tune.search.grey_box.features import Coordinates, alike_once
from lora_tune.search.grey_box.gaussian import Array
from lora_tune.search.observations import Observation

_PRIOR_LOG_ODDS: Mapping[str, tuple[float, float]] = {
    "tp": (-1.5, 1.0), "cp": (-1.0, 1.0), "pp": (-0.8, 1.0), "mbs": (1.5, 1.0), "sp": (-0.3, 0.5), "vp": (0.0, 0.5),
    "FP8_PARAMS": (-1.0, 1.0), "FP8_ACT": (-0.5, 1.0), "RECOMPUTE_GRANULARITY=full": (-2.0, 1.5),
    "RECOMPUTE_GRANULARITY=selective": (-0.7, 1.0), "RECOMPUTE_GRANULARITY=": (0.5, 1.0),
    "RECOMPUTE_NUM_LAYERS": (-0.5, 1.0),
}  # fmt: skip
"""Prior of the log-odds of failure per feature, mean and sd: more model parallelism, FP8-only frozen weights, and FP8
or recomputed activations save memory; larger micro-batches need more."""
_SWITCH = (0.0, 1.0)
"""Prior of an unknown switch."""
LAYOUT_PRIOR_RUNS = 0.15
"""Weight of the joint model against a layout's own record, in runs.

Peak memory differs by tens of GB between layouts and by about one between runs, so about one layout in seven is random:
a Beta distribution of this weight has 16% of its mass between rates of 0.1 and 0.9.
"""

FEATURE_SD = 0.04
"""Prior sd of a feature's effect on ln(peak), besides the common error: 4% of the peak. Predictions for the recorded
four-GPU probes are within 5% (``python -m benchmarks.layout_replay``)."""

FRAGMENTS = 0.02
"""Sd of ln(peak) at the limit, from fragmentation of the allocator."""

MEASURED_SD = 0.01
"""Sd of ln(peak) of a measured peak, from other ranks and libraries."""

BEYOND = 2.0
"""A stated peak above this many times a GPU's memory is not in GiB, and is ignored."""

MOST_STEPS = 50
"""Maximum number of Newton steps."""

Values = Mapping[str, Any]
Record = Mapping[tuple[float, ...], tuple[int, int]]
"""Failures and successes of each layout, by its feature row."""


class MemoryPhysics(Protocol):
    """Interface of a memory model: ``search.physics``."""

    @property
    def limit(self) -> float:
        """GiB of a GPU."""
        ...

    @property
    def level_sd(self) -> float:
        """Sd of the common error of all points, in ln(GiB)."""
        ...

    def gib(self, tuned: Values) -> float:
        """Peak memory of a GPU, GiB."""
        ...


def death_logs(p: Array) -> Array:
    """ln of the cost factor for OOM probability ``p``: runs are repeated, and a failure costs half a run."""
    p = np.minimum(p, 0.999)
    return np.asarray(np.log1p(0.5 * p / (1 - p)))


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Coefficients (1 + d) with covariance, and each layout's own record.

    limit: GiB of a GPU; rows then begin with the predicted GiB, and the model is of ln(peak). None: model of log-odds.
    """

    coefficients: Array
    covariance: Array
    record: Record
    limit: float | None = None

    def chance(self, x: Array) -> tuple[Array, Array]:
        """OOM probability (n) of feature rows ``x`` (with the predicted GiB first, if there is a limit), and its weight
        in runs, including the joint model's: after a success p becomes p w/(w+1)."""
        offset, rows = self._line(x)
        by_line = self._chance(offset + rows @ self.coefficients, np.einsum("ij,jk,ik->i", rows, self.covariance, rows))
        runs = np.array([self.record.get(tuple(row.tolist()), (0, 0)) for row in x]).reshape(len(x), 2)
        weight = LAYOUT_PRIOR_RUNS + runs.sum(axis=1)
        return np.asarray((LAYOUT_PRIOR_RUNS * by_line + runs[:, 0]) / weight), weight

    def draws(self, x: Array, rng: np.random.Generator, count: int) -> Array:
        """Joint draws of OOM probabilities (n, count): untried layouts share the model's error, others use their
        record."""
        coefficients = rng.multivariate_normal(self.coefficients, self.covariance, count)
        offset, rows = self._line(x)
        drawn = self._chance(offset[:, None] + rows @ coefficients.T, np.zeros(1))
        p, weight = self.chance(x)
        for at in np.flatnonzero(weight > LAYOUT_PRIOR_RUNS):
            safe = min(1 - 1e-6, max(1e-6, p[at]))
            drawn[at] = rng.beta(safe * weight[at], (1 - safe) * weight[at], count)
        return drawn

    def _line(self, x: Array) -> tuple[Array, Array]:
        """The offset (n) and the design matrix (n, 1 + d)."""
        if self.limit is None:
            return np.zeros(len(x)), np.c_[np.ones(len(x)), x]
        return np.log(x[:, 0] / self.limit), np.c_[np.ones(len(x)), x[:, 1:]]

    def _chance(self, place: Array, variance: Array) -> Array:
        if self.limit is not None:
            return np.asarray(ndtr(place / np.sqrt(variance + FRAGMENTS**2)))
        # The logistic averaged over a Gaussian: MacKay (1992), "The evidence framework", equation 10.
        return np.asarray(expit(place / np.sqrt(1 + np.pi * variance / 8)))


def needs_as_much(x: Array, dead: Array, labels: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Whether each of ``x`` (n, d) needs at least the memory of one of ``dead`` (m, d), by the signs of the prior."""
    way = np.array([_PRIOR_LOG_ODDS.get(name, _SWITCH)[0] for name in labels])
    more = (x[:, None, :] - dead[None, :, :]) * np.where(way == 0, 1, np.sign(way))
    as_much = np.where(way == 0, more == 0, more >= 0).all(axis=2)
    return np.asarray(as_much.sum(axis=1) > 0)


def fit(
    x: Array, died: Sequence[bool], labels: Sequence[str], *, limit: float | None = None, level_sd: float = 0.0,
    measured: Array | None = None,
) -> MemoryModel:  # fmt: skip
    """Fit to runs with rows ``x`` and whether each ran out of memory; labels: names of the features.

    limit: GiB of a GPU; rows then begin with the predicted GiB; level_sd: sd of its common error in ln(GiB); measured:
    peaks in GiB (n), NaN if unknown.
    """
    if limit is None:
        prior = np.array(
            [(-1.0 if "tp" in labels else -4.0, 1.5), *(_PRIOR_LOG_ODDS.get(name, _SWITCH) for name in labels)]
        )
        slope, mean, sd = 1.0, *prior.T
    else:  # slope: of the logistic nearest to the normal distribution
        slope, mean = 1.702 / FRAGMENTS, np.zeros(x.shape[1])
        sd = np.r_[level_sd, np.full(x.shape[1] - 1, FEATURE_SD)]
    offset, rows = MemoryModel(mean, np.diag(sd**2), {}, limit)._line(x)
    known = np.zeros(len(x), dtype=np.bool_) if measured is None or limit is None else measured < BEYOND * limit
    target = np.zeros(len(x))
    if measured is not None and limit is not None:
        target[known] = np.log(measured[known] / limit) - offset[known]
    weight, y, precision = known / MEASURED_SD**2, np.array(died, dtype=np.float64), np.diag(1 / sd**2)

    def derivatives(beta: Array) -> tuple[float, Array, Array]:
        over, off = slope * (offset + rows @ beta), rows @ beta - target
        p, apart = expit(over), beta - mean
        value = y @ over - np.logaddexp(0.0, over).sum()
        value -= 0.5 * (weight * off**2).sum() + 0.5 * apart @ precision @ apart
        first = rows.T @ (slope * (y - p) - weight * off) - precision @ apart
        second = rows.T @ (rows * (slope**2 * p * (1 - p) + weight)[:, None]) + precision
        return float(value), first, second

    beta, now = mean.copy(), derivatives(mean)
    for _ in range(MOST_STEPS):
        step = np.linalg.solve(now[2], now[1])
        # With hundreds of well separated runs a full Newton step overshoots to probabilities 0 and 1.
        while (then := derivatives(beta + step))[0] < now[0] - 1e-9 and np.abs(step).max() > 1e-8:
            step = 0.5 * step
        beta, now = beta + step, then
        if np.abs(step).max() < 1e-7:
            break
    runs = Counter((tuple(row), bool(d)) for row, d in zip(x.tolist(), died, strict=True))
    record = {row: (runs[row, True], runs[row, False]) for row, _ in runs}
    return MemoryModel(beta, np.asarray(np.linalg.inv(now[2])), record, limit)


@dataclass(frozen=True)
class MemoryRisk:
    """OOM probabilities of configurations in the study's parameters."""

    coordinates: Coordinates
    needs: MemoryPhysics | None
    model: MemoryModel

    def chance(self, points: Sequence[Values]) -> tuple[Array, Array]:
        """OOM probability (n) of each configuration, now and after one success."""
        p, weight = self.model.chance(_rows(self.coordinates, self.needs, points))
        return p, p * weight / (weight + 1)

    def draws(self, points: Sequence[Values], rng: np.random.Generator, count: int) -> Array:
        """Joint draws of the OOM probabilities of configurations (n, count)."""
        return self.model.draws(_rows(self.coordinates, self.needs, points), rng, count)

    def differs(self, values: Values, instead: Values) -> bool:
        """Whether the two differ in memory features."""
        features = self.coordinates.memory_features
        return features(values) != features(instead)


def learn_memory(coordinates: Coordinates, observed: Sequence[Observation], needs: MemoryPhysics | None) -> MemoryRisk:
    """Fit to this study's own trials. needs: memory model, if there is one."""
    tested = [o for o in observed if o.ran or (o.infeasible and not (needs and o.refused))]
    x, died = _rows(coordinates, needs, [o.values for o in tested]), [o.infeasible for o in tested]
    if needs is None:
        return MemoryRisk(coordinates, None, fit(x, died, coordinates.memory_labels))
    # The peak that a failed run printed before its failure says nothing of the memory it requested.
    measured = np.array([math.nan if o.infeasible else o.peak_gib for o in tested], dtype=np.float64)
    limits = {"limit": needs.limit, "level_sd": needs.level_sd}
    return MemoryRisk(coordinates, needs, fit(x, died, coordinates.memory_labels, **limits, measured=measured))


def _rows(coordinates: Coordinates, needs: MemoryPhysics | None, points: Sequence[Values]) -> Array:
    """Memory features, one row per configuration, with the predicted GiB first if there is a memory model."""
    width = len(coordinates.memory_labels)
    coded = alike_once(coordinates, coordinates.memory_features, points)
    rows = np.array(coded, dtype=np.float64).reshape(len(points), width)
    return rows if needs is None else np.c_[np.array([needs.gib(v) for v in points]), rows]
