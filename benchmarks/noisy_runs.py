"""``python -m benchmarks.noisy_runs``: the recommendation after random runs of a script with noisy seeds.

The runs are drawn at random without a search, so that only the judgement of their results matters.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from lora_tune.config.study import Study, parse_study
from lora_tune.search.recommendation import recommend
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict

STUDY = """
[workload]
kind = "command"
argv = ["bash", "train.sh"]
[site]
launcher = "local"
[space]
LR = { type = "float", low = 1e-5, high = 1e-2, log = true }
WARMUP = { type = "int", low = 0, high = 100 }
OPTIMIZER = { type = "categorical", choices = ["adam", "lion"] }
[objective]
target = 0.5
[budget]
trials = 60
"""
SITES = 20


@dataclass(frozen=True, slots=True)
class Lost:
    """Excess of the true time over that of the best configuration that ran, summed over sites."""

    believed: float
    luckiest: float


def truth(tuned: Mapping[str, Any]) -> float:
    """Seconds of a configuration without seed noise."""
    lion = 0.1 if tuned["OPTIMIZER"] == "lion" else 0.0
    return float(1000 * math.exp(0.08 * math.log(tuned["LR"] / 4e-4) ** 2 + lion + 0.001 * tuned["WARMUP"]))


def at_random(rng: random.Random) -> dict[str, Any]:
    """A random configuration of the space."""
    return {
        "LR": math.exp(rng.uniform(math.log(1e-5), math.log(1e-2))),
        "WARMUP": rng.randint(0, 100),
        "OPTIMIZER": rng.choice(["adam", "lion"]),
    }


def lost(sampler: str, noise: float, runs: int) -> Lost:
    """Loss of this sampler's recommendation after ``runs`` runs with ``noise``, an sd of ln(time)."""
    study = parse_study(f'{STUDY}[search]\nsampler = "{sampler}"\n', Path("toy.toml"))
    believed = luckiest = 0.0
    for site in range(SITES):
        rng = random.Random(site)
        points = [at_random(rng) for _ in range(runs)]
        trials = [_ended(study, n, p, truth(p) * math.exp(rng.gauss(0, noise))) for n, p in enumerate(points)]
        sweep = StudyRecords(name="toy", digest="", study_toml="", began_at=0.0, trials={t.number: t for t in trials})
        found, lowest = recommend(study, sweep), min(truth(p) for p in points)
        assert found is not None, "every run reached the target"
        believed += truth(found.trial.tuned) / lowest - 1
        luckiest += truth(found.best_run.tuned) / lowest - 1
    return Lost(believed, luckiest)


def _ended(study: Study, number: int, tuned: dict[str, Any], seconds: float) -> Trial:
    return Trial(
        number=number, seed=number, tuned=tuned, parameters=study.search_space.resolve(tuned),
        state=TrialState.FINISHED, verdict=Verdict.REACHED, seconds=seconds, samples=100.0,
        metrics=TrialMetrics(objective=seconds), proposed_at=1e9 + 2e3 * number, finished_at=1e9 + 2e3 * number + 1e3,
    )  # fmt: skip


@click.command()
@click.option("--noises", default="0.01,0.05,0.15,0.3", help="sd of ln(time) between seeds, separated by commas")
@click.option("--runs", default="12,60", help="runs of each site, separated by commas")
def main(noises: str, runs: str) -> None:
    """Print a row for each noise and number of runs."""
    click.echo("| noise | runs | results alone | luckiest run |\n|---|---|---|---|")
    for count in map(int, runs.split(",")):
        for noise in map(float, noises.split(",")):
            results = lost("tpe", noise, count)
            click.echo(f"| {100 * noise:g}% | {count} | {results.believed:.2f} | {results.luckiest:.2f} |")


if __name__ == "__main__":
    main()
