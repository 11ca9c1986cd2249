"""Where a run's eval curve crosses the target: the estimate, its interval, and the raw stop beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lora_tune.curves.family import Family, fit_offset
from lora_tune.curves.learn import SEED_CV, before_target, free_family
from lora_tune.curves.points import Points, eval_interval, evals_of, first_reached, usable_samples
from lora_tune.logs.mllog import Eval, RunLog

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
    run: RunLog | Sequence[Eval], target: float, *, family: Family | None = None, quantum: float | None = None
) -> Crossing:
    """Estimate where ``run`` crosses ``target`` (eval loss, lower is better).

    With a ``family`` the run's offset from the family's curve is estimated by Huber's M-estimator over all evals up
    to the stop, and the shifted curve is crossed with the target. Without one, or when the run does not follow it, a
    free robust line in loss over ln(samples) through the run's own last half takes its place, and where that does not
    fall either, the raw stop less half an eval interval. ``quantum``: samples between evals (default: as read).
    Takes anything (NaN, infinite, repeated, decreasing, thousands of evals, none) and never raises.
    """
    evals = evals_of(run)
    stop = first_reached(evals, target)
    usable = before_target(evals, target)
    samples, low, high, method = _locate(usable, target, stop, family, quantum)
    return Crossing(
        samples=samples, low=min(low, samples), high=max(high, samples),
        stop_samples=None if stop is None else stop.samples,
        stop_seconds=None if stop is None else stop.seconds,
        censored=stop is None, method=method,
    )  # fmt: skip


Found = tuple[float, float, float, str]


def _locate(usable: Points, target: float, stop: Eval | None, family: Family | None, quantum: float | None) -> Found:
    if len(usable.samples) == 0 or (stop is not None and not usable_samples(stop.samples)):
        return math.inf, 0.0, math.inf, "no eval that can be used"
    if family is not None:
        found = _cross(usable, target, family, f"fixed shape, Huber offset ({family.name})")
        if found is not None:
            return found
    own = free_family(usable)
    step = quantum if quantum is not None and quantum > 0 else eval_interval(usable.samples)
    if own is not None:
        found = _cross(usable, target, own, own.name)
        if found is not None and (stop is None or abs(found[0] - stop.samples) <= 2 * step):
            return found
    if stop is None:
        return math.inf, float(usable.samples[-1]), math.inf, "no falling curve to extend"
    middle = max(stop.samples - step / 2, stop.samples / 2)
    margin = math.hypot(step / 2, Z90 * SEED_CV * middle)
    return middle, middle - margin, middle + margin, "raw stop less half an eval interval"


def _cross(usable: Points, target: float, family: Family, method: str) -> Found | None:
    """The family's curve, shifted to the run, at the target; None when the run does not follow the family.

    The interval adds the spread of seeds, the noise of the evals and, for a forecast, the drift of curves.
    """
    offset = fit_offset(usable, family)
    if not offset.follows:
        return None
    samples = family.samples_at(target - offset.value)
    ahead = max(0.0, math.log(samples / usable.samples[-1]))
    sd = math.sqrt(family.seed**2 + offset.sd**2 + (family.drift * ahead) ** 2)
    low = family.samples_at(target - offset.value + Z90 * sd)
    high = family.samples_at(target - offset.value - Z90 * sd)
    return samples, low, high, method
