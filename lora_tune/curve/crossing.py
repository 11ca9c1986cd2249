"""Where a run's eval curve crosses the target: the estimate, its interval, and the raw stop beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lora_tune.curve.family import LARGEST_EXPONENT, Family, huber_offset, pair_slopes
from lora_tune.curve.points import Points, eval_interval, evals_of, first_reached, points
from lora_tune.mllog import Eval, Run

Z90 = 1.6448536269514722
"""Half-width of a central 90% interval in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Samples to target of the configuration that a run tried, as far as this one run tells.

    samples: the estimate; infinite when the curve does not fall towards the target, or nothing was read yet.
    low, high: 90% interval for the configuration's mean (seed spread and eval noise of this run included).
    stop_samples, stop_seconds: the raw stop, i.e. the first eval at or under the target; None when not reached.
    censored: the target was not reached; ``samples`` is then a forecast.
    method: how the estimate was made, for reports.
    """

    samples: float
    low: float
    high: float
    stop_samples: float | None
    stop_seconds: float | None
    censored: bool
    method: str


def estimate(
    run: Run | Sequence[Eval], target: float, *, family: Family | None = None, quantum: float | None = None
) -> Crossing:
    """Estimate where ``run`` crosses ``target`` (eval loss, lower is better).

    With a ``family`` the run's offset from the family's curve is estimated by Huber's M-estimator over all evals up
    to the stop, and the shifted curve is crossed with the target. Without one a free robust line in loss over
    ln(samples) is fitted to the evals near the end. ``quantum``: samples between evals (default: as read).
    Takes anything (NaN, infinite, repeated, decreasing, thousands of evals, none) and never raises.
    """
    evals = evals_of(run)
    stop = first_reached(evals, target)
    usable = points(evals)
    if stop is not None:
        keep = usable.samples <= stop.samples
        usable = Points(usable.samples[keep], usable.loss[keep])
    step = quantum if quantum is not None and quantum > 0 else eval_interval(usable.samples)
    if len(usable.samples) == 0:
        found = (math.inf, 0.0, math.inf, "no eval that can be used")
    elif family is not None:
        found = _by_family(usable, target, family)
    else:
        found = _by_free_fit(usable, target, stop, step)
    samples, low, high, method = found
    return Crossing(
        samples=samples, low=min(low, samples), high=max(high, samples),
        stop_samples=None if stop is None else stop.samples,
        stop_seconds=None if stop is None else stop.seconds,
        censored=stop is None, method=method,
    )  # fmt: skip


Found = tuple[float, float, float, str]


def _by_family(usable: Points, target: float, family: Family) -> Found:
    """Fixed shape, Huber offset. The interval adds seed spread, eval noise and, for a forecast, drift."""
    offset = huber_offset(usable.loss - family.loss_at(usable.samples), family.noise)
    samples = family.samples_at(target - offset)
    ahead = max(0.0, math.log(samples / usable.samples[-1]))
    sd = math.sqrt(family.seed**2 + family.noise**2 / len(usable.samples) + (family.drift * ahead) ** 2)
    low = family.samples_at(target - offset + Z90 * sd)
    high = family.samples_at(target - offset - Z90 * sd)
    return samples, low, high, f"fixed shape ({family.name}), Huber offset over {len(usable.samples)} evals"


def _by_free_fit(usable: Points, target: float, stop: Eval | None, step: float) -> Found:
    """Robust line through the evals near the end, in loss over ln(samples).

    The slope is the median over pairs; its 5% and 95% quantiles over pairs, and the scatter of the levels, make the
    interval. A reached target keeps the crossing within the interval before the stop and two quanta around it.
    """
    samples, loss = _tail(usable)
    slopes = pair_slopes(np.log(samples), loss)
    if stop is not None and (len(samples) < 3 or not np.median(slopes) < 0):
        middle = max(stop.samples - step / 2, stop.samples / 2)
        return middle, max(0.0, stop.samples - 1.5 * step), stop.samples + step, "raw stop less half an eval interval"
    if len(samples) < 3 or not np.median(slopes) < 0:
        return math.inf, float(usable.samples[-1]), math.inf, "no falling curve to extend"
    slope = float(np.median(slopes))
    steep, flat = (float(v) for v in np.quantile(slopes, [0.05, 0.95]))
    middle = float(np.log(samples).mean())
    levels = loss - slope * (np.log(samples) - middle)
    level = float(np.median(levels))
    sd = 1.4826 * float(np.median(np.abs(levels - level)))
    margin = Z90 * sd * math.sqrt(math.pi / 2 / len(samples))
    centre = _exp(middle + (target - level) / slope)
    low = _exp(middle + (target - level + margin) / (steep if target < level else flat))
    high = _exp(middle + (target - level - margin) / (flat if target < level else steep)) if flat < 0 else math.inf
    if stop is not None:
        centre = min(max(centre, stop.samples - 2 * step), stop.samples + step)
        low, high = max(min(low, centre), stop.samples - 3 * step), min(max(high, centre), stop.samples + 2 * step)
    return centre, low, high, f"free log-linear fit to the last {len(samples)} evals"


def _tail(usable: Points) -> Points:
    """The part of a free curve that a straight line in ln(samples) can follow: its last half, at least five evals."""
    start = max(0, min(len(usable.samples) - 5, len(usable.samples) // 2))
    return Points(usable.samples[start:], usable.loss[start:])


def _exp(exponent: float) -> float:
    if exponent > LARGEST_EXPONENT:
        return math.inf
    return math.exp(exponent)
