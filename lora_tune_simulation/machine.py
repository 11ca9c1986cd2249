"""Speed and memory of a parallel layout on H100, H200 and GB200 systems: data, then assumptions.

Data (``figures.json``): samples/s per GPU and seconds per eval round by TP and CP, as log-linear regressions over the
public submissions. Layouts in the data: TP4, TP4 CP2 and TP4 PP2 on H100; TP1 CP2, TP2 and TP4 on H200; TP1 with CP 1,
2 and 8 on Blackwell.

Assumptions: the same cost per doubling for other degrees; PP costs 5% per doubling plus its bubble
(PP - 1) / microbatches; TP beyond 4 another 6%; MBS of 2 and more gains 1%; each layout deviates from the regression by
a fixed 2% (its own kernels).
Memory: 70 GB of FP8 weights over TP x PP, activations of 99 GB x MBS over TP x CP^0.8, plus 8 GB, fitted within 8 GB to
three B200 readings (168.8 GB at TP1 CP1, 134 at CP2, 82 at CP8); close to the limit out of memory is random.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

# Samples to target of a Llama-2-70B LoRA run, and its eval losses on the way: data, then assumptions.
#
# Data (``figures.json``, 102 public submissions and 850 runs): ln(mean samples) by GBS, LR and steps within LR 3.5e-4
# to 6e-4, GBS 8 to 128 and 600 to 2,048 steps; the slope of the median loss curve; the scatter of single evals.
#
# Assumptions elsewhere, without public data:
# - learning rate: below and above the published range ln(samples) bends upwards quadratically, and never falls faster
#   than in proportion to 1/LR; far above it runs diverge, with a probability that warm-up lowers;
# - schedule: a cosine shorter than 1.5 times the samples needed decays too early;
# - warm-up: half of its samples are lost, and the bend at high rates softens by up to a third;
# - the curve before its published part (before half of the samples needed) decays exponentially from the untuned model.

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
    """Settings that determine convergence: peak learning rate, global batch size, cosine steps, warm-up steps."""

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
    """Deviation of one site from the average of the public submissions, in terms of the regression.

    level, gbs, steps: added to the constant and to the coefficients of g and ln(steps/1024).
    learning_rate: shift of ln(LR).
    """

    level: float = 0.0
    gbs: float = 0.0
    steps: float = 0.0
    learning_rate: float = 0.0


AVERAGE = SiteEffect()
"""The average of the public submissions."""


def ln_samples(recipe: Recipe, site: SiteEffect = AVERAGE) -> float:
    """ln of the samples at which the median curve crosses the target, if the schedule never ended."""
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
    # The regression is of mean stops; the median curve crosses earlier, because runs stop only at evals.
    y += math.log1p(-float(_NOISE["mean_stop_minus_median_crossing_samples"]) / math.exp(b0))
    needed = math.exp(y)
    if (short := math.log(SHORTEST_SCHEDULE * needed / recipe.total_samples)) > 0:
        y += short**2
    return y + math.log1p(0.5 * recipe.warmup_steps * recipe.gbs / needed)


def _bend(slope: float, distance: float) -> float:
    """Rise of ln(samples) at ``distance`` below the published rates: quadratic until its slope is 1, then linear."""
    knee = (1 + slope) / BEND_BELOW
    closest = min(distance, knee)
    return -slope * closest + 0.5 * BEND_BELOW * closest**2 + max(0.0, distance - knee)


def divergence_probability(recipe: Recipe, site: SiteEffect = AVERAGE) -> float:
    """Probability that a run diverges (assumption, see the comment above)."""
    warm = min(recipe.warmup_steps / recipe.steps, 0.1) / 0.1
    middle = math.log(DIVERGES_AT) + site.learning_rate + 0.35 * math.log(recipe.gbs / 8) + 0.5 * warm
    return 1 / (1 + math.exp(min(60.0, (middle - math.log(recipe.learning_rate)) / 0.12)))


def slope(gbs: int) -> float:
    """Loss per ln(samples) of the median curve near the target: interpolated between the published batch sizes."""
    table = _NOISE["slope_by_gbs"]
    return float(np.interp(math.log(gbs), [math.log(int(k)) for k in table], list(table.values())))


CACHED_RUNS = 512
"""Most seeds whose noise is cached; more would take too much memory."""


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
    """As :func:`noisy_losses`, with the fixed noise of the ground truth, the same for every configuration."""
    noise = _kept_noise if runs <= CACHED_RUNS else _fixed_noise
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


EVAL_SEQUENCES = 173
"""Validation sequences of the GovReport split."""
MEMORY_SPREAD_GB = 1.2
"""Scale of the logistic probability of running out of memory (assumption)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """A layout from a trial's parameters."""

    tp: int
    pp: int
    cp: int
    minibs: int
    mbs: int = 1

    @classmethod
    def of(cls, parameters: Mapping[str, object]) -> Degrees:
        """From TP, PP, CP, MINIBS and MBS; 1 if absent."""
        return cls(**{k: int(str(parameters.get(k.upper(), 1))) for k in ("tp", "pp", "cp", "minibs", "mbs")})


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """GPUs of one kind and their speed.

    family, accelerator: select the regression. memory_gb: usable memory of one GPU. speed, eval_speed,
    memory_offset_gb: deviation of this site from the public average. quirks: seed of the layouts' own deviations.
    """

    family: str
    accelerator: str
    gpus: int
    nodes: int
    memory_gb: float
    speed: float = 1.0
    eval_speed: float = 1.0
    memory_offset_gb: float = 0.0
    quirks: int = 0
    init_median: float = field(default=FIGURES["initialisation"]["median_seconds"])

    def gbs(self, layout: Degrees) -> int:
        """Global batch size: MINIBS * DP."""
        return layout.minibs * self.gpus // (layout.tp * layout.pp * layout.cp)

    def samples_per_second(self, layout: Degrees) -> float:
        """Warm training throughput of the whole job."""
        fit: dict[str, float] = FIGURES[self.family]["ln_samples_per_second_per_gpu"]
        micro = max(1, layout.minibs // layout.mbs)
        ln = (
            fit[self.accelerator]
            + fit["log2_tp"] * math.log2(layout.tp)
            + fit["log2_cp"] * math.log2(layout.cp)
            + fit["log2_nodes"] * math.log2(self.nodes)
            - 0.05 * math.log2(layout.pp)
            - math.log1p((layout.pp - 1) / micro)
            - 0.06 * max(0.0, math.log2(layout.tp) - 2)
            + 0.01 * min(1.0, math.log2(layout.mbs))
            + 0.02 * self._quirk("train", layout)
        )
        return self.gpus * math.exp(ln) * self.speed

    def cold_seconds(self) -> float:
        """Extra time of the first block over a warm one, by nodes."""
        table = FIGURES[self.family]["cold_seconds_by_nodes"]
        return float(np.interp(self.nodes, [int(n) for n in table], list(table.values())))

    def seconds_per_eval(self, layout: Degrees) -> float:
        """One pass over the validation sequences, in rounds of one sequence per data-parallel rank."""
        fit: dict[str, float] = FIGURES[self.family]["ln_seconds_per_eval_round"]
        dp = self.gpus // (layout.tp * layout.pp * layout.cp)
        ln = (
            fit[self.accelerator]
            + fit["log2_tp"] * math.log2(layout.tp)
            + fit["log2_cp"] * math.log2(layout.cp)
            + fit["log2_nodes"] * math.log2(self.nodes)
            + 0.03 * self._quirk("eval", layout)
        )
        return math.ceil(EVAL_SEQUENCES / dp) * math.exp(ln) / self.eval_speed

    def memory(self, layout: Degrees) -> float:
        """Peak GB of one GPU."""
        weights = 70 / (layout.tp * layout.pp)
        activations = 99 * layout.mbs / (layout.tp * math.pow(layout.cp, 0.8))
        return weights + activations + 8 + self.memory_offset_gb

    def oom_probability(self, layout: Degrees) -> float:
        """Probability that a run runs out of memory."""
        over = (self.memory(layout) - self.memory_gb) / MEMORY_SPREAD_GB
        return 1 / (1 + math.exp(min(60.0, -over)))

    def elsewhere(self, number: int, speed: float, evals: float, memory: float, init: float) -> Machine:
        """This machine at site ``number``, from four standard normal draws.

        Speed (sd 4%) and eval speed (5%) vary as between public submissions; deviations of memory (1.5 GB), start-up
        (30%) and of the layouts' kernels are assumptions.
        """
        return replace(
            self,
            speed=self.speed * math.exp(0.04 * speed),
            eval_speed=self.eval_speed * math.exp(0.05 * evals),
            memory_offset_gb=1.5 * memory,
            quirks=number,
            init_median=self.init_median * math.exp(0.3 * init),
        )

    def _quirk(self, effect: str, layout: Degrees) -> float:
        # Kernels depend on the degrees, not on the number of micro-batches.
        key = f"{self.quirks} {effect} {layout.tp} {layout.pp} {layout.cp} {layout.mbs}"
        return float(np.random.default_rng(zlib.crc32(key.encode())).normal())
