"""Families of eval curves: a fixed shape that all runs of one workload and batch size share, up to an offset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lora_tune.base.scatter import SEED_SD
from lora_tune.curves.phases import second_phase
from lora_tune.curves.points import Array, Points, eval_interval, evals_of, first_reached, points, usable_samples
from lora_tune.logs.run import Eval, RunLog

HUBER = 1.345
"""Tuning constant of Huber's psi in units of the noise sd: 95% efficient under normal noise (Huber 1981, p. 18)."""

SPIKE = 2.5
"""An eval more than this many noise sd above the fit is a spike and is left out; spikes only go up."""

FAR_BELOW = 4.0
"""Last evals more than this many noise sd below the fit mean that the curve left the family: of 1,298 good public runs
none stops that far below."""

STEEP = 3.0
"""Standard errors by which a run's slope must exceed its family's to count as steeper; 2% of good public runs do."""

TREND_CLIP = 6.0
"""Residuals are clipped at this many noise sd for the trend, so that a spike at either end does not make one."""

LARGEST_EXPONENT = 700.0
"""Beyond this exp() overflows a double; a forecast that far away means never (or at once)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The median curve of a workload: loss over ln(samples), piecewise linear and falling.

    log_samples, loss: knots; ``log_samples`` rises, ``loss`` falls. Two knots are a log-linear curve. The outer
        segments extend beyond the knots, but evals before the first knot are ignored if there are later ones.
    noise: at each knot, the sd of one eval about its own run's curve, in loss; constant beyond the knots.
    seed: sd of the offset between runs of one configuration, in loss.
    wander: sd of a run's future offset about the offset of its evals so far, beyond their noise, in loss.
    spread: sd of the offset between good runs of different configurations, in loss.
    drift: sd that a forecast gains per unit of ln(samples) beyond the last eval, in loss.
    name: source of the family, for sentences.
    huber_above: tuning constant of Huber's psi for evals above the fit; below ``HUBER`` if noise is skewed upwards.
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
        """Samples at which the median curve passes ``loss``; the inverse of :meth:`loss_at`."""
        falling = tuple(-v for v in self.loss)
        exponent = float(_line(np.array([-loss]), falling, self.log_samples)[0])
        return float(np.exp(np.clip(exponent, -LARGEST_EXPONENT, LARGEST_EXPONENT)))

    def valid(self, usable: Points) -> Points:
        """The evals from the first knot on; all of them if none is that late."""
        late = usable.samples >= 0.999 * np.exp(self.log_samples[0])
        return Points(usable.samples[late], usable.loss[late]) if late.any() else usable


class Offset(NamedTuple):
    """A run's distance from its family's curve: ``value`` and its sd from eval noise, both in loss.

    follows: False if the run's last two evals are far below the fitted curve: a curve that falls discontinuously (FP4
        with a healing step), to which the family does not apply.
    leaves: of at least three evals, the last one is that far below: a stop right after such a fall.
    steeper: the run's slope exceeds the family's by ``STEEP``, so its shape may differ.
    """

    value: float
    sd: float
    follows: bool
    leaves: bool
    steeper: bool


def fit_offset(usable: Points, family: Family) -> Offset:
    """Huber's M-estimate of a run's offset from ``family``, evals weighted by 1/noise^2, spikes left out.

    Iterative reweighting from the lower median, at most 12 rounds. ``usable`` holds at least one point.
    If more than a third are spikes, none is left out, because the family's noise does not fit the run.
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
    """t statistic of the least-squares slope over ``x`` of residuals in units of their noise."""
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


# Families without published curves: learned from a study's own runs, or from the tail of one run.


FEWEST_RUNS = 3
"""Fewest falling runs to learn a shape from."""

MOST_KNOTS = 12

LEAST_NOISE = 0.01
"""Lower bound of the eval noise, as a share of the curve's fall, for few smooth runs."""


