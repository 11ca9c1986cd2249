"""Optuna's own samplers and pruners, through its public ask and tell, as somebody who knows their machine uses them.

Every method measures first what the user has before any search (``Problem.start``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from benchmarks.laboratory.arena import Ask, Result
from benchmarks.laboratory.problem import Problem
from lora_tune.curves import Timing

NARROW = 2.0
"""Factor around the start to which somebody who trusts it narrows each number's range."""


class OptunaMethod:
    """A sampler and a pruner; failures as in the product (PRUNED, a violated constraint for out of memory).

    penalised: tell failures as COMPLETE with the worst time so far, as users of samplers that ignore pruned trials do
    (the trial's time limit while there is none: a fixed large value would flatten everything else).
    distributions: the ranges to search instead of the problem's. start: measure the problem's start first.
    """

    def __init__(
        self, problem: Problem, sampler: BaseSampler, pruner: BasePruner | None = None, *, penalised: bool = False,
        distributions: Mapping[str, BaseDistribution] | None = None, start: bool = True,
    ) -> None:  # fmt: skip
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._problem, self._penalised = problem, penalised
        self._distributions = dict(distributions or problem.distributions)
        self._study = optuna.create_study(sampler=sampler, pruner=pruner or NopPruner())
        self._worst = -math.inf
        if start and problem.start is not None:
            self._study.enqueue_trial(dict(problem.start))

    def ask(self) -> Ask:
        trial = self._study.ask(self._distributions)
        return Ask(trial, dict(trial.params))

    def report(self, trial: optuna.Trial, samples: float, loss: float, second: float, timing: Timing) -> bool:
        trial.report(loss, int(samples))
        return trial.should_prune()

    def tell(self, trial: optuna.Trial, result: Result) -> None:
        if math.isfinite(result.score):
            self._worst = max(self._worst, result.score)
            self._study.tell(trial, result.score)
        elif self._penalised:
            limit = 60 * self._problem.trial_minutes
            self._study.tell(trial, self._worst if math.isfinite(self._worst) else limit)
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


def narrowed(problem: Problem) -> dict[str, BaseDistribution]:
    """The problem's ranges within a factor of ``NARROW`` around its start; categories stay."""
    start = problem.start
    if start is None:
        return problem.distributions
    return {name: _narrow(found, start[name]) for name, found in problem.distributions.items()}


def _narrow(found: BaseDistribution, value: Any) -> BaseDistribution:
    if isinstance(found, FloatDistribution):
        low, high = max(found.low, value / NARROW), min(found.high, value * NARROW)
        return FloatDistribution(low, high, log=found.log) if high > low else found
    if isinstance(found, IntDistribution):
        low, high = max(found.low, int(value / NARROW)), min(found.high, int(value * NARROW))
        return IntDistribution(low, high, log=found.log) if high > low else found
    return found


METHODS: dict[str, Callable[[Problem, int], OptunaMethod]] = {
    "tpe": lambda p, seed: OptunaMethod(p, tpe(seed)),
    "tpe+median": lambda p, seed: OptunaMethod(p, tpe(seed), MedianPruner()),
    "tpe+median, narrow": lambda p, seed: OptunaMethod(p, tpe(seed), MedianPruner(), distributions=narrowed(p)),
    "tpe+median, no start": lambda p, seed: OptunaMethod(p, tpe(seed), MedianPruner(), start=False),
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
