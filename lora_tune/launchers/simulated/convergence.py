"""How many samples a LoRA run of Llama-2-70B needs, and the eval losses on the way: data, then assumption.

Data (``figures.json``, 102 public submissions and 850 runs): ln(mean samples) by GBS, LR and steps within LR 3.5e-4
to 6e-4, GBS 8 to 128 and 600 to 2,048 steps; the slope of the median loss curve; the scatter of single evals.

Assumption, everywhere else; nothing public says it:
- learning rate: below and above the published range ln(samples) bends upwards quadratically, and never falls faster
  than in proportion to 1/LR; far above it runs diverge, with a probability that warm-up lowers;
- schedule: a cosine that ends before 1.5 times the samples needed trains too short to make use of its tail;
- warm-up: half of its samples are lost, and the bend at high rates softens by up to a third;
- the curve above its published part (before half of the samples needed) decays exponentially from the untuned model.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

FIGURES = json.loads((Path(__file__).parent / "figures.json").read_text(encoding="utf-8"))
_CONVERGENCE = FIGURES["convergence"]
_NOISE = FIGURES["noise"]
TARGET = 0.925
UNTUNED_LOSS = 1.32
"""Eval loss before training (assumption; the first public evals come after half of the run)."""

BEND_BELOW, BEND_ABOVE = 0.75, 1.0
"""Curvature of ln(samples) in ln(LR) outside the published rates (assumption)."""
SHORTEST_SCHEDULE = 1.5
"""Schedule length over samples needed below which a cosine is too short (assumption; data reach down to 1.55)."""
DIVERGES_AT = 2.2e-3
"""Learning rate at which half of the runs diverge at GBS 8 without warm-up (assumption)."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What decides convergence: peak learning rate, global batch size, cosine steps, warm-up steps."""

    learning_rate: float
    gbs: int
    steps: int
    warmup_steps: float = 0.0

    @property
    def total_samples(self) -> int:
        """Samples of the whole schedule."""
        return self.steps * self.gbs


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteEffect:
    """How one site departs from the average of the public submissions, in the regression's own terms.

    level, gbs, steps: added to the constant and to the coefficients of g and ln(steps/1024).
    learning_rate: shift of ln(LR) at which everything happens.
    """

    level: float = 0.0
    gbs: float = 0.0
    steps: float = 0.0
    learning_rate: float = 0.0


AVERAGE = SiteEffect()
"""The average of the public submissions."""


def ln_samples(recipe: Recipe, site: SiteEffect = AVERAGE) -> float:
    """ln of the samples after which the median curve crosses the target, were the schedule never to end."""
    b0, b_g, b_gg, b_l, b_lg, b_s = (float(b) for b in _CONVERGENCE["coefficients"])
    g = math.log(recipe.gbs / 8)
    low, high = (math.log(x / 4e-4) for x in _CONVERGENCE["learning_rate_range"])
    rate = math.log(recipe.learning_rate / 4e-4) - site.learning_rate
    slope = b_l + b_lg * g
    inside = min(max(rate, low), high)
    warm = min(recipe.warmup_steps / recipe.steps, 0.1) / 0.1
    y = b0 + site.level + (b_g + site.gbs) * g + b_gg * g * g + slope * inside
    if rate > high:
        y += slope * (rate - high) + 0.5 * BEND_ABOVE * (1 - warm / 3) * (rate - high) ** 2
    if rate < low:
        y += _bend(slope, low - rate)
    y += (b_s + site.steps) * math.log(recipe.steps / 1024)
    # The regression speaks of mean stops; the median curve crosses earlier, by the quantisation of the evals.
    y += math.log1p(-float(_NOISE["mean_stop_minus_median_crossing_samples"]) / math.exp(b0))
    needed = math.exp(y)
    if (short := math.log(SHORTEST_SCHEDULE * needed / recipe.total_samples)) > 0:
        y += short**2
    return y + math.log1p(0.5 * recipe.warmup_steps * recipe.gbs / needed)


def _bend(slope: float, distance: float) -> float:
    """Rise of ln(samples) at ``distance`` below the published rates: quadratic until its slope is 1, then linear."""
    knee = (1 + slope) / BEND_BELOW
    near = min(distance, knee)
    return -slope * near + 0.5 * BEND_BELOW * near**2 + max(0.0, distance - knee)


def divergence_probability(recipe: Recipe, site: SiteEffect = AVERAGE) -> float:
    """Chance that a run blows up (assumption, see the module's text)."""
    warm = min(recipe.warmup_steps / recipe.steps, 0.1) / 0.1
    middle = math.log(DIVERGES_AT) + site.learning_rate + 0.35 * math.log(recipe.gbs / 8) + 0.5 * warm
    return 1 / (1 + math.exp(min(60.0, (middle - math.log(recipe.learning_rate)) / 0.12)))


def slope(gbs: int) -> float:
    """Loss per ln(samples) of the median curve near the target: interpolated between the published batch sizes."""
    table = _NOISE["slope_by_gbs"]
    return float(np.interp(math.log(gbs), [math.log(int(k)) for k in table], list(table.values())))


KEPT_RUNS = 512
"""Seeds of a curve whose luck is kept: what more take is not worth its memory."""


def median_losses(samples: Array, crossing: float, gbs: int) -> Array:
    """The median eval loss at ``samples`` of a run whose curve crosses the target at ``crossing`` samples."""
    u = samples / crossing
    early = (UNTUNED_LOSS - TARGET - 0.1) * np.exp(-u / 0.06)
    return TARGET + slope(gbs) * np.log(np.maximum(u, 0.01)) + early


def noisy_losses(median: Array, rng: np.random.Generator, runs: int) -> Array:
    """``runs`` seeds of a median curve, shape (runs, evals): a shared offset, white noise and rare upward spikes."""
    offset, white, spike = _noise(rng, runs, len(median))
    return np.asarray(median + offset + white + spike)


def expected_losses(median: Array, runs: int) -> Array:
    """The same with the luck of which a surface's truth is made, which is no other for any other configuration."""
    noise = _kept_noise if runs <= KEPT_RUNS else _fixed_noise
    offset, white, spike = noise(runs, len(median))
    return np.asarray(median + offset + white + spike)


def _fixed_noise(runs: int, evals: int) -> tuple[Array, Array, Array]:
    return _noise(np.random.default_rng(11), runs, evals)


_kept_noise = lru_cache(maxsize=64)(_fixed_noise)


def _noise(rng: np.random.Generator, runs: int, evals: int) -> tuple[Array, Array, Array]:
    shape = (runs, evals)
    offset = rng.normal(0, _NOISE["run_offset_sd"], (runs, 1))
    white = rng.normal(0, _NOISE["eval_noise_sd"], shape)
    spike = (rng.random(shape) < _NOISE["spike_share"]) * rng.exponential(_NOISE["spike_median"] / math.log(2), shape)
    return offset, white, spike
