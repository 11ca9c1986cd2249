"""How long one proposal takes: ``python -m benchmarks.ask``, one core, 100 to 10,000 trials of the H100 surface.

Prints the median seconds of ``ask`` for the default sampler, the grey box alone and, in the same run, Optuna's TPE:
processor seconds of the one core, which a busy machine hardly changes, and seconds on the clock. Also the longest of
the asks: the first reads all trials, and after a run that reached the target the grey box reads every curve again.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import platform
import time
from collections.abc import Mapping
from datetime import date
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from benchmarks.laboratory.problem import Problem
from benchmarks.laboratory.problems import h100_wide
from lora_tune.search.grey_box.from_today import FromTodaySampler
from lora_tune.search.grey_box.objective import Goal, closed_schedule, rcp_mean
from lora_tune.search.grey_box.sampler import GreyBoxSampler
from lora_tune.search.published import llama2_70b_lora

ASKS = 7


def history(count: int) -> list[FrozenTrial]:
    """``count`` finished trials of the surface at random points, as the driver records them."""
    problem = h100_wide(0)
    study = optuna.create_study(sampler=RandomSampler(seed=1))
    found = []
    for number in range(count):
        tuned = study.ask(problem.distributions).params
        if number % 2:
            tuned |= {"LR": float(np.random.default_rng(number).uniform(2e-4, 8e-4))}
        found.append(ended(problem, tuned, number))
    return found


def ended(problem: Problem, tuned: Mapping[str, Any], number: int) -> FrozenTrial:
    """A run of these values on the surface, as the driver records it."""
    outcome = problem.surface.outcome(problem.space.resolve(tuned), number)
    facts = {"verdict": "infeasible"} if outcome.end == "oom" else {
        "samples_per_second": outcome.samples_per_second, "seconds_per_eval": outcome.seconds_per_eval,
        "last_samples": outcome.evals[-1][0] if outcome.evals else 10.0, "init_seconds": outcome.init_seconds,
    }  # fmt: skip
    reached = outcome.end == "success"
    if reached:
        facts["stop_samples"] = outcome.evals[-1][0]
    return optuna.trial.create_trial(
        params=dict(tuned),
        distributions=problem.distributions,
        user_attrs=facts,
        state=TrialState.COMPLETE if reached else TrialState.PRUNED,
        value=outcome.end_seconds if reached else None,
        intermediate_values={} if outcome.end == "oom" else {int(s): x for s, x, _ in outcome.evals},
    )


def finish(study: optuna.Study, problem: Problem, trial: optuna.Trial) -> None:
    """Run what was proposed on the surface and tell the study how it ended."""
    run = ended(problem, trial.params, trial.number)
    for name, value in run.user_attrs.items():
        trial.set_user_attr(name, value)
    for samples, loss in run.intermediate_values.items():
        trial.report(loss, samples)
    study.tell(trial, run.value, state=run.state)


def grey_box(kind: type[GreyBoxSampler] = GreyBoxSampler) -> GreyBoxSampler:
    """The grey box as the laboratory's 8x H100 problem has it."""
    problem, goal = h100_wide(0), Goal(schedule=closed_schedule, reference_samples=rcp_mean)
    return kind(problem.distributions, goal=goal, gpus=8, prior=llama2_70b_lora(), probes=True, seed=1)


def default() -> GreyBoxSampler:
    """The default sampler of the same problem."""
    return grey_box(FromTodaySampler)


def seconds(sampler: BaseSampler, trials: list[FrozenTrial]) -> tuple[float, str]:
    """Median processor seconds of an ask after ``trials``, and in words; what is proposed ends before the next ask."""
    problem = h100_wide(0)
    study = optuna.create_study(sampler=sampler)
    study.add_trials(trials)
    taken = []
    for _ in range(ASKS):
        begin, cpu = time.perf_counter(), time.process_time()
        trial = study.ask(problem.distributions)
        taken.append((time.process_time() - cpu, time.perf_counter() - begin))
        finish(study, problem, trial)
    core, clock = np.median(taken, axis=0)
    return float(core), f"{core:.3f} s, at most {max(taken)[0]:.3f} s ({clock:.3f} s on the clock)"


def main() -> None:
    from lora_tune.mlperf.benchmark import LORA, find_benchmark

    find_benchmark(LORA).reference(8)  # MLPerf's checker and scipy.stats are imported once a process, not by an ask
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--sizes", nargs="+", type=int, default=[100, 200, 2000, 10_000], help="finished trials")
    sizes, load = arguments.parse_args().sizes, os.getloadavg()[0]
    print(f"{date.today()}, {platform.processor() or platform.machine()}, one core; load of the machine {load:.1f}")
    for count in sizes:
        trials = history(count)
        tpe = TPESampler(seed=1, constant_liar=True)
        (whole, said), (_, alone), (usual, theirs) = (seconds(s, trials) for s in (default(), grey_box(), tpe))
        print(f"{count} trials: default {said}, {whole / usual:.0f} times TPE; grey box {alone}, TPE {theirs}")


if __name__ == "__main__":
    main()
