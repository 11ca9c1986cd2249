"""What the search believes before any run: of samples to the target, of speed, and of how smooth both are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from optuna.distributions import FloatDistribution

from lora_tune.search.grey_box.features import LONGEST_WARMUP, Coordinates
from lora_tune.search.grey_box.gaussian import Belief, Prior
from lora_tune.search.grey_box.unit_range import unit
from lora_tune.search.usual_names import RATE

OCTAVES = math.log(4)
"""The unit of learning rate, batch and schedule as the smooth residual sees them: two octaves."""
LOST = 0.35
"""Share of warm-up's samples by which runs cross later, give or take as much: in three tables of real trials 0.3 to
0.45 at every batch, warm-up and schedule (``python -m benchmarks.tables``)."""
MOST_LOST = 1.0
"""ln(samples) per unit of the warm-up feature that is believed at most, where schedules are far longer than runs."""

BEND, BEND_SD, SLOPE_SD = 0.08, 0.08, 0.15
"""ln(samples) that other numbers (weight decay, betas, rank, dropout) cost at half a range from the best one, with its
doubt, and the doubt of where that one is."""
SMOOTH = 0.35
"""How much of the smooth residual such a number takes part in: with six of them every new point would be unknown."""

LORA_RATE = 10.0
"""LoRA's best learning rate over that of full fine-tuning, nearly whatever the rank, adapters on all linear layers:
Schulman et al., LoRA Without Regret (thinkingmachines.ai/blog/lora, 2025)."""
RATE_SD = math.log(3)
"""Doubt of it: on short runs about 15 was seen there, and the rate of full fine-tuning is itself known roughly."""

_SPEED_BELIEF: Mapping[str, tuple[float, float]] = {
    "tp": (-0.12, 0.12), "cp": (-0.12, 0.12), "pp": (-0.08, 0.12), "mbs": (0.02, 0.05), "vp": (0.0, 0.05),
    "bubble": (-1.0, 0.3), "micro": (0.0, 0.1), "sp": (0.02, 0.05), "FP8": (0.15, 0.1), "TP_COMM_OVERLAP": (0.03, 0.05),
    "FP8_PARAMS": (0.0, 0.03), "FP8_ACT": (0.0, 0.03), "RECOMPUTE_GRANULARITY=full": (-0.2, 0.15),
    "nodes": (0.62, 0.15),
}  # fmt: skip
"""ln samples/s per feature, mean and sd: what splitting costs (public H100 figures: -0.18 a doubling of TP or CP).

