"""How soon samplers find the fastest layout: ``python -m benchmarks.fastest [SITES] [--nodes 1,2,4,8]``, 20 sites.

Throughput alone on a simulated 8x H100: 113 layouts of which some die of memory, a few by luck. Prints, after 5, 10,
20 and 40 trials, how far the fastest layout that lived is behind the fastest one that lives mostly (medians), and how
many trials died of memory, for this project's sampler of throughput studies, Optuna's TPE with constraints, and
random layouts without repetition. With several node counts every layout may run on each of them: twice the nodes are
1.6 to 2 times as fast, by site, and less the more a layout splits sequences and stages.
"""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Callable, Sequence
from datetime import date
from statistics import median
from typing import Any

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import TrialState

from benchmarks.laboratory.problems import h100_wide
from lora_tune.config.layout import parse_layout
from lora_tune.launchers.simulated.machine import Degrees
from lora_tune.search.throughput import ThroughputSampler

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


def on_nodes(layouts: CategoricalDistribution, nodes: Sequence[int]) -> CategoricalDistribution:
    """Every layout on every number of nodes; as they are where there is one."""
    if len(nodes) == 1:
        return layouts
    return CategoricalDistribution([f"{text} nodes{count}" for text in layouts.choices for count in nodes])


def scaling(layout: str, site: int) -> float:
    """Speed on a layout's nodes over that on one."""
    found = parse_layout(layout)
    if not found.nodes:
        return 1.0
    doubling = float(np.random.default_rng([site, 77]).uniform(1.75, 2.0))
    doubling -= 0.03 * np.log2(found.cp) + 0.02 * np.log2(found.pp)
    return float(doubling ** np.log2(found.nodes))


SAMPLERS: dict[str, Callable[[CategoricalDistribution, int], BaseSampler]] = {
    "grey_box": lambda layouts, seed: ThroughputSampler({"layout": layouts}, gpus=8, seed=seed),
    "TPE": lambda _, seed: TPESampler(seed=seed, multivariate=True, constant_liar=True),
    "random": lambda _, seed: InTurn(seed),
}


def sweep(name: str, site: int, nodes: Sequence[int]) -> tuple[list[float], list[int], list[float]]:
    """After each of ``AFTER`` trials: the share by which the fastest known layout is behind, deaths, and nodes used."""
    problem = h100_wide(site)
    one = problem.distributions["layout"]
    assert isinstance(one, CategoricalDistribution)
    layouts, machine = on_nodes(one, nodes), problem.surface.machine
    alone = {c: Degrees.of(problem.space.resolve({"LR": 1e-4, "MAX_STEPS": 500, "WARMUP_STEPS": 0, "layout": c}))
             for c in one.choices}  # fmt: skip
    known = {c: alone[re.sub(r" nodes\d+$", "", str(c))] for c in layouts.choices}

    def speed_of(choice: str) -> float:
        return float(machine.samples_per_second(known[choice]) * scaling(choice, site))

    best = max(speed_of(c) for c, d in known.items() if machine.oom_probability(d) < LIVES)
    study = optuna.create_study(direction="maximize", sampler=SAMPLERS[name](layouts, site))
    rng = np.random.default_rng(site)
    behind, deaths, used, fastest, died, taken = [], [], [], 0.0, 0, 0.0
    for number in range(max(AFTER)):
        trial = study.ask({"layout": layouts})
        degrees = known[trial.params["layout"]]
        taken += max(1, parse_layout(trial.params["layout"]).nodes)
        if rng.random() < machine.oom_probability(degrees) ** 2:  # a sweep tries such a trial once more
            died += 1
            trial.set_user_attr("verdict", "infeasible")
            trial.set_constraint("feasible", 1.0)
            study.tell(trial, state=TrialState.PRUNED)
        else:
            speed = speed_of(trial.params["layout"]) * float(np.exp(rng.normal(0, 0.0014)))
            trial.set_user_attr("samples_per_second", speed)
            study.tell(trial, speed)
            fastest = max(fastest, speed_of(trial.params["layout"]))
        if number + 1 in AFTER:
            behind.append(1 - fastest / best)
            deaths.append(died)
            used.append(taken)
    return behind, deaths, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sites", type=int, nargs="?", default=20)
    parser.add_argument("--nodes", default="1", help="node counts of a trial, separated by commas")
    options = parser.parse_args()
    nodes = [int(count) for count in options.nodes.split(",")]
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(f"{date.today()}, {platform.machine()}, {options.sites} sites; behind the fastest (deaths, nodes), medians")
    print(f"{'':10}" + "".join(f"{n:>13} trials" for n in AFTER))
    for name in SAMPLERS:
        found = [sweep(name, site, nodes) for site in range(options.sites)]
        cells = [f"{100 * median(b[i] for b, _, _ in found):.1f}% ({median(d[i] for _, d, _ in found):g}, "
                 f"{median(n[i] for _, _, n in found):g})" for i in range(len(AFTER))]  # fmt: skip
        print(f"{name:10}" + "".join(f"{c:>20}" for c in cells), flush=True)


if __name__ == "__main__":
    main()
