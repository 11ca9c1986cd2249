"""How soon samplers find the fastest layout: ``python -m benchmarks.fastest [SITES]``, default 20 simulated sites.

Throughput alone on a simulated 8x H100: 113 layouts of which some die of memory, a few by luck. Prints, after 5, 10,
20 and 40 trials, how far the fastest layout that lived is behind the fastest one that lives mostly (medians), and how
many trials died of memory, for this project's sampler of throughput studies, Optuna's TPE with constraints, and
random layouts without repetition.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from datetime import date
from statistics import median
from typing import Any

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import TrialState

from benchmarks.laboratory.problems import h100_wide
from lora_tune.search.throughput import ThroughputSampler
from lora_tune.simulation.machine import Degrees

AFTER = (5, 10, 20, 40)
LIVES = 0.1
"""A layout whose chance to die is below this counts among those that may be the fastest."""


class InTurn(optuna.samplers.RandomSampler):
    """Layouts in random order, each once."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._order = np.random.default_rng(seed)

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        had = {t.params[param_name] for t in study.get_trials(deepcopy=False) if param_name in t.params}
        left = [c for c in param_distribution.choices if c not in had]
        return left[int(self._order.integers(len(left)))]


SAMPLERS: dict[str, Callable[[CategoricalDistribution, int], BaseSampler]] = {
    "grey_box": lambda layouts, seed: ThroughputSampler({"layout": layouts}, gpus=8, seed=seed),
    "TPE": lambda _, seed: TPESampler(seed=seed, multivariate=True, constant_liar=True),
    "random": lambda _, seed: InTurn(seed),
}


def sweep(name: str, site: int) -> tuple[list[float], list[int]]:
    """Shares by which the fastest known layout is behind, and deaths so far, after each of ``AFTER`` trials."""
    problem = h100_wide(site)
    layouts = problem.distributions["layout"]
    assert isinstance(layouts, CategoricalDistribution)
    machine = problem.surface.machine
    known = {c: Degrees.of(problem.space.resolve({"LR": 1e-4, "MAX_STEPS": 500, "WARMUP_STEPS": 0, "layout": c}))
             for c in layouts.choices}  # fmt: skip
    best = max(machine.samples_per_second(d) for d in known.values() if machine.oom_probability(d) < LIVES)
    study = optuna.create_study(direction="maximize", sampler=SAMPLERS[name](layouts, site))
    rng = np.random.default_rng(site)
    behind, deaths, fastest, died = [], [], 0.0, 0
    for number in range(max(AFTER)):
        trial = study.ask({"layout": layouts})
        degrees = known[trial.params["layout"]]
        if rng.random() < machine.oom_probability(degrees) ** 2:  # a sweep tries such a trial once more
            died += 1
            trial.set_user_attr("verdict", "infeasible")
            trial.set_constraint("feasible", 1.0)
            study.tell(trial, state=TrialState.PRUNED)
        else:
            speed = machine.samples_per_second(degrees) * float(np.exp(rng.normal(0, 0.0014)))
            trial.set_user_attr("samples_per_second", speed)
            study.tell(trial, speed)
            fastest = max(fastest, machine.samples_per_second(degrees))
        if number + 1 in AFTER:
            behind.append(1 - fastest / best)
            deaths.append(died)
    return behind, deaths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sites", type=int, nargs="?", default=20)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(f"{date.today()}, {platform.machine()}, {options.sites} sites; behind the fastest (deaths), medians")
    print(f"{'':10}" + "".join(f"{n:>8} trials" for n in AFTER))
    for name in SAMPLERS:
        found = [sweep(name, site) for site in range(options.sites)]
        cells = [f"{100 * median(b[i] for b, _ in found):7.1f}% ({median(d[i] for _, d in found):g})"
                 for i in range(len(AFTER))]  # fmt: skip
        print(f"{name:10}" + "".join(f"{c:>15}" for c in cells), flush=True)


if __name__ == "__main__":
    main()
