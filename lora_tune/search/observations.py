"""Observations of trials, and estimates of ln(samples to the target) from them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lora_tune import curves as curve
from lora_tune.base.scatter import SEED_SD
from lora_tune.curves import Family
from lora_tune.logs.run import Eval

BLOWN_UP = 1.0
"""Least excess in ln(samples) of a diverged run over the best known one."""
NEAREST = 0.02
"""Least distance in ln(samples) of the crossing beyond the last eval of a run that missed the target."""
FARTHEST = 1.5
"""Distance in ln(samples) beyond the last eval from which a forecast counts only as a lower bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One trial. values: tuned values. open: still running. Unknown numbers are NaN.

    reached: samples at the stop. bound: samples without reaching the target. infeasible: out of memory, or refused.
    refused: the trial's program rejects its values.
    """

    number: int
    values: Mapping[str, Any]
    open: bool = False
    source: str = ""
    evals: tuple[Eval, ...] = ()
    reached: float = math.nan
    bound: float = math.nan
    samples_per_second: float = math.nan
    seconds_per_eval: float = math.nan
    node_hours: float = math.nan
    init_seconds: float = math.nan
    peak_gib: float = math.nan
    infeasible: bool = False
    refused: bool = False
    diverged: bool = False
    probe: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict)
    _read: dict[tuple[float, Family | None], Reading | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache of the last reading, since the sampler keeps the observations of finished trials and reads them
    repeatedly."""

    def reading(self, target: float, family: Family | None) -> Reading | None:
        """The reading of its curve with this family; None if there is none."""
        key = (target, family)
        if key not in self._read:
            self._read.clear()
            self._read[key] = _reading(self, target, family)
        return self._read[key]

    @property
    def ran(self) -> bool:
        """Whether it trained at all, i.e. fits into memory."""
        return math.isfinite(self.samples_per_second) or bool(self.evals) or math.isfinite(self.reached)


def first_number(facts: Mapping[str, Any], *names: str) -> float:
    """The first finite number among the facts of these names; NaN if there is none."""
    for name in names:
        value = facts.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return math.nan


@dataclass(frozen=True, slots=True)
class Reading:
    """Estimate of ln(samples to the target) from one trial; ``below``: only a lower bound (censored).

    sd: usual noise from seeds and evals. extended: additional sd from extrapolating the curve.
    """

    ln_samples: float
    sd: float
    below: bool = False
    extended: float = 0.0


def readings(
    observations: Sequence[Observation], target: float, totals: Sequence[float], families: Sequence[Family | None] = ()
) -> dict[int, Reading]:
    """One reading per trial with evidence on convergence, by position in ``observations``.

    Running trials count as lower bounds. Otherwise only the lucky ones, which end first, would be known.

    totals: samples after which each trial's training would have ended (infinite: unknown). families: published shape of
    each trial's curve, used until this study's own runs determine one.
    """
    curves = [o.evals for o in observations if math.isfinite(o.reached) and len(o.evals) >= 3]
    fitted = _fitted_family(tuple(curves[-60:]), target)
    by_run: dict[int, Reading] = {}
    for at, o in enumerate(observations):
        if o.probe or o.infeasible or o.diverged:
            continue
        if (
            reading := _progress_bound(o)
            if o.open
            else o.reading(target, fitted or (families[at] if families else None))
        ):
            by_run[at] = reading
    exact = [r.ln_samples for at, r in by_run.items() if not r.below and not observations[at].source]
    best = min(exact, default=None)
    arrived = [o for o in observations if math.isfinite(o.reached) and not o.source]
    times = [first_number(o.attributes, "stop_seconds") for o in arrived]
    fastest = min((t for t in times if t > 0), default=math.nan)
    for at, o in enumerate(observations):
        if o.open or o.probe or o.infeasible:
            continue
        # A stall test or divergence stopped it, so it would not have reached the target.
        if o.diverged or (str(o.attributes.get("verdict")) == "pruned" and (at not in by_run or by_run[at].below)):
            worst = math.log(totals[at] if math.isfinite(totals[at]) else max(o.bound, 1.0))
            worse = (best if best is not None else worst) + (BLOWN_UP if o.diverged else 0.1)
            by_run[at] = Reading(max(worst, worse), SEED_SD, below=True, extended=0.3 if o.diverged else 0.1)
        elif str(o.attributes.get("verdict")) == "capped" and (at not in by_run or by_run[at].below):
            # A cap stopped it, so it would not have reached the target in the time of the fastest run.
            within = _samples_within(o, fastest)
            if within > 0 and (at not in by_run or math.log(within) > by_run[at].ln_samples):
                by_run[at] = Reading(math.log(within), SEED_SD, below=True, extended=0.1)
    return by_run


