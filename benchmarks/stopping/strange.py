"""More curves that the rule was not built on: schedules, restarts, peaks, few evals, no numbers, mixed lengths.

Drawn, judged and printed as in ``unseen``.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.stopping.unseen import LENGTH, Maker, Run, fate, on_a_grid, run_of, show, smooth

LENGTHS, BATCHES = (2_000.0, 5_000.0, 10_000.0, 40_000.0), (8, 8, 8, 16, 64)


def main() -> None:
    """Print the kinds of curves below."""
    show(CURVES)


def cosine_cycles(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    """Two to five cosine cycles of the learning rate, each run as many as it draws."""
    cycle = (u * rng.integers(2, 6)) % 1
    return np.maximum((1 + 30 * u * pace) ** -0.6 + 0.075 * (1 + np.cos(np.pi * cycle)), stuck)


def warm_restarts(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    """The loss jumps by 0.8 at each restart and comes down again."""
    cycles = u * rng.integers(2, 6)
    return smooth(u, pace, stuck, rng) + 0.8 * np.exp(-15 * (cycles % 1)) * (cycles >= 1)


def decay_of_any_length(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    """Warm-up, stable, decay; the decay takes 5 to 50% of training."""
    decay = rng.uniform(0.05, 0.5)
    stable = 0.45 + 0.5 * np.exp(-12 * u * pace)
    return np.maximum(stable - 0.35 * np.clip((u - 1 + decay) / (0.8 * decay), 0, 1) * min(pace, 1.3), stuck)


def reward(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    """A reward turned round, with heavy noise that comes in waves."""
    gained = np.clip(1.1 * u * pace, 0, 0.95) - 0.4 * (stuck > 0)
    return 1 - gained + 0.15 * rng.standard_t(3, len(u)) + 0.15 * np.sin(40 * u + rng.uniform(0, 6))


def error_peak(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    """A squared error that peaks at about twenty times its beginning before the second descent."""
    height = np.exp(rng.normal(3, 1))
    return smooth(u, pace, stuck, rng) + height * np.exp(-(((u * pace - 0.3) / 0.08) ** 2))


def not_a_number(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    """One eval of each run is no number, or far beyond any."""
    loss = smooth(u, pace, stuck, rng)
    loss[int(rng.integers(len(u)))] = rng.choice([math.nan, math.inf, 1e30])
    return loss


def no_number_at_first(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    """Undefined for two to five evals, as long as warm-up lasts; bad runs, half of the time, to their end."""
    loss = smooth(u, pace, stuck, rng)
    loss[: len(u) if stuck and rng.random() < 0.5 else int(rng.integers(2, 6))] = rng.choice([math.nan, math.inf])
    return loss


def no_number_now_and_then(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    """A mean over the episodes that ended since the last eval, of which there are none in two of five."""
    return np.where(rng.random(len(u)) < 0.4, math.nan, smooth(u, pace, stuck, rng))


def from_a_million(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    """Begins at a million, as an untrained perplexity does."""
    return smooth(u, pace, stuck, rng) + 1e6 * np.exp(-60 * u * pace)


def peak_in_the_warm_up(u: np.ndarray, pace: float, stuck: float, rng: np.random.Generator) -> np.ndarray:
    """Half of the runs rise up to fortyfold at 8% of training."""
    height = rng.uniform(0, 40) * (rng.random() < 0.5)
    return smooth(u, pace, stuck, rng) + height * np.exp(-(((u - 0.08) / 0.03) ** 2))


def by_epochs(rng: np.random.Generator) -> Run:
    """Two to four evals in all."""
    count = int(rng.integers(2, 5))
    u = np.arange(1, count + 1) / count
    return run_of(u, 1.2 * smooth(u, *fate(rng), rng) + rng.normal(0, 0.02, count))


def one_eval(rng: np.random.Generator) -> Run:
    """One eval somewhere, and one at the end."""
    u = np.array([rng.choice([0.3, 0.5, 0.9]), 0.999])
    return run_of(u, 1.3 * smooth(u, *fate(rng), rng) + rng.normal(0, 0.02, 2))


def lengths_and_batches(rng: np.random.Generator) -> Run:
    """Schedules of four lengths and three batch sizes; longer ones and smaller batches fall further."""
    length, batch = float(rng.choice(LENGTHS)), int(rng.choice(BATCHES))
    pace, stuck = fate(rng)
    step = rng.uniform(0.01, 0.06)
    u = np.arange(step, 1.0, step)
    pace *= (length / LENGTH) ** 0.3 * (8 / batch) ** 0.2
    return run_of(u, smooth(u, pace, stuck, rng) + rng.normal(0, 0.01, len(u)), length, batch)


CURVES: dict[str, Maker] = {
    "cosine cycles": on_a_grid(cosine_cycles),
    "warm restarts": on_a_grid(warm_restarts),
    "decay of any length": on_a_grid(decay_of_any_length),
    "noisy reward in waves": on_a_grid(reward),
    "error peaks": on_a_grid(error_peak),
    "one eval no number": on_a_grid(not_a_number),
    "no number at first": on_a_grid(no_number_at_first),
    "no number now and then": on_a_grid(no_number_now_and_then),
    "from a million": on_a_grid(from_a_million),
    "peak in the warm-up": on_a_grid(peak_in_the_warm_up),
    "two to four evals": by_epochs,
    "one eval before the end": one_eval,
    "lengths and batches": lengths_and_batches,
}