Twice the nodes are believed to be 1.6 to 2.1 times as fast. Switches are at -1 and 1: FP8 at the 70B shape takes 0.7 of
the time of bf16 on four H200, recomputation costs up to a third of the time (the forward pass again), overlap gave 2
and 15% (sweeps/records).
"""
_EVAL_BELIEF: Mapping[str, tuple[float, float]] = {
    "tp": (0.3, 0.3), "cp": (0.4, 0.3), "pp": (0.6, 0.4), "mbs": (0.0, 0.1), "vp": (0.0, 0.1),
    "bubble": (0.0, 0.3), "micro": (0.0, 0.1), "sp": (0.0, 0.1),
}  # fmt: skip


def convergence_prior(coordinates: Coordinates, base_level: float) -> Prior:
    """Weak beliefs about ln(samples): a valley over the learning rate, more samples for larger batches and for warm-up,
    little else."""
    rate = coordinates.rate_feature
    width = coordinates.convergence_width
    mean, sd = np.zeros(1 + width), np.full(1 + width, 0.4)
    mean[0], sd[0] = base_level, 1.0
    mean[-1], sd[-1] = 0.5, 0.5  # per two doublings of the batch; public: 0.4
    if (warmup := coordinates.warmup_feature) is not None:
        per_unit = 0.5 * LONGEST_WARMUP * coordinates.reference_samples / math.exp(base_level)
        lost = min(MOST_LOST, LOST * per_unit)
        mean[0] += lost  # the feature is -1 without warm-up
        mean[1 + warmup], sd[1 + warmup] = lost, lost
    curve_mean, curve_sd = [], []
    if rate is not None:
        half = _half_range(coordinates)
        # Curvature 0.5 +- 0.2 per squared e-fold: samples double at 1.7 e-folds from the best rate.
        curve_mean, curve_sd = [0.25 * half**2], [0.1 * half**2]
        place, slope_sd = _best_rate(coordinates, half)
        mean[0] += curve_mean[0] * place**2
        mean[1 + rate], sd[1 + rate] = -2 * curve_mean[0] * place, slope_sd
    weights = np.ones(width)
    weights[-1] = 0.7
    if rate is not None:
        # Two octaves are the unit, as of batch and schedule: how smooth the valley is does not depend on how wide a
        # range is searched. In halves of a range of three decades the residual could not bend within a factor of eight.
        weights[rate] = _half_range(coordinates) / OCTAVES
    for column, centre in coordinates.other_features.items():
        # BEND (x - centre)^2, as a line and a square of x: what the user or the published results have is not bad.
        mean[0] += BEND * centre**2
        mean[1 + column], sd[1 + column] = -2 * BEND * centre, SLOPE_SD
        curve_mean.append(BEND)
        curve_sd.append(BEND_SD)
        weights[column] = SMOOTH
    return Prior(
        mean=np.r_[mean, curve_mean],
        sd=np.r_[sd, curve_sd],
        amplitude=0.15,
        length=0.6,
        shift=0.1,
        departure=0.06,
        weights=weights,
    )


def _best_rate(coordinates: Coordinates, half: float) -> tuple[float, float]:
    """Where the valley's lowest point is expected in the rate's range, from -1 to 1, and the doubt of its slope.

    half: of the range in e-folds. Where nothing is stated it may lie anywhere: half a range to either side of the
    middle within one sd.
    """
    anywhere, stated = max(0.3, 0.25 * half**2), coordinates.full_fine_tuning_lr
    for name, distribution in coordinates.distributions.items():
        if stated is not None and name.upper() in RATE and isinstance(distribution, FloatDistribution):
            expected = min(max(LORA_RATE * stated, distribution.low), distribution.high)
            return unit(distribution, expected), min(anywhere, 0.5 * half * RATE_SD)
    return 0.0, anywhere


def _half_range(coordinates: Coordinates) -> float:
    """Half of the learning rate's range in e-folds."""
    for name, distribution in coordinates.distributions.items():
        if name.upper() in RATE and isinstance(distribution, FloatDistribution) and distribution.low > 0:
            return max(0.05, 0.5 * math.log(distribution.high / distribution.low))
    return 1.0


def speed_prior(labels: Sequence[str], level: float) -> Prior:
    """Beliefs about ln(samples/s) over speed features of these labels; ``level``: of an average layout."""
    return _by_label(labels, _SPEED_BELIEF, level)


def eval_prior(labels: Sequence[str], level: float) -> Prior:
    """The same about ln(seconds per eval)."""
    return _by_label(labels, _EVAL_BELIEF, level)


def _by_label(labels: Sequence[str], beliefs: Mapping[str, tuple[float, float]], level: float) -> Prior:
    pairs = [beliefs.get(label, (0.0, 0.2)) for label in labels]
    return Prior(
        mean=np.array([level, *(m for m, _ in pairs)]), sd=np.array([1.5, *(s for _, s in pairs)]),
        amplitude=0.04, length=1.5, shift=0.03, departure=0.03, weights=np.ones(len(labels)),
    )  # fmt: skip


def scale_belief(start: Prior) -> Belief:
    """Log belief about fitted scales: lognormal around ``start``."""
    widths = {"amplitude": 0.7, "length": 0.5, "shift": 1.2, "departure": 0.8, "noise_scale": 0.25}

    def log_belief(prior: Prior) -> float:
        return -0.5 * sum((math.log(getattr(prior, n) / getattr(start, n)) / w) ** 2 for n, w in widths.items())

    return log_belief
