"""Simulated eval curves of bad runs, and of FP4 runs with a healing step, around the published GBS 8 curve.

f(s) is the median curve, T the target, f(c) = T at c = 2,980 samples; evals at 1,536 samples and every 384 after it,
up to the end of training at 8,192 (1,024 steps). Noise is drawn from standardised residuals of real evals, with a
spike of +0.01 to +0.06 in 1% of evals.

- too low LR: time runs slower, ``f(s / k)``, k log-uniform in 1.6 to 6;
- too high LR: the curve levels off above the target with twice the noise, ``max(f(s), T + d)``, d log-uniform in 0.002
  to 0.03;
- stalled: f up to a point uniform in 600 to 2,600 samples, flat from there;
- diverging: f up to a point uniform in 1,000 to 2,900, then ``+ a (exp((s - s0) / b) - 1)``, a 0.002 to 0.02,
  b 300 to 900 samples, and NaN above 10 or in a third of the runs from a random eval on;
- healing (not bad): 0.955 and a fall of 0.003 per eval until step 350 (2,800 samples), then to 0.924 within four evals,
  and on along f's slope.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.public_runs import TARGET
from lora_tune import curves
from lora_tune.logs.run import Eval
from lora_tune.mlperf import convergence

MAX_SAMPLES = 8192.0
SAMPLES = np.arange(1536.0, MAX_SAMPLES + 1, 384)
HEALING_SAMPLES = 350 * 8.0
Curve = Callable[[curves.Family, np.random.Generator], np.ndarray]


def too_low(family: curves.Family, rng: np.random.Generator) -> np.ndarray:
    return family.loss_at(SAMPLES / np.exp(rng.uniform(np.log(1.6), np.log(6))))


def too_high(family: curves.Family, rng: np.random.Generator) -> np.ndarray:
    floor = TARGET + np.exp(rng.uniform(np.log(0.002), np.log(0.03)))
    return np.maximum(family.loss_at(SAMPLES), floor) + rng.normal(0, 1, len(SAMPLES)) * family.noise_at(SAMPLES)


def stalled(family: curves.Family, rng: np.random.Generator) -> np.ndarray:
    return family.loss_at(np.minimum(SAMPLES, rng.uniform(600, 2600)))


def diverging(family: curves.Family, rng: np.random.Generator) -> np.ndarray:
    begin, size, pace = rng.uniform(1000, 2900), rng.uniform(0.002, 0.02), rng.uniform(300, 900)
    loss = family.loss_at(SAMPLES) + size * np.expm1(np.maximum(0, SAMPLES - begin) / pace)
    loss[loss > 10] = np.nan
    if rng.random() < 1 / 3:
        loss[begin + rng.uniform(0, 1500) < SAMPLES] = np.nan
    return loss


def healing(family: curves.Family, rng: np.random.Generator) -> np.ndarray:
    before = 0.955 + 0.003 * (HEALING_SAMPLES - SAMPLES) / 384
    end = HEALING_SAMPLES + 4 * 384.0
    fall = np.interp(SAMPLES, [HEALING_SAMPLES, end], [0.955, 0.9235])
    fall += family.loss_at(np.maximum(SAMPLES, end)) - family.loss_at(np.array([end]))
    return np.where(SAMPLES < HEALING_SAMPLES, before, fall) + rng.normal(0, 0.0003, len(SAMPLES))


BAD: dict[str, Curve] = {"LR too low": too_low, "LR too high": too_high, "stalled": stalled, "diverging": diverging}


def simulate(shape: Curve, noise: np.ndarray, count: int, seed: int) -> list[list[Eval]]:
    """``count`` runs of a shape, each up to the eval that reaches the target or to the end of training."""
    family = convergence.published(8).family
    rng = np.random.default_rng(seed)
    return [_run(shape(family, rng), family, noise, rng) for _ in range(count)]


def never_reach(runs: list[list[Eval]]) -> list[list[Eval]]:
    return [run for run in runs if not any(e.loss <= TARGET for e in run)]


def _run(shape: np.ndarray, family: curves.Family, noise: np.ndarray, rng: np.random.Generator) -> list[Eval]:
    loss = shape + rng.normal(0, family.seed) + rng.choice(noise, len(SAMPLES)) * family.noise_at(SAMPLES)
    loss = loss + np.where(rng.random(len(SAMPLES)) < 0.01, rng.uniform(0.01, 0.06, len(SAMPLES)), 0)
    evals = [Eval(float(s), float(v), float(s) / 2) for s, v in zip(SAMPLES, loss, strict=True)]
    last = next((i for i, e in enumerate(evals) if e.loss <= TARGET), len(evals) - 1)
    return evals[: last + 1]
