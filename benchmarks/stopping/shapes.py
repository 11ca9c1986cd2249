"""Ten synthetic shapes of curves, good and bad runs of each mixed as a search would find them.

u is the share of training. Each run draws a pace (log-normal, sd 0.2), a level and, with probability 0.4, a fault: too
slow, stuck above the target, or without the fall that the others have. Noise is normal; evals come every 1 to 6% of
training, the same in each run. Rising metrics are turned round.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.stopping.tables import Table, table
from lora_tune.curves.comparison import ComparedRun
from lora_tune.curves.points import Points

RUNS = 400
LENGTH = 10_000.0
Shape = Callable[[np.ndarray, float, float, np.random.Generator], np.ndarray]
"""Loss at shares u, for a pace and a stuck level (0: none); falls to about 0 from about 1, the target is 0.2."""


def power_law(u: np.ndarray, pace: float, stuck: float, _: np.random.Generator) -> np.ndarray:
    return np.maximum((1 + 30 * u * pace) ** -0.6, stuck)


def log_linear(u: np.ndarray, pace: float, stuck: float, _: np.random.Generator) -> np.ndarray:
    return np.maximum(0.2 - 0.25 * np.log(u * pace / 0.7), stuck)


def step_decay(u: np.ndarray, pace: float, stuck: float, _: np.random.Generator) -> np.ndarray:
    steps = 0.15 + 0.5 / (1 + 20 * u * pace) + 0.25 * (u < 0.5) + 0.2 * (u < 0.8)
    return np.maximum(steps + 0.1 * (1 - pace), stuck)


def warmup_stable_decay(u: np.ndarray, pace: float, stuck: float, _: np.random.Generator) -> np.ndarray:
    stable = 0.45 + 0.5 * np.exp(-12 * u * pace)
    return np.maximum(stable - 0.35 * np.clip((u - 0.8) / 0.15, 0, 1) * pace, stuck)


def double_descent(u: np.ndarray, pace: float, stuck: float, _: np.random.Generator) -> np.ndarray:
    first = np.exp(-15 * u * pace) + 0.4 * np.exp(-(((u * pace - 0.4) / 0.12) ** 2)) + 0.35 * np.exp(-3 * u * pace)
    return np.maximum(first, stuck)


def grokking(u: np.ndarray, pace: float, stuck: float, _: np.random.Generator) -> np.ndarray:
    rise = 1 + 1.5 * np.clip(u * 3, 0, 1)
    return np.maximum(rise / (1 + np.exp(40 * (u - 0.75 / pace))), stuck)


def sigmoid(u: np.ndarray, pace: float, stuck: float, _: np.random.Generator) -> np.ndarray:
    return np.maximum(1 / (1 + np.exp(14 * (u * pace - 0.5))), stuck)


def sawtooth(u: np.ndarray, pace: float, stuck: float, _: np.random.Generator) -> np.ndarray:
    return np.maximum((1 + 25 * u * pace) ** -0.65 + 0.06 * ((10 * u) % 1), stuck)


def noisy_reward(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    wander = np.cumsum(rng.normal(0, 0.02, len(u)))
    return np.maximum(1 - np.clip(1.1 * u * pace, 0, 0.9) + wander, stuck) + rng.normal(0, 0.08, len(u))


def spikes(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    jumps = np.where(rng.random(len(u)) < 0.05, rng.exponential(0.5, len(u)), 0)
    return power_law(u, pace, stuck, rng) + jumps


SHAPES: dict[str, Shape] = {
    "power law": power_law, "log-linear": log_linear, "step decay": step_decay, "WSD": warmup_stable_decay,
    "double descent": double_descent, "grokking": grokking, "sigmoid": sigmoid, "sawtooth": sawtooth,
    "noisy reward": noisy_reward, "spikes": spikes,
}  # fmt: skip
TARGET = 0.2


def all_shapes() -> list[Table]:
    """A table of each shape."""
    return [shape_table(name, seed, RUNS) for seed, name in enumerate(SHAPES)]


def shape_table(name: str, seed: int, runs: int) -> Table:
    """So many runs of one shape on one grid of evals."""
    return table(name, TARGET, _runs(SHAPES[name], seed, runs))


def _runs(shape: Shape, seed: int, count: int) -> list[ComparedRun]:
    rng = np.random.default_rng(seed)
    u = np.arange(1, 1 + round(1 / (interval := rng.uniform(0.01, 0.06)))) * interval
    u = u[u <= 1]
    return [_run(shape, u, rng) for _ in range(count)]


def _run(shape: Shape, u: np.ndarray, rng: np.random.Generator) -> ComparedRun:
    pace, stuck = float(np.exp(rng.normal(0.1, 0.2))), 0.0
    if rng.random() < 0.4:
        pace, stuck = (pace * rng.uniform(0.1, 0.6), 0.0) if rng.random() < 0.5 else (pace, rng.uniform(0.25, 0.6))
    loss = shape(u, pace, stuck, rng) + rng.normal(0, 0.01, len(u))
    return ComparedRun(curve=Points(u * LENGTH, loss), length=LENGTH)
