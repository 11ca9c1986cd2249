"""Families of eval curves: a fixed shape that every run of one workload and batch size follows, up to an offset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lora_tune.curves.points import Array, Points

HUBER = 1.345
"""Tuning constant of Huber's psi in units of the noise sd: 95% efficient under normal noise (Huber 1981, p. 18)."""

SPIKE = 2.5
"""An eval more than this many noise sd above the fit is a spike and is left out; spikes only go up."""

FAR_BELOW = 4.0
"""Last evals more than this many noise sd below the fit are no noise, but a curve that has left the family: of 1,298
good public runs none stops that far below."""

STEEP = 3.0
"""Standard errors by which a run may fall more steeply than its family: of good public runs 2% fall so steeply."""

TREND_CLIP = 6.0
"""Noise sd beyond which one eval counts no more for a trend: a spike at either end is none."""

LARGEST_EXPONENT = 700.0
"""Beyond this exp() leaves the range of a double; a forecast that far away means never (or at once)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The median curve of a workload: loss over ln(samples), piecewise linear and falling.

    log_samples, loss: knots; ``log_samples`` rises, ``loss`` falls. Two knots are a log-linear curve. The outer
    segments go on beyond the knots, but evals before the first knot are not used while there are later ones.
    noise: at each knot, the sd of one eval about its own run's curve, in loss; constant beyond the knots.
    seed: sd of the offset between runs of one configuration, in loss.
    wander: sd of a run's future offset about the one its evals so far show, beyond their noise, in loss.
    spread: sd of the offset between good runs of different configurations, in loss.
    drift: sd that a forecast gains per unit of ln(samples) beyond the last eval, in loss.
    name: where it comes from, for sentences.
    huber_above: tuning constant of Huber's psi for evals above the fit; less than ``HUBER`` where noise is skewed
        upwards.
    """

    log_samples: tuple[float, ...]
    loss: tuple[float, ...]
    noise: tuple[float, ...]
    seed: float
    wander: float
    spread: float
    drift: float
    name: str
    huber_above: float = HUBER

    def loss_at(self, samples: Array) -> Array:
        """The median curve at ``samples`` (positive), extrapolated along the outer segments."""
        return _line(np.log(samples), self.log_samples, self.loss)

    def noise_at(self, samples: Array) -> Array:
        """The sd of one eval at ``samples``, in loss."""
        return np.interp(np.log(samples), self.log_samples, self.noise)

    def samples_at(self, loss: float) -> float:
        """Where the median curve passes ``loss``; the inverse of :meth:`loss_at`."""
        falling = tuple(-v for v in self.loss)
        exponent = float(_line(np.array([-loss]), falling, self.log_samples)[0])
        return float(np.exp(np.clip(exponent, -LARGEST_EXPONENT, LARGEST_EXPONENT)))

    def valid(self, usable: Points) -> Points:
        """The evals from the first knot on; all of them when none is that late."""
        late = usable.samples >= 0.999 * np.exp(self.log_samples[0])
        return Points(usable.samples[late], usable.loss[late]) if late.any() else usable


class Offset(NamedTuple):
    """A run's distance from its family's curve: ``value`` and its sd from eval noise, both in loss.

    follows: False when the run's last two evals lie far below the fitted curve: a curve that falls
    discontinuously (FP4 with a healing step), to which the family does not apply.
    leaves: the last eval alone lies that far below, of at least three: a stop right after such a fall.
    steeper: the run falls more steeply than the family by ``STEEP``, so its shape may be another.
    """

    value: float
    sd: float
    follows: bool
    leaves: bool
    steeper: bool


def fit_offset(usable: Points, family: Family) -> Offset:
    """Huber's M-estimate of a run's offset from ``family``, evals weighted by 1/noise^2, spikes left out.

    Iterative reweighting from the lower median, at most 12 rounds. ``usable`` holds at least one point.
    When more than a third would be left out as spikes, none is: then the family's noise does not fit the run.
    """
    usable = family.valid(usable)
    residuals = usable.loss - family.loss_at(usable.samples)
    noise = family.noise_at(usable.samples)
    value = _huber(residuals, noise, family.huber_above, SPIKE)
    if len(residuals) > 2 and (residuals - value > SPIKE * noise).sum() > len(residuals) / 3:
        value = _huber(residuals, noise, family.huber_above, np.inf)
    sd = float(1 / np.sqrt((1 / noise**2).sum()))
    scaled = (residuals - value) / noise
    if len(scaled) < 3:
        return Offset(value, sd, follows=True, leaves=False, steeper=False)
    below = scaled[-2:] < -FAR_BELOW
    steeper = _trend(np.log(usable.samples), scaled) < -STEEP
    return Offset(value, sd, follows=not below.all(), leaves=bool(below[-1]), steeper=steeper)


def _trend(x: Array, scaled: Array) -> float:
    """The slope of residuals in units of their noise over ``x``, by least squares, over its standard error."""
    spread = x - x.mean()
    return float(spread @ np.clip(scaled, -TREND_CLIP, TREND_CLIP) / np.sqrt(spread @ spread))


def log_linear(
    level: float, slope: float, at: float, *,
    noise: float, seed: float, wander: float, spread: float, drift: float, name: str,
) -> Family:  # fmt: skip
    """The family ``level + slope * ln(samples / at)`` with ``slope < 0`` and equal noise everywhere."""
    assert slope < 0, "a family's curve falls"
    middle = float(np.log(at))
    return Family(
        log_samples=(middle - 1.0, middle), loss=(level - slope, level), noise=(noise, noise),
        seed=seed, wander=wander, spread=spread, drift=drift, name=name,
    )  # fmt: skip


def _huber(residuals: Array, noise: Array, above: float, spike: float) -> float:
    value = float(np.sort(residuals)[(len(residuals) - 1) // 2])
    precision = 1 / noise**2
    least = float(noise.min())
    for _ in range(12):
        distance = (residuals - value) / noise
        limit = np.where(distance > 0, above, HUBER)
        weights = precision * np.minimum(1.0, limit / np.maximum(np.abs(distance), limit)) * (distance <= spike)
        moved = float(weights @ residuals / weights.sum())
        if abs(moved - value) < 1e-3 * least:
            return moved
        value = moved
    return value


def _line(x: Array, knots: tuple[float, ...], values: tuple[float, ...]) -> Array:
    """Piecewise-linear interpolation with the outer segments continued."""
    grid, heights = np.asarray(knots), np.asarray(values)
    at = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    share = (x - grid[at - 1]) / (grid[at] - grid[at - 1])
    return np.asarray(heights[at - 1] + share * (heights[at] - heights[at - 1]), dtype=np.float64)
