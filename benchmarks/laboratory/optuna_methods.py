"""Ours and Optuna's own samplers and pruners, through Optuna's public ask and tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from benchmarks.laboratory.arena import Ask, Result
from benchmarks.laboratory.problem import Problem
from lora_tune.curves import Timing

PENALTY_FACTOR = 2.0
"""A failed run's value, in trial time limits, for samplers that cannot use pruned trials."""


class OptunaMethod:
    """A sampler and a pruner; failures as in the product (PRUNED, a violated constraint for out of memory).

    penalised: tell failures as COMPLETE with a large value instead, for samplers that ignore pruned trials.
    """

    def __init__(
        self, problem: Problem, sampler: BaseSampler, pruner: BasePruner | None = None, *, penalised: bool = False
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._problem, self._penalised = problem, penalised
        self._study = optuna.create_study(sampler=sampler, pruner=pruner or NopPruner())

    def ask(self) -> Ask:
        trial = self._study.ask(self._problem.distributions)
        return Ask(trial, dict(trial.params))

    def report(self, trial: optuna.Trial, samples: float, loss: float, second: float, timing: Timing) -> bool:
        trial.report(loss, int(samples))
        return trial.should_prune()

    def tell(self, trial: optuna.Trial, result: Result) -> None:
        if math.isfinite(result.score):
            self._study.tell(trial, result.score)
        elif self._penalised:
            self._study.tell(trial, PENALTY_FACTOR * 60 * self._problem.trial_minutes)
        else:
            if result.verdict == "infeasible":
                trial.set_constraint("feasible", 1.0)
            self._study.tell(trial, state=TrialState.PRUNED)

    def recommend(self) -> Mapping[str, Any] | None:
        done = [t for t in self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)) if t.value is not None]
        return min(done, key=lambda t: float(t.value or math.inf)).params if done else None


def tpe(seed: int) -> BaseSampler:
    """Optuna's default; constant_liar as its documentation advises for parallel runs."""
    return TPESampler(seed=seed, constant_liar=True)


METHODS: dict[str, Callable[[Problem, int], OptunaMethod]] = {
    "tpe": lambda p, seed: OptunaMethod(p, tpe(seed)),
    "tpe+median": lambda p, seed: OptunaMethod(p, tpe(seed), MedianPruner()),
    "tpe+hyperband": lambda p, seed: OptunaMethod(
        p, tpe(seed), HyperbandPruner(min_resource=p.rungs[0], max_resource=p.rungs[1], reduction_factor=3)
    ),
    "tpe multivariate": lambda p, seed: OptunaMethod(p, TPESampler(seed=seed, multivariate=True, constant_liar=True)),
    "gp": lambda p, seed: OptunaMethod(p, GPSampler(seed=seed), penalised=True),
    "cmaes": lambda p, seed: OptunaMethod(p, CmaEsSampler(seed=seed), penalised=True),
    "random": lambda p, seed: OptunaMethod(p, RandomSampler(seed=seed)),
    "random+asha": lambda p, seed: OptunaMethod(
        p, RandomSampler(seed=seed), SuccessiveHalvingPruner(min_resource=p.rungs[0], reduction_factor=3)
    ),
}
"""Name -> a method for (problem, seed)."""
