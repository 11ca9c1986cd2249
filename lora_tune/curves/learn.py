"""Families without published curves: learned from a study's own runs, or from one run's own tail."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lora_tune.curves.family import Family, log_linear
from lora_tune.curves.points import Array, Points, evals_of, first_reached, points
from lora_tune.logs.run import Eval, RunLog

FEWEST_RUNS = 3
"""Falling runs before a shape is learned from them."""

MOST_KNOTS = 12

SEED_CV = 0.047
"""Relative sd of samples to target between seeds, where nothing better is known: that of the public GBS 8 runs."""

LEAST_NOISE = 0.01
"""Eval noise is taken as at least this share of the curve's fall, so that few smooth runs make no razor of it."""


def learn_family(runs: Sequence[RunLog | Sequence[Eval]], target: float) -> Family | None:
    """The shape that a study's own runs share, from their evals up to the target.

    Runs are aligned by their offsets over their last halves under a common slope (median of per-run Theil-Sen slopes
    in loss over ln(samples)); the knots are medians of the aligned evals. Between configurations and between seeds
    is not told apart, so ``seed`` and ``wander`` are the whole spread of the offsets: intervals err on the wide side.
    None while fewer than three runs show a falling curve.
    """
    curves = [before_target(evals_of(run), target) for run in runs]
    slopes = [theil_sen(np.log(c.samples), c.loss) if len(c.samples) >= 3 else 0.0 for c in map(last_half, curves)]
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
    """The log-linear curve of one run's own last half (at least five evals), as a family of its own.

    Slope by Theil-Sen; its standard error makes the drift. Seeds are taken to spread by ``SEED_CV``.
    None with fewer than three evals or a curve that does not fall.
    """
    tail = last_half(usable, fewest=5)
    slopes = pair_slopes(np.log(tail.samples), tail.loss) if len(tail.samples) >= 3 else np.empty(0)
    slope = float(np.median(slopes)) if len(slopes) else 0.0
    if not slope < -1e-12:
        return None
    at = float(tail.samples[-1])
    levels = tail.loss - slope * np.log(tail.samples / at)
    noise = max(robust_sd(levels), LEAST_NOISE * float(np.ptp(tail.loss)), 1e-9)
    seed = SEED_CV * abs(slope)
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


def robust_sd(values: Array) -> float:
    """1.4826 times the median absolute deviation; the plain sd when that is 0; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    robust = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    return robust if robust > 0 else float(np.std(values))


def _knots(x: Array, y: Array, slope: float, late: float) -> tuple[list[float], list[float], list[float]]:
    """Medians of aligned evals in bins of ln(samples), made falling, and the noise in each bin.

    Bins are the eval schedule itself while it has at most ``MOST_KNOTS`` points, quantiles of it otherwise. One knot
    is added beyond the last along the common slope, so that extrapolation does not hang on two noisy medians. A bin's
    robust sd counts where it is above ``late``, the noise of all late evals: few readings make it unsteady.
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
