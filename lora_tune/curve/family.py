"""Families of eval curves: a fixed shape that every run of one workload and batch size follows, up to an offset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lora_tune.curve.points import Array, evals_of, first_reached, points
from lora_tune.mllog import Eval, Run

HUBER = 1.345
"""Tuning constant of Huber's psi in units of the noise sd: 95% efficient under normal noise (Huber 1981, p. 18)."""

LARGEST_EXPONENT = 700.0
"""Beyond this exp() leaves the range of a double; a forecast that far away means never (or at once)."""

FEWEST_RUNS_FOR_A_SHAPE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The median curve of a workload: loss over ln(samples), piecewise linear and falling.

    log_samples, loss: knots; ``log_samples`` rises, ``loss`` falls. One segment is a log-linear curve; outside the
    knots the outer segments go on.
    noise: sd of one eval about its own run's curve, in loss.
    seed: sd of the offset between runs of one configuration, in loss.
    drift: sd that a forecast gains per unit of ln(samples) beyond the last eval, in loss.
    name: where it comes from, for sentences.
    """

    log_samples: tuple[float, ...]
    loss: tuple[float, ...]
    noise: float
    seed: float
    drift: float
    name: str

    def loss_at(self, samples: Array) -> Array:
        """The median curve at ``samples`` (positive), extrapolated along the outer segments."""
        return _line(np.log(samples), self.log_samples, self.loss)

    def samples_at(self, loss: float) -> float:
        """Where the median curve passes ``loss``; the inverse of :meth:`loss_at`."""
        falling = [-v for v in self.loss]
        exponent = float(_line(np.array([-loss]), tuple(falling), self.log_samples)[0])
        return float(np.exp(np.clip(exponent, -LARGEST_EXPONENT, LARGEST_EXPONENT)))

    def slope_at(self, loss: float) -> float:
        """d loss / d ln(samples) of the segment that passes ``loss``; negative."""
        at = int(np.clip(np.searchsorted([-v for v in self.loss], -loss), 1, len(self.loss) - 1))
        return (self.loss[at] - self.loss[at - 1]) / (self.log_samples[at] - self.log_samples[at - 1])


def log_linear(level: float, slope: float, at: float, *, noise: float, seed: float, drift: float, name: str) -> Family:
    """The family ``level + slope * ln(samples / at)`` with ``slope < 0``."""
    assert slope < 0, "a family's curve falls"
    middle = float(np.log(at))
    knots = (middle, middle + 1.0)
    return Family(log_samples=knots, loss=(level, level + slope), noise=noise, seed=seed, drift=drift, name=name)


def huber_offset(residuals: Array, noise: float) -> float:
    """Huber's M-estimate of location with fixed scale ``noise``, by reweighting from the median (8 rounds)."""
    if len(residuals) < 3:
        return float(np.median(residuals))
    offset = float(np.median(residuals))
    limit = HUBER * noise
    for _ in range(8):
        distance = np.abs(residuals - offset)
        weights = limit / np.maximum(distance, limit)
        moved = float(weights @ residuals / weights.sum())
        if abs(moved - offset) < 1e-3 * noise:
            return moved
        offset = moved
    return offset


def learn_family(runs: Sequence[Run | Sequence[Eval]], target: float) -> Family | None:
    """The log-linear shape that a study's own runs share, from their last halves before the target.

    One slope for all runs (the median of per-run Theil-Sen slopes in loss over ln(samples), runs of at least three
    usable evals), noise and seed spread by the median absolute deviation of residuals and of offsets.
    None while fewer than three runs show a falling curve.
    """
    slopes: list[tuple[float, Array, Array]] = []
    offsets: list[float] = []
    residuals: list[float] = []
    for run in runs:
        samples, loss = _near_target(evals_of(run), target)
        slope = theil_sen(np.log(samples), loss) if len(samples) >= 3 else 0.0
        if slope < 0:
            slopes.append((slope, samples, loss))
    if len(slopes) < FEWEST_RUNS_FOR_A_SHAPE:
        return None
    slope = float(np.median([s for s, _, _ in slopes]))
    middle = float(np.exp(np.median([np.log(samples[-1]) for _, samples, _ in slopes])))
    for _, samples, loss in slopes:
        levels = loss - slope * np.log(samples / middle)
        offsets.append(float(np.median(levels)))
        residuals.extend(levels - offsets[-1])
    noise = max(_sd(np.array(residuals)), 1e-6 * abs(target), 1e-12)
    spread = _sd(np.array(offsets))
    return log_linear(
        float(np.median(offsets)), slope, middle,
        noise=noise, seed=spread, drift=float(_sd(np.array([s for s, _, _ in slopes]))),
        name=f"shape learned from {len(slopes)} runs of this study",
    )  # fmt: skip


def theil_sen(x: Array, y: Array) -> float:
    """Median slope over all pairs of points (Theil 1950, Sen 1968); NaN with fewer than two distinct ``x``."""
    slopes = pair_slopes(x, y)
    return float(np.median(slopes)) if len(slopes) else float("nan")


def pair_slopes(x: Array, y: Array) -> Array:
    """Slopes of all pairs of points with distinct ``x``; at most 64 points count (the last ones)."""
    x, y = x[-64:], y[-64:]
    first, second = np.triu_indices(len(x), k=1)
    run = x[second] - x[first]
    usable = run > 0
    return np.asarray((y[second] - y[first])[usable] / run[usable], dtype=np.float64)


def _near_target(evals: Sequence[Eval], target: float) -> tuple[Array, Array]:
    """The last half (at least four) of the evals up to the first that reached the target."""
    stop = first_reached(evals, target)
    samples, loss = points(evals)
    if stop is not None:
        keep = samples <= stop.samples
        samples, loss = samples[keep], loss[keep]
    start = max(0, min(len(samples) - 4, len(samples) // 2))
    return samples[start:], loss[start:]


def _sd(values: Array) -> float:
    """Robust sd: 1.4826 times the median absolute deviation; the plain sd when that is 0."""
    if len(values) < 2:
        return 0.0
    robust = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    return robust if robust > 0 else float(np.std(values))


def _line(x: Array, knots: tuple[float, ...], values: tuple[float, ...]) -> Array:
    """Piecewise-linear interpolation with the outer segments continued."""
    grid, heights = np.asarray(knots), np.asarray(values)
    at = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    share = (x - grid[at - 1]) / (grid[at] - grid[at - 1])
    return np.asarray(heights[at - 1] + share * (heights[at] - heights[at - 1]), dtype=np.float64)