def learn_family(runs: Sequence[RunLog | Sequence[Eval]], target: float) -> Family | None:
    """The shape of a study's own runs, from their evals up to the target; None for fewer than three falling runs.

    Runs are aligned by their offsets over their last halves under a common slope (median of per-run Theil-Sen slopes
    in loss over ln(samples)); the knots are medians of the aligned evals. Configurations and seeds are not
    distinguished, so ``seed`` and ``wander`` are the whole spread of the offsets: intervals err on the wide side.
    """
    curves = [before_target(evals_of(run), target) for run in runs]
    slopes = [theil_sen(pair_slopes(last_half(curve))) for curve in curves]
    falling = [(curve, slope) for curve, slope in zip(curves, slopes, strict=True) if slope < 0]
    if len(falling) < FEWEST_RUNS:
        return None
    slope = float(np.median([s for _, s in falling]))
    ends = [last_half(c) for c, _ in falling]
    middle = float(np.median([np.log(e.samples[-1]) for e in ends]))
    offsets = np.array([np.median(e.loss - slope * (np.log(e.samples) - middle)) for e in ends])
    centre = float(np.median(offsets))
    rest = [e.loss - slope * (np.log(e.samples) - middle) - o for e, o in zip(ends, offsets, strict=True)]
    readings = sum(map(len, rest))
    late = robust_sd(np.concatenate(rest)) * math.sqrt(readings / (readings - len(rest)))
    x = np.concatenate([np.log(c.samples) for c, _ in falling])
    y = np.concatenate([c.loss - (o - centre) for (c, _), o in zip(falling, offsets, strict=True)])
    knots, levels, noise = _knots(x, y, slope, late)
    spread = max(robust_sd(offsets), late / 2)
    return Family(
        log_samples=tuple(knots), loss=tuple(levels), noise=tuple(noise),
        seed=spread, wander=spread, spread=spread, drift=robust_sd(np.array([s for _, s in falling])),
        name=f"shape learned from {len(falling)} runs of this study",
    )  # fmt: skip


def free_family(usable: Points) -> Family | None:
    """The log-linear curve of one run's last half (at least five evals), as a family.

    Slope by Theil-Sen; its standard error is the drift. The spread of seeds is assumed to be ``SEED_SD``.
    None for fewer than three evals or a curve that does not fall.
    """
    tail = last_half(usable, fewest=5)
    slopes = pair_slopes(tail)
    slope = theil_sen(slopes)
    if not slope < -1e-12:
        return None
    at = float(tail.samples[-1])
    levels = tail.loss - slope * np.log(tail.samples / at)
    noise = max(robust_sd(levels), LEAST_NOISE * float(np.ptp(tail.loss)), 1e-9)
    seed = SEED_SD * abs(slope)
    return log_linear(
        float(np.median(levels)), slope, at, noise=noise, seed=seed, wander=seed, spread=seed,
        drift=robust_sd(slopes) / np.sqrt(len(tail.samples)), name=f"free fit to the last {len(tail.samples)} evals",
    )  # fmt: skip


def before_target(evals: Sequence[Eval], target: float) -> Points:
    """The usable evals up to and including the first that reached ``target``."""
    stop = first_reached(evals, target)
    usable = points(evals)
    if stop is None:
        return usable
    keep = usable.samples <= stop.samples
    return Points(usable.samples[keep], usable.loss[keep])


