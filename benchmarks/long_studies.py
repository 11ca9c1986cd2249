"""What TPE loses by forgetting: ``python -m benchmarks.long_studies``, long studies with windows of several lengths.

Optuna's TPE looks at all trials of a study, ours beyond ``NEWEST`` finished ones at the good and the newest ones. Here
the same studies are run with each window: on the simulated 8 x H100 (noisy, most of the space fails; what counts is
the true score of the trial that looks best), on Hartmann's function of six floats, and on a valley over integers and
a category. Prints medians over seeds with their quartiles, and how many seeds ended lower than with all trials.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import datetime
import functools
import multiprocessing
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from benchmarks.laboratory.problems import h100_wide
from lora_tune.search import tpe

Values = dict[str, Any]
ALL = 10**9
OPEN = 4


class Surface:
    """The simulated cluster: a run's seconds where it reached the target; regret of the true score."""

    def __init__(self) -> None:
        self.problem = h100_wide(0)
        self.space = self.problem.distributions

    def tell(self, study: optuna.Study, trial: optuna.Trial) -> float | None:
        """Ends a trial; its value, where it has one."""
        outcome = self.problem.surface.outcome(self.problem.space.resolve(trial.params), trial.number)
        if outcome.end == "success":
            study.tell(trial, outcome.end_seconds)
            return float(outcome.end_seconds)
        if outcome.end == "oom":
            trial.set_constraint("feasible", 1.0)
        for samples, loss, _ in outcome.evals if outcome.end != "oom" else ():
            trial.report(loss, int(samples))
        study.tell(trial, state=TrialState.PRUNED)
        return None

    def excess(self, values: Values) -> float:
        return self.problem.regret(values)


class Function:
    """A function without noise, less its minimum."""

    def __init__(self, space: dict[str, BaseDistribution], of: Callable[[Values], float]) -> None:
        self.space, self.excess = space, of

    def tell(self, study: optuna.Study, trial: optuna.Trial) -> float:
        value = self.excess(trial.params)
        study.tell(trial, value)
        return value


_A = np.array(
    [[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14], [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14]]
)
_P = 1e-4 * np.array(
    [[1312, 1696, 5569, 124, 8283, 5886], [2329, 4135, 8307, 3736, 1004, 9991],
     [2348, 1451, 3522, 2883, 3047, 6650], [4047, 8828, 8732, 5743, 1091, 381]]
)  # fmt: skip


def hartmann(values: Values) -> float:
    """Hartmann's six-dimensional function (Dixon and Szegoe 1978) above its minimum of -3.32237."""
    x = np.array([values[f"x{i}"] for i in range(6)])
    return 3.32237 - float(np.array([1.0, 1.2, 3.0, 3.2]) @ np.exp(-(_A * (x - _P) ** 2).sum(axis=1)))


def valley(values: Values) -> float:
    """Rosenbrock's bent valley through two integers, a quadratic in a log rate, each of eight kinds with an offset."""
    x, y = values["steps"] / 500 - 2, values["warm"] / 50 - 1
    kind = int(values["kind"][1:])
    return (1 - x) ** 2 + 10 * (y - x * x) ** 2 + np.log10(values["rate"] / (3e-4 * (1 + kind))) ** 2 + 0.1 * kind


@functools.cache  # the surface's optimum takes seconds to find
def problem(name: str) -> Surface | Function:
    if name == "h100":
        return Surface()
    if name == "hartmann":
        return Function({f"x{i}": FloatDistribution(0, 1) for i in range(6)}, hartmann)
    space: dict[str, BaseDistribution] = {
        "steps": IntDistribution(0, 2500), "warm": IntDistribution(0, 200),
        "rate": FloatDistribution(1e-5, 1e-2, log=True), "kind": CategoricalDistribution([f"k{i}" for i in range(8)]),
    }  # fmt: skip
    return Function(space, valley)


def run(name: str, trials: int, job: tuple[int, int]) -> list[float]:
    """Excess of the trial that looks best after a third, two thirds and all trials; median of the last fifth's."""
    window, seed = job
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    tpe.NEWEST = window
    of = problem(name)
    sampler = tpe.WindowedTPESampler(seed=seed, n_startup_trials=10, multivariate=True, constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    asked: list[optuna.Trial] = []
    best: tuple[float, Values] = (np.inf, {})
    found = []
    for number in range(trials):
        asked.append(study.ask(of.space))
        if len(asked) >= OPEN:
            trial = asked.pop(0)
            value = of.tell(study, trial)
            if value is not None and value < best[0]:
                best = value, trial.params
        if number + 1 in (trials // 3, 2 * trials // 3, trials):
            found.append(of.excess(best[1]) if best[1] else np.inf)
    return [*found, float(np.median([of.excess(t.params) for t in study.get_trials(deepcopy=False)[-trials // 5 :]]))]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--problems", nargs="+", default=["h100", "hartmann", "valley"])
    arguments.add_argument("--windows", nargs="+", type=int, default=[tpe.NEWEST])
    arguments.add_argument("--trials", type=int, default=1500)
    arguments.add_argument("--seeds", type=int, default=24)
    arguments.add_argument("--processes", type=int, default=1)
    options = arguments.parse_args()
    thirds = ", ".join(str(options.trials * k // 3) for k in (1, 2, 3))
    print(f"{datetime.date.today()}, {platform.machine()}; {options.seeds} seeds, {options.trials} trials, {OPEN} open")
    print(f"excess of the trial that looks best after {thirds} trials; of the median proposal in the last fifth")
    windows = [ALL, *options.windows]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for name in options.problems:
            jobs = [(window, seed) for seed in range(options.seeds) for window in windows]
            work = functools.partial(run, name, options.trials)
            rows = np.array(pool.map(work, jobs, chunksize=1)).reshape(options.seeds, len(windows), 4)
            for k, window in enumerate(windows):
                low, middle, high = np.quantile(rows[:, k], (0.25, 0.5, 0.75), axis=0)
                cells = "   ".join(f"{b:.4f} ({a:.4f} to {c:.4f})" for a, b, c in zip(low, middle, high, strict=True))
                lower = int((rows[:, k, 2] < rows[:, 0, 2]).sum())
                higher = int((rows[:, k, 2] > rows[:, 0, 2]).sum())
                label = "all" if window == ALL else str(window)
                print(f"{name:9s} newest {label:>5s}: {cells}   lower {lower}, higher {higher}", flush=True)


if __name__ == "__main__":
    main()
