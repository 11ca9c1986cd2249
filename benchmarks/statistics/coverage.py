"""How often the printed interval of what a sweep recommends holds the truth, over simulated sweeps.

Each sweep is searched by the product's own session and rule of repeats, over a surface drawn for it: a bowl of the
logarithm of time in two of four knobs, one category that costs a few percent, a start at random. Runs scatter about it
by a normal or a heavy-tailed (Student, 3 degrees of freedom) factor. The truth is the mean time of further runs.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import optuna

from lora_tune.config.study import Study, parse_study
from lora_tune.controller.last_run import LastRun
from lora_tune.search.recommendation import recommend
from lora_tune.search.session import Session
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict

TEXT = """
[workload]
kind = "command"
argv = ["bash", "train.sh"]
[site]
launcher = "local"
[space]
LR = { type = "float", low = 1e-5, high = 1e-2, log = true }
WARMUP = { type = "int", low = 0, high = 100 }
DECAY = { type = "float", low = 0.0, high = 0.1 }
OPTIMIZER = { type = "categorical", choices = ["adam", "lion"] }
[objective]
target = 0.5
"""
NOISES = tuple(float(v) for v in os.environ.get("COVERAGE_NOISES", "0.02,0.05,0.1,0.2").split(","))
HEAVY = (0.05, 0.10)
RUNS = 30
SWEEPS = int(os.environ.get("COVERAGE_SWEEPS", "500"))
"""Sweeps of each row; a row of 500 takes some minutes."""
FIRST_SEED = int(os.environ.get("COVERAGE_SEED", "0"))


@dataclass(frozen=True, slots=True)
class Row:
    """Of the sweeps of one noise: the share of 90% intervals that hold the truth, for what is recommended; bias of what
    is expected, as a share; half-width of the interval; regret of what is recommended and of the luckiest run."""

    inside: float
    below: float
    bias: float
    width: float
    regret: float
    luckiest: float
    repeats: float


def surface(rng: random.Random) -> Callable[[Mapping[str, Any]], float]:
    """ln(seconds) over the space, without the luck of seeds."""
    best, curvature = math.exp(rng.uniform(math.log(3e-5), math.log(3e-3))), rng.uniform(0.03, 0.12)
    warm, lion, slope = rng.uniform(0, 100), rng.uniform(-0.1, 0.1), rng.uniform(0, 0.15)

    def logarithm(tuned: Mapping[str, Any]) -> float:
        bowl = curvature * math.log(tuned["LR"] / best) ** 2
        return math.log(1000) + bowl + slope * abs(tuned["WARMUP"] - warm) / 100 + lion * (tuned["OPTIMIZER"] == "lion")

    return logarithm


def factor(rng: random.Random, noise: float, *, heavy: bool) -> float:
    """By how much one run is off, with mean 1 within a fraction of a percent."""
    if not heavy:
        return math.exp(rng.gauss(0, noise) - noise**2 / 2)
    student = rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.5, 2) / 3)
    return math.exp(max(-1.0, min(1.0, noise * student)))


def swept(study: Study, noise: float, seed: int, *, heavy: bool = False) -> tuple[StudyRecords, Callable[..., float]]:
    """A finished sweep, and the surface that it searched."""
    rng = random.Random(seed)
    truth = surface(rng)
    sweep = StudyRecords(name=study.name, digest="", study_toml="", began_at=0.0)
    session = Session(study.model_copy(update={"search": study.search.model_copy(update={"seed": seed})}))
    search = LastRun(session, lambda: study, lambda: sweep, lambda: 0.0)
    for _ in range(RUNS):
        asked = search.ask()
        assert not isinstance(asked, str), asked
        seconds = math.exp(truth(asked.tuned)) * factor(rng, noise, heavy=heavy)
        at = 1e9 + 2e3 * asked.number
        trial = Trial(
            number=asked.number, seed=asked.number, tuned=asked.tuned, why=asked.why,
            parameters=study.search_space.resolve(asked.tuned), state=TrialState.FINISHED, verdict=Verdict.REACHED,
            seconds=seconds, samples=100.0, metrics=TrialMetrics(objective=seconds), proposed_at=at,
            finished_at=at + 1e3,
        )  # fmt: skip
        sweep = StudyRecords(
            name=study.name, digest="", study_toml="", began_at=0.0, trials={**sweep.trials, trial.number: trial}
        )
        search.tell(trial)
    return sweep, truth


def row(noise: float, *, heavy: bool, sweeps: int = SWEEPS, sampler: str = "tpe") -> Row:
    """What many sweeps give at one noise."""
    study = parse_study(f'{TEXT}[budget]\ntrials = {RUNS}\n[search]\nsampler = "{sampler}"\n', Path("toy.toml"))
    inside, below, off, widths, regrets, lucky, repeats = 0, 0, [], [], [], [], 0
    for seed in range(FIRST_SEED, FIRST_SEED + sweeps):
        sweep, truth = swept(study, noise, seed, heavy=heavy)
        found = recommend(study, sweep)
        assert found is not None, "every run reached the target"
        times = {n: math.exp(truth(t.tuned)) for n, t in sweep.trials.items()}
        true, lowest = math.exp(truth(found.trial.tuned)), min(times.values())
        if heavy:  # the mean of a factor that is not of mean 1
            true *= MEAN_OF_HEAVY[noise]
        inside += found.low <= true <= found.high
        below += true > found.high
        off.append(found.objective / true - 1)
        widths.append((found.high - found.low) / (2 * found.objective))
        regrets.append(math.exp(truth(found.trial.tuned)) / lowest - 1)
        lucky.append(times[found.best_run.number] / lowest - 1)
        repeats += len(sweep.trials) - len({tuple(sorted(t.tuned.items())) for t in sweep.trials.values()})
    return Row(
        inside / sweeps, below / sweeps, sum(off) / sweeps, median(widths), sum(regrets) / sweeps,
        sum(lucky) / sweeps, repeats / sweeps,
    )  # fmt: skip


def _mean_of_heavy(noise: float) -> float:
    student = np.random.default_rng(0).standard_t(3, 1_000_000)
    return float(np.exp(np.clip(noise * student, -1, 1)).mean())


MEAN_OF_HEAVY = {noise: _mean_of_heavy(noise) for noise in HEAVY}


def main() -> None:
    """Print a row for each noise."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(f"{SWEEPS} sweeps of {RUNS} runs a row")
    print("| noise | 90% interval holds | truth above it | bias | half-width | regret | of the luckiest | repeats |")
    print("|---|---|---|---|---|---|---|---|")
    for noise, heavy in [*((n, False) for n in NOISES), *((n, True) for n in HEAVY)]:
        r = row(noise, heavy=heavy)
        name = f"{100 * noise:g}%{', heavy tails' if heavy else ''}"
        print(
            f"| {name} | {r.inside:.0%} | {r.below:.0%} | {100 * r.bias:+.1f}% | {100 * r.width:.1f}% | "
            f"{100 * r.regret:.1f}% | {100 * r.luckiest:.1f}% | {r.repeats:.1f} |",
            flush=True,
        )
