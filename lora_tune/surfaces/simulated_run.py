"""A surface made of a machine and a convergence model: one simulated MLPerf LoRA run, as values or as MLLOG text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from lora_tune.rules.division import skipped_evals
from lora_tune.rules.score import reference
from lora_tune.surfaces import convergence
from lora_tune.surfaces.convergence import AVERAGE, TARGET, Array, Recipe, Site
from lora_tune.surfaces.machine import Degrees, Machine

Score = Literal["time_to_target", "mlperf_score"]
EPOCH_MS = 1_700_000_000_000
"""Virtual second 0 in the logs, epoch milliseconds."""
DRAWS = 512
"""Simulated runs behind an expected score."""


def rcp_samples(gbs: int) -> float:
    """Mean samples of the reference convergence point at ``gbs``; 0 where there is none."""
    found = reference(gbs)
    return found.mean if found else 0.0


def eval_samples(parameters: Mapping[str, object], gbs: int, total: int) -> Array:
    """Samples at which a run evaluates: the closed division's schedule unless VAL_CHECK_INTERVAL, SKIP_EVALS differ."""
    every = math.ceil(int(str(parameters.get("VAL_CHECK_INTERVAL") or 384)) / gbs) * gbs
    skip = parameters.get("SKIP_EVALS")
    skipped = skipped_evals(gbs) if skip in (None, "") else int(str(skip))
    return np.arange(every * (skipped + 1), total + 1, every, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One simulated run. Seconds count from the start of the job; ``evals`` are (samples, loss, second) at eval end."""

    init_seconds: float
    samples_per_second: float
    block_seconds: tuple[float, ...]
    seconds_per_eval: float
    evals: tuple[tuple[float, float, float], ...]
    train: tuple[tuple[float, float, float], ...]
    end: Literal["success", "aborted", "oom"]
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A surface: call it with parameters and a seed for the log; ``expected_score`` is its truth.

    Parameters read: LR, MAX_STEPS, WARMUP_STEPS, TP, PP, CP, MINIBS, MBS; VAL_CHECK_INTERVAL and SKIP_EVALS if present.
    score: what ``expected_score`` means, in seconds. site: this site's convergence.
    """

    machine: Machine
    score: Score = "mlperf_score"
    site: Site = AVERAGE

    def __call__(self, parameters: Mapping[str, object], seed: int) -> Iterator[tuple[float, str]]:
        """The job's log: (virtual seconds since its start, line)."""
        return log_lines(self.outcome(parameters, seed), parameters, seed, self.recipe(parameters))

    def variant(self, number: int) -> SimulatedRun:
        """Another site of the same kind; 0 is the public average itself.

        Level (sd 2.8%), speed (4%) and eval speed (5%) vary as they do between public submissions; that the best
        learning rate moves (sd 15% in ln), memory differs by 1.5 GB and layouts have other kernels is assumption.
        """
        if number == 0:
            return self
        rng = np.random.default_rng([number, 20])
        level, rate, gbs, steps, speed, evals, memory, init = rng.normal(size=8)
        return replace(
            self,
            site=Site(level=0.028 * level, learning_rate=0.15 * rate, gbs=0.023 * gbs, steps=0.02 * steps),
            machine=replace(
                self.machine,
                speed=math.exp(0.04 * speed),
                eval_speed=math.exp(0.05 * evals),
                memory_offset_gb=1.5 * memory,
                quirks=number,
                init_median=self.machine.init_median * math.exp(0.3 * init),
            ),
        )

    def recipe(self, parameters: Mapping[str, object]) -> Recipe:
        """What of ``parameters`` decides convergence."""
        return Recipe(
            learning_rate=float(str(parameters["LR"])),
            gbs=self.machine.gbs(Degrees.of(parameters)),
            steps=int(str(parameters["MAX_STEPS"])),
            warmup_steps=float(str(parameters.get("WARMUP_STEPS") or 0)),
        )

    def outcome(self, parameters: Mapping[str, object], seed: int) -> Outcome:
        """One run, with this seed's luck."""
        rng = np.random.default_rng([seed, 7])
        layout, recipe = Degrees.of(parameters), self.recipe(parameters)
        spread = convergence.FIGURES["initialisation"]["sigma_ln"]
        init = self.machine.init_median * math.exp(rng.normal(0, 0.5 * spread))
        speed = self.machine.samples_per_second(layout) * math.exp(rng.normal(0, 0.0014))
        eval_seconds = self.machine.seconds_per_eval(layout) * math.exp(rng.normal(0, 0.005))
        out_of_memory = rng.random() < self.machine.oom_probability(layout)
        # Certain deaths come at once; of the lucky layouts' half, when a fragmented allocator meets its peak.
        at_once = rng.random() < max(0.5, self.machine.oom_probability(layout))
        lived = 0.0 if at_once else rng.random()
        diverges = rng.random() < convergence.divergence_probability(recipe, self.site)
        blow_up = rng.uniform(0.02, 0.3) * recipe.total_samples if diverges else math.inf
        at = eval_samples(parameters, recipe.gbs, recipe.total_samples)
        crossing = math.exp(convergence.ln_samples(recipe, self.site))
        losses = convergence.noisy_losses(convergence.median_losses(at, crossing, recipe.gbs), rng, 1)[0]
        losses = np.where(at > blow_up, math.nan, losses)
        reached = np.flatnonzero(losses <= TARGET)
        stop = at[reached[0]] if len(reached) else float(recipe.total_samples)
        if out_of_memory:
            stop = lived * stop
        at = at[at <= stop]
        pace = (init, speed, eval_seconds, self.machine.cold_seconds())
        return self._timed(recipe, at, losses, stop, pace, blow_up, out_of_memory, rng)

    @staticmethod
    def _timed(
        recipe: Recipe,
        at: Array,
        losses: Array,
        stop: float,
        pace: tuple[float, float, float, float],
        blow_up: float,
        out_of_memory: bool,
        rng: np.random.Generator,
    ) -> Outcome:
        init, speed, eval_seconds, cold = pace
        edges = np.concatenate([[0.0], at, [stop]]) if not len(at) or at[-1] < stop else np.concatenate([[0.0], at])
        blocks = np.diff(edges) / speed * np.exp(rng.normal(0, 0.001, len(edges) - 1))
        blocks[0] += cold
        ends = init + np.cumsum(blocks) + eval_seconds * np.arange(len(blocks))
        evals = tuple((float(s), float(x), float(t + eval_seconds)) for s, x, t in zip(at, losses, ends, strict=False))
        points = np.arange(10 * recipe.gbs, stop + 1, 10 * recipe.gbs)
        block = np.clip(np.searchsorted(edges, points, side="left") - 1, 0, len(blocks) - 1)
        begins = ends[block] - blocks[block]
        seconds = begins + blocks[block] * (points - edges[block]) / np.maximum(edges[block + 1] - edges[block], 1e-9)
        # The public train losses fall from 2.1 to 1.3 within 900 samples and then scatter by 0.05.
        values = 1.29 + 0.85 * np.exp(-points / 250) + rng.normal(0, 0.05, len(points))
        values = np.where(points > blow_up, math.nan, values)
        train = tuple(zip(points.tolist(), values.tolist(), seconds.tolist(), strict=True))
        success = bool(evals) and evals[-1][1] <= TARGET
        end: Literal["success", "aborted", "oom"] = "success" if success else "oom" if out_of_memory else "aborted"
        last = evals[-1][2] if evals and evals[-1][0] >= stop else float(ends[-1])
        return Outcome(
            init_seconds=init,
            samples_per_second=speed,
            block_seconds=tuple(blocks.tolist()),
            seconds_per_eval=eval_seconds,
            evals=evals,
            train=train,
            end=end,
            end_seconds=last + (20.0 if end == "oom" else 0.0),
        )

    def expected_score(self, parameters: Mapping[str, object]) -> float:
        """The truth: seconds until a run succeeds when failed ones are run again, means over many seeds.

        With ``mlperf_score`` the mean is multiplied by max(1, RCP mean / mean samples). Infinite when nearly every
        run fails. The same parameters always give the same number.
        """
        layout, recipe = Degrees.of(parameters), self.recipe(parameters)
        at = eval_samples(parameters, recipe.gbs, recipe.total_samples)
        if not len(at):
            return math.inf
        rng = np.random.default_rng(11)
        crossing = math.exp(convergence.ln_samples(recipe, self.site))
        losses = convergence.noisy_losses(convergence.median_losses(at, crossing, recipe.gbs), rng, DRAWS)
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


def log_lines(
    outcome: Outcome, parameters: Mapping[str, object], seed: int, recipe: Recipe
) -> Iterator[tuple[float, str]]:
    """The outcome as a job log in MLLOG form, in time order, with the second at which each line appears."""

    def line(
        second: float, key: str, value: object, kind: str = "POINT_IN_TIME", **metadata: object
    ) -> tuple[float, str]:
        event = {
            "namespace": "",
            "time_ms": EPOCH_MS + round(second * 1000),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {"file": "surface", "lineno": 0, **metadata},
        }
        return second, ":::MLLOG " + json.dumps(event)

    yield line(0.5, "init_start", None, "INTERVAL_START")
    header = {
        "submission_benchmark": "llama2_70b_lora",
        "seed": seed,
        "global_batch_size": recipe.gbs,
        "opt_base_learning_rate": recipe.learning_rate,
        "opt_learning_rate_training_steps": recipe.steps,
        "opt_learning_rate_warmup_factor": recipe.warmup_steps / recipe.steps,
        "gradient_accumulation_steps": int(str(parameters.get("MINIBS", 1))),
    }
    for key, value in header.items():
        yield line(0.5, key, value)
    start = outcome.init_seconds
    yield line(start, "init_stop", None, "INTERVAL_END")
    yield line(start, "run_start", None, "INTERVAL_START")
    yield from _blocks(outcome, line)
    if outcome.end == "oom":
        text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB."
        yield outcome.end_seconds, text
        return
    last = outcome.evals[-1][0] if outcome.evals else recipe.total_samples
    yield line(outcome.end_seconds, "run_stop", None, "INTERVAL_END", samples_count=last, status=outcome.end)


def _blocks(outcome: Outcome, line: Any) -> Iterator[tuple[float, str]]:
    """Training blocks with their losses, each followed by its eval."""
    waiting = list(outcome.train)
    begin, samples = outcome.init_seconds, 0.0
    for index, seconds in enumerate(outcome.block_seconds):
        end = begin + seconds
        yield line(begin, "block_start", None, "INTERVAL_START", samples_count=samples)
        while waiting and waiting[0][2] <= end + 1e-6:
            at, loss, second = waiting.pop(0)
            yield line(min(second, end), "train_loss", loss, samples_count=at)
        if index >= len(outcome.evals):
            return
        reached, loss, done = outcome.evals[index]
        yield line(end, "tracked_stats", {"throughput": (reached - samples) / seconds}, step=reached)
        yield line(end, "block_stop", None, "INTERVAL_END", samples_count=reached)
        yield line(end, "eval_start", None, "INTERVAL_START", samples_count=reached)
        yield line(done, "eval_accuracy", loss, samples_count=reached)
        yield line(done, "eval_stop", None, "INTERVAL_END", samples_count=reached)
        begin, samples = done, reached
