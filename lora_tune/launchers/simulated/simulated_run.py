"""A surface made of a machine and a convergence model: one simulated MLPerf LoRA run, as values or as MLLOG text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lora_tune.launchers.simulated import convergence
from lora_tune.launchers.simulated.convergence import AVERAGE, TARGET, Array, Recipe, SiteEffect
from lora_tune.launchers.simulated.machine import Degrees, Machine
from lora_tune.launchers.simulated.run_log import RunOutcome, UndisturbedRun, draw, log_lines, timed
from lora_tune.mlperf.registry import LORA, find_benchmark

Score = Literal["time_to_target", "mlperf_score"]
DRAWS = 512
"""Simulated runs behind an expected score."""


def rcp_samples(gbs: int) -> float:
    """Mean samples of the reference convergence point at ``gbs``; 0 where there is none."""
    point = find_benchmark(LORA).reference(gbs)
    return point.mean if point else 0.0


def eval_samples(parameters: Mapping[str, object], gbs: int, total: int) -> Array:
    """Samples at which a run evaluates: the closed division's schedule unless VAL_CHECK_INTERVAL, SKIP_EVALS differ."""
    rule = find_benchmark(LORA).eval_schedule(gbs)
    assert rule is not None, "llama2_70b_lora has an eval grid"
    every = math.ceil(int(str(parameters.get("VAL_CHECK_INTERVAL") or rule.interval_samples)) / gbs) * gbs
    skip = parameters.get("SKIP_EVALS")
    skipped = round(rule.first_samples / rule.interval_samples) - 1 if skip in (None, "") else int(str(skip))
    return np.arange(every * (skipped + 1), total + 1, every, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A surface: call it with parameters and a seed for the log; ``expected_score`` is its truth.

    Parameters read: LR, MAX_STEPS, WARMUP_STEPS, TP, PP, CP, MINIBS, MBS; VAL_CHECK_INTERVAL and SKIP_EVALS if present.
    score: what ``expected_score`` means, in seconds. site: this site's convergence.
    """

    machine: Machine
    score: Score = "mlperf_score"
    site: SiteEffect = AVERAGE

    def __call__(self, parameters: Mapping[str, object], seed: int) -> Iterator[tuple[float, str]]:
        """The job's log: (virtual seconds since its start, line)."""
        recipe = self.recipe(parameters)
        header = {
            "submission_benchmark": "llama2_70b_lora",
            "seed": seed,
            "global_batch_size": recipe.gbs,
            "opt_base_learning_rate": recipe.learning_rate,
            "opt_learning_rate_training_steps": recipe.steps,
            "opt_learning_rate_warmup_factor": recipe.warmup_steps / recipe.steps,
            "gradient_accumulation_steps": Degrees.of(parameters).minibs,
        }
        return log_lines(self.outcome(parameters, seed), header)

    def variant(self, number: int) -> SimulatedRun:
        """Another site of the same kind; 0 is the public average itself.

        The level varies (sd 2.8%) as it does between public submissions; that the best learning rate moves (sd 15% in
        ln) is assumption. For the machine see ``Machine.elsewhere``.
        """
        if number == 0:
            return self
        rng = np.random.default_rng([number, 20])
        level, rate, gbs, steps, speed, evals, memory, init = rng.normal(size=8)
        return replace(
            self,
            site=SiteEffect(level=0.028 * level, learning_rate=0.15 * rate, gbs=0.023 * gbs, steps=0.02 * steps),
            machine=self.machine.elsewhere(number, speed, evals, memory, init),
        )

    def recipe(self, parameters: Mapping[str, object]) -> Recipe:
        """What of ``parameters`` decides convergence."""
        return Recipe(
            learning_rate=float(str(parameters["LR"])),
            gbs=self.machine.gbs(Degrees.of(parameters)),
            steps=int(str(parameters["MAX_STEPS"])),
            warmup_steps=float(str(parameters.get("WARMUP_STEPS") or 0)),
        )

    def outcome(self, parameters: Mapping[str, object], seed: int) -> RunOutcome:
        """One run, with this seed's luck."""
        rng = np.random.default_rng([seed, 7])
        layout, recipe = Degrees.of(parameters), self.recipe(parameters)
        luck = draw(self.machine, layout, rng)
        diverges = rng.random() < convergence.divergence_probability(recipe, self.site)
        blow_up = rng.uniform(0.02, 0.3) * recipe.total_samples if diverges else math.inf
        at = eval_samples(parameters, recipe.gbs, recipe.total_samples)
        crossing = math.exp(convergence.ln_samples(recipe, self.site))
        course = UndisturbedRun(
            samples=at,
            losses=convergence.noisy_losses(convergence.median_losses(at, crossing, recipe.gbs), rng, 1)[0],
            total=recipe.total_samples,
            step=recipe.gbs,
            blow_up=blow_up,
            target=TARGET,
        )
        return timed(course, luck, self.machine.cold_seconds(), rng)

    def expected_score(self, parameters: Mapping[str, object], draws: int = DRAWS) -> float:
        """The truth: seconds until a run succeeds when failed ones are run again, means over ``draws`` seeds.

        With ``mlperf_score`` the mean is multiplied by max(1, RCP mean / mean samples). Infinite when nearly every
        run fails. The same parameters always give the same number.
        """
        layout, recipe = Degrees.of(parameters), self.recipe(parameters)
        at = eval_samples(parameters, recipe.gbs, recipe.total_samples)
        if not len(at):
            return math.inf
        crossing = math.exp(convergence.ln_samples(recipe, self.site))
        losses = convergence.expected_losses(convergence.median_losses(at, crossing, recipe.gbs), draws)
        reached = losses <= TARGET
        finishes = reached.any(axis=1)
        lives = 1 - self.machine.oom_probability(layout)
        tame = 1 - convergence.divergence_probability(recipe, self.site)
        chance = float(finishes.mean()) * lives * tame
        if chance < 1e-3:
            return math.inf
        first = reached[finishes].argmax(axis=1)
        speed, eval_seconds = self.machine.samples_per_second(layout), self.machine.seconds_per_eval(layout)
        samples = float(at[first].mean())
        seconds = self.machine.cold_seconds() + float((at[first] / speed + eval_seconds * (first + 1)).mean())
        # A death of memory costs a quarter of a run (half of them come at once), the other failures a whole one.
        whole = recipe.total_samples / speed + eval_seconds * len(at)
        expected = (
            seconds + ((1 - lives) * 0.25 * seconds + lives * (1 - float(finishes.mean()) * tame) * whole) / chance
        )
        if self.score == "mlperf_score":
            expected *= max(1.0, rcp_samples(recipe.gbs) / samples)
        return expected
