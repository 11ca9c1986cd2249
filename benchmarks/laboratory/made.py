"""Surfaces of a user's own script: any function from parameters to how fast a run is and how many samples it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lora_tune_simulation.simulated_run import Luck, RunOutcome, UndisturbedRun, timed

Array = npt.NDArray[np.float64]
DRAWS = 192
"""Simulated runs behind an expected score."""
SPEED_SD = 0.005
"""Relative noise of a run's throughput."""


def power(u: Array) -> Array:
    """Loss over the target of a curve that falls as a power of the samples; ``u``: samples over those needed."""
    return np.asarray(np.maximum(u, 1e-3) ** -0.4 - 1)


def exponential(u: Array) -> Array:
    """The same of a curve that falls exponentially."""
    return np.asarray(np.exp(2 * (1 - u)) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """What one configuration is.

    samples: to the target, median over seeds. samples_per_second, seconds_per_eval: its speed. total: samples at
    which training ends. seed_sd: spread of ln(samples) between seeds. diverges, dies: chances that the loss blows up
    and that memory runs out.
    """

    samples: float
    samples_per_second: float
    seconds_per_eval: float
    total: float
    seed_sd: float = 0.05
    diverges: float = 0.0
    dies: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MadeSurface:
    """A surface as the laboratory's problems need it, made of ``physics``: parameters -> :class:`Physics`.

    interval: samples between evals. shape: the curve over the target, 0 at 1. scale: loss per unit of the shape.
    eval_sd: noise of one eval, in units of the shape. target: the loss to reach.
    """

    physics: Callable[[Mapping[str, object]], Physics]
    interval: float
    shape: Callable[[Array], Array] = power
    scale: float = 0.3
    eval_sd: float = 0.01
    target: float = 1.0
    init_seconds: float = 20.0

    def outcome(self, parameters: Mapping[str, object], seed: int) -> RunOutcome:
        """One run, with this seed's luck."""
        rng = np.random.default_rng([seed, 13])
        p = self.physics(parameters)
        luck = Luck(
            init_seconds=self.init_seconds * math.exp(rng.normal(0, 0.1)),
            samples_per_second=p.samples_per_second * math.exp(rng.normal(0, SPEED_SD)),
            seconds_per_eval=p.seconds_per_eval,
            dies_after=0.0 if rng.random() < p.dies else None,
        )
        blows = rng.random() < p.diverges
        at = self.evals(parameters, p)
        course = UndisturbedRun(
            samples=at,
            losses=self._losses(p, at, rng, 1)[0],
            total=p.total,
            step=1,
            blow_up=float(rng.uniform(0.02, 0.3)) * p.total if blows else math.inf,
            target=self.target,
        )
        return timed(course, luck, 0.0, rng)

    def expected_score(self, parameters: Mapping[str, object]) -> float:
        """The truth: seconds until a run succeeds when failed ones are run again, means over ``DRAWS`` seeds."""
        p = self.physics(parameters)
        at = self.evals(parameters, p)
        if not len(at):
            return math.inf
        reached = self._losses(p, at, np.random.default_rng(17), DRAWS) <= self.target
        finishes = reached.any(axis=1)
        share, lives = float(finishes.mean()) * (1 - p.diverges), 1 - p.dies
        if share * lives < 1e-3:
            return math.inf
        first = reached[finishes].argmax(axis=1)
        seconds = float((at[first] / p.samples_per_second + p.seconds_per_eval * (first + 1)).mean())
        whole = p.total / p.samples_per_second + p.seconds_per_eval * len(at)
        return seconds + ((1 - lives) * 0.25 * seconds + lives * (1 - share) * whole) / (share * lives)

    def evals(self, parameters: Mapping[str, object], p: Physics) -> Array:
        """Samples at which a run evaluates."""
        return np.arange(self.interval, p.total + 1, self.interval, dtype=np.float64)

    def _losses(self, p: Physics, at: Array, rng: np.random.Generator, runs: int) -> Array:
        """Losses (runs, evals) of ``runs`` seeds."""
        needed = p.samples * np.exp(rng.normal(0, p.seed_sd, (runs, 1)))
        noise = rng.normal(0, self.eval_sd, (runs, len(at)))
        return np.asarray(self.target + self.scale * (self.shape(at / needed) + noise))