@functools.lru_cache(maxsize=4)  # several models are fitted between two runs that reach the target
def _fitted_family(curves: tuple[tuple[Eval, ...], ...], target: float) -> Family | None:
    return curve.learn_family(curves, target)


def _progress_bound(o: Observation) -> Reading | None:
    """Lower bound from a running trial: its samples so far."""
    last_samples = max((e.samples for e in o.evals), default=0.0)
    if not last_samples > 0 or math.isfinite(o.reached):
        return None
    return Reading(math.log(last_samples) + NEAREST, SEED_SD, below=True)


def _samples_within(o: Observation, seconds: float) -> float:
    """Samples that the trial's layout trains in ``seconds``, including evals; 0 if unknown."""
    step = o.evals[1].samples - o.evals[0].samples if len(o.evals) > 1 else math.inf
    if not (o.samples_per_second > 0 and math.isfinite(seconds) and step > 0):
        return 0.0
    eval_seconds = o.seconds_per_eval if o.seconds_per_eval > 0 else 0.0
    return seconds / (1 / o.samples_per_second + eval_seconds / step)


def _reading(o: Observation, target: float, family: Family | None) -> Reading | None:
    usable = [e for e in o.evals if math.isfinite(e.loss)]
    if math.isfinite(o.reached):
        return _of_reached(o, target, family)
    last_samples = max([e.samples for e in usable], default=o.bound)
    if not last_samples > 0:
        return None
    if family is not None and usable:
        crossing = curve.estimate(o.evals, target, family=family)
        ahead = math.log(max(crossing.samples, 1.0) / last_samples)
        stalled = str(o.attributes.get("verdict")) == "pruned"
        if ahead < -2 * _curve_sd(family, len(usable), target) and not stalled:
            # It should long have crossed, so its curve has another shape and only the bound is known. (If the stall
            # test stopped it this near to the target, a bound would mean that it never crosses.)
            return Reading(math.log(last_samples) + NEAREST, SEED_SD, below=True)
        # A run that should have crossed by now is close to crossing: an estimate, not just a bound.
        ahead = max(ahead, NEAREST)
        if ahead < FARTHEST:
            sd = math.hypot(_curve_sd(family, len(usable), target), SEED_SD)
            return Reading(math.log(last_samples) + ahead, sd, extended=0.25 * ahead)
        return Reading(math.log(last_samples) + FARTHEST, SEED_SD, below=True, extended=0.3)
    ahead = max(_ahead(usable, target), NEAREST)
    if ahead < FARTHEST:
        return Reading(math.log(last_samples) + ahead, 2 * SEED_SD, extended=0.5 * ahead)
    return Reading(math.log(last_samples), SEED_SD, below=True)


def _ahead(evals: Sequence[Eval], target: float) -> float:
    """Distance in ln(samples) of the target beyond the last eval, by a line through the later half of the evals.

    For curves of unknown shape; infinite if they do not fall.
    """
    last = [e for e in evals if e.samples > 0][-max(2, len(evals) // 2) :]
    if len(last) < 2 or last[-1].samples <= last[0].samples:
        return math.inf
    slope, level = np.polyfit(np.log([e.samples for e in last]), [e.loss for e in last], 1)
    end = math.log(last[-1].samples)
    return float((target - level) / slope) - end if slope < 0 else math.inf


def _of_reached(o: Observation, target: float, family: Family | None) -> Reading:
    reading = _crossing(o, target, family)
    return replace(reading, extended=float(o.attributes.get("assumed_sd", 0.0)))


def _crossing(o: Observation, target: float, family: Family | None) -> Reading:
    known = o.attributes.get("crossing_samples")
    step = o.evals[1].samples - o.evals[0].samples if len(o.evals) > 1 else 0.0
    if len(o.evals) >= 2 and family is not None:
        samples = curve.estimate(o.evals, target, family=family).samples
        # The stop bounds the crossing: a fit far from it follows a spike or has the wrong shape.
        samples = min(max(samples, o.reached - 3 * step), o.reached + step)
        return Reading(math.log(samples), math.hypot(_curve_sd(family, len(o.evals), target), SEED_SD))
    if len(o.evals) >= 2:
        samples = curve.estimate(o.evals, target).samples
        return Reading(math.log(samples), math.hypot(0.4 * step / o.reached, SEED_SD))
    samples = float(known) if isinstance(known, int | float) and 0 < known < math.inf else o.reached
    return Reading(math.log(samples), math.hypot(0.05, SEED_SD) / math.sqrt(float(o.attributes.get("runs", 1))))


@functools.lru_cache(maxsize=256)  # few distinct arguments, thousands of runs
def _curve_sd(family: Family, evals: int, target: float) -> float:
    """Sd of ln(crossing) from the noise of single evals."""
    noise = float(family.noise_at(np.array([family.samples_at(target)]))[0]) / math.sqrt(evals)
    return min(0.5, math.log(family.samples_at(target - noise) / family.samples_at(target)))
