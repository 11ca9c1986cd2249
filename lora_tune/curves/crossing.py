"""Where a run's eval curve crosses the target: the estimate, its interval, and the raw stop beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lora_tune.curves.family import Family, Offset, fit_offset
from lora_tune.curves.learn import SEED_CV, before_target, free_family
from lora_tune.curves.phases import second_phase
from lora_tune.curves.points import Points, eval_interval, evals_of, first_reached, usable_samples
from lora_tune.logs.run import Eval, RunLog

Z90 = 1.6448536269514722
"""Half-width of a central 90% interval in standard deviations."""

LATEST_CROSSING = 0.75
"""Eval intervals after the raw stop that a believed crossing may lie at most: of 1,298 good public runs 0.4% do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Samples to target of the configuration that a run tried, as far as this one run tells.

    samples: the estimate; infinite when the curve does not fall towards the target, or nothing was read yet.
    low, high: 90% interval for the configuration's mean (seed spread and eval noise of this run included).
    stop_samples, stop_seconds: the raw stop, i.e. the first eval at or under the target; None when not reached.
    censored: the target was not reached; ``samples`` is then a forecast.
    method: how the estimate was made, for reports.
    by_stop: no curve is believed, and ``samples`` is the raw stop less half an eval interval.
    """

    samples: float
    low: float
    high: float
    stop_samples: float | None
    stop_seconds: float | None
    censored: bool
    method: str
    by_stop: bool = False


def estimate(
    run: RunLog | Sequence[Eval],
    target: float,
    *,
    family: Family | None = None,
    healing: float = 0.0,
) -> Crossing:
    """Estimate where ``run`` crosses ``target`` (eval loss, lower is better).

    With a ``family`` the run's offset from the family's curve is estimated by Huber's M-estimator over all evals up
    to the stop, and the shifted curve is crossed with the target. Without one a free robust line in loss over
    ln(samples) through the run's own last half takes its place. A run that reached the target and whose curve is in
    doubt counts by its raw stop less half an eval interval: one that leaves the family or the line at its end or falls
    more steeply, whose crossing would lie well after its stop, or that changed precision at ``healing`` samples.
    Takes anything (NaN, infinite, repeated, decreasing, thousands of evals, none) and never raises.
    """
    evals = evals_of(run)
    stop = first_reached(evals, target)
    usable = before_target(evals, target)
    step = eval_interval(usable.samples)
    if len(usable.samples) == 0 or (stop is not None and not usable_samples(stop.samples)):
        crossing = CrossingEstimate(math.inf, 0.0, math.inf, "no eval that can be used")
    elif stop is not None:
        fitted = None if healing > 0 else _of_reached(usable, target, stop.samples, family, step)
        crossing = fitted or _raw(stop.samples, step)
    else:
        crossing = _ahead(usable, before_target(second_phase(evals, healing), target), target, family, healing)
    return Crossing(
        samples=crossing.samples, low=min(crossing.low, crossing.samples), high=max(crossing.high, crossing.samples),
        stop_samples=None if stop is None else stop.samples,
        stop_seconds=None if stop is None else stop.seconds,
        censored=stop is None, method=crossing.method, by_stop=crossing.by_stop,
    )  # fmt: skip


class CrossingEstimate(NamedTuple):
    samples: float
    low: float
    high: float
    method: str
    by_stop: bool = False


def _of_reached(
    usable: Points, target: float, stop: float, family: Family | None, step: float
) -> CrossingEstimate | None:
    """The crossing of a run that reached the target, by its curve; None where the curve cannot be its own.

    Where it may not be, the raw stop with an interval that holds both: a lucky early stop looks the same.
    """
    own = None if family else free_family(usable)
    if (shape := family or own) is None:
        return None
    offset = fit_offset(usable, shape)
    crossing = _cross(usable, target, shape, offset, own=shape is own)
    if offset.leaves or crossing.samples > stop + LATEST_CROSSING * step:
        return None
    if offset.steeper:
        raw = _raw(stop, step)
        return raw._replace(low=min(raw.low, crossing.low), high=max(raw.high, crossing.high))
    return crossing if family or crossing.samples >= stop - 2 * step else None


def _ahead(usable: Points, second: Points, target: float, family: Family | None, healing: float) -> CrossingEstimate:
    """The forecast of the crossing of a run that has not reached the target."""
    if family is not None and not healing > 0:
        offset = fit_offset(usable, family)
        if offset.follows:
            return _cross(usable, target, family, offset)
    own = free_family(second)
    if own is not None:
        return _cross(second, target, own, fit_offset(second, own), own=True)
    return CrossingEstimate(math.inf, float(usable.samples[-1]), math.inf, "no falling curve to extend")


def _raw(stop: float, step: float) -> CrossingEstimate:
    middle = max(stop - step / 2, stop / 2)
    margin = math.hypot(step / 2, Z90 * SEED_CV * middle)
    return CrossingEstimate(
        middle, middle - margin, middle + margin, "raw stop less half an eval interval", by_stop=True
    )


def _cross(usable: Points, target: float, family: Family, offset: Offset, *, own: bool = False) -> CrossingEstimate:
    """The family's curve, shifted to the run, at the target.

    The interval adds the spread of seeds, the noise of the evals and, for a forecast, the drift of curves.
    """
    method = family.name if own else f"fixed shape, Huber offset ({family.name})"
    samples = family.samples_at(target - offset.value)
    ahead = max(0.0, math.log(samples / usable.samples[-1]))
    sd = math.sqrt(family.seed**2 + offset.sd**2 + (family.drift * ahead) ** 2)
    low = family.samples_at(target - offset.value + Z90 * sd)
    high = family.samples_at(target - offset.value - Z90 * sd)
    return CrossingEstimate(samples, low, high, method)