def last_half(usable: Points, fewest: int = 4) -> Points:
    """The later half of the evals, at least ``fewest`` of them."""
    start = max(0, min(len(usable.samples) - fewest, len(usable.samples) // 2))
    return Points(usable.samples[start:], usable.loss[start:])


def pair_slopes(curve: Points) -> Array:
    """Slopes in loss over ln(samples) of all pairs of the last 64 points; empty for fewer than three points."""
    x, y = np.log(curve.samples[-64:]), curve.loss[-64:]
    if len(x) < 3:
        return np.empty(0)
    first, second = np.triu_indices(len(x), k=1)
    run = x[second] - x[first]
    usable = run > 0
    return np.asarray((y[second] - y[first])[usable] / run[usable], dtype=np.float64)


def theil_sen(slopes: Array) -> float:
    """The median slope (Theil 1950, Sen 1968); 0 if there is none."""
    return float(np.median(slopes)) if len(slopes) else 0.0


def robust_sd(values: Array) -> float:
    """1.4826 times the median absolute deviation; the plain sd if that is 0; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    robust = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    return robust if robust > 0 else float(np.std(values))


def _knots(x: Array, y: Array, slope: float, late: float) -> tuple[list[float], list[float], list[float]]:
    """Medians of aligned evals in bins of ln(samples), made falling, and the noise in each bin.

    Bins are the eval schedule itself up to ``MOST_KNOTS`` points, else quantiles of it. One knot is added beyond the
    last along the common slope, so that extrapolation does not depend on two noisy medians. A bin's noise is at least
    ``late``, the noise of all late evals, because few readings give an unsteady sd.
    """
    places = np.unique(np.round(x, 3))
    if len(places) > MOST_KNOTS:
        places = np.unique(np.quantile(x, (np.arange(MOST_KNOTS) + 0.5) / MOST_KNOTS))
    member = np.abs(x[:, None] - places[None, :]).argmin(axis=1)
    bins = [y[member == i] - slope * (x[member == i] - place) for i, place in enumerate(places)]
    knots = np.array([place for place, b in zip(places, bins, strict=True) if len(b)])
    levels = np.array([np.median(b) for b in bins if len(b)])
    knots, levels = np.append(knots, knots[-1] + 1.0), np.append(levels, levels[-1] + slope)
    falling = np.minimum.accumulate(levels) + 1e-3 * slope * (knots - knots[0])
    floor = max(late, LEAST_NOISE * float(falling[0] - falling[-2]), 1e-9)
    noise = [max(robust_sd(b), floor) for b in bins if len(b)]
    return knots.tolist(), falling.tolist(), [*noise, noise[-1]]


# Where a run's eval curve crosses the target: the estimate, its interval, and the raw stop.


Z90 = 1.6448536269514722
"""Half-width of a central 90% interval in standard deviations."""

LATEST_CROSSING = 0.75
"""Latest plausible crossing, in eval intervals after the raw stop; exceeded by 0.4% of 1,298 good public runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Samples to target of a run's configuration, estimated from this run alone.

    samples: the estimate; infinite if the curve does not fall towards the target, or there is no eval yet.
    low, high: 90% interval for the configuration's mean (seed spread and eval noise of this run included).
    stop_samples, stop_seconds: the raw stop, i.e. the first eval at or under the target; None if not reached.
    censored: the target was not reached; ``samples`` is then a forecast.
    method: how the estimate was made, for reports.
    by_stop: no curve is trusted, and ``samples`` is the raw stop less half an eval interval.
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

    With a ``family`` the run's offset from the family's curve is Huber's M-estimate over all evals up to the stop, and
    the shifted curve is crossed with the target. Without one, a robust line in loss over ln(samples) is fitted to the
    run's last half. A run that reached the target counts by its raw stop less half an eval interval if its curve is
    doubtful: it leaves the family or the line at its end, falls more steeply, would cross well after its stop, or the
    run changed precision at ``healing`` samples.
    Accepts any evals (NaN, infinite, repeated, decreasing, thousands, none) and never raises.
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
    """The crossing of a run that reached the target, by its curve; None if the curve cannot be trusted.

    If that is uncertain, the raw stop with an interval that holds both, because a lucky early stop looks the same.
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
    margin = math.hypot(step / 2, Z90 * SEED_SD * middle)
    return CrossingEstimate(
        middle, middle - margin, middle + margin, "raw stop less half an eval interval", by_stop=True
    )


def _cross(usable: Points, target: float, family: Family, offset: Offset, *, own: bool = False) -> CrossingEstimate:
    """The crossing of the family's curve, shifted to the run, with the target.

    The interval includes the spread of seeds, the noise of the evals and, for a forecast, the drift of curves.
    """
    method = family.name if own else f"fixed shape, Huber offset ({family.name})"
    samples = family.samples_at(target - offset.value)
    ahead = max(0.0, math.log(samples / usable.samples[-1]))
    sd = math.sqrt(family.seed**2 + offset.sd**2 + (family.drift * ahead) ** 2)
    low = family.samples_at(target - offset.value + Z90 * sd)
    high = family.samples_at(target - offset.value - Z90 * sd)
    return CrossingEstimate(samples, low, high, method)
