"""Search libraries other than Optuna, through their own public interfaces; installed with the ``lab`` extra.

Each is used as its documentation advises for an expensive, noisy objective that can fail: failures are told as the
worst time so far where a library knows no failed trials, schedulers compare losses at equal seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
import tempfile
import warnings
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from benchmarks.laboratory.arena import Ask, Result
from benchmarks.laboratory.problem import Problem
from lora_tune.curves import Timing
from lora_tune.search.grey_box.unit_range import from_unit

STARTS = 20
"""Space-filling trials first: by default Ax takes five, which all fail in the wide ranges."""


class _Best:
    """Remembers the lowest score told, which is what all these libraries recommend from noisy results."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._lowest: tuple[float, Mapping[str, Any] | None] = (math.inf, None)
        self._worst = -math.inf

    def recommend(self) -> Mapping[str, Any] | None:
        return self._lowest[1]

    def _note(self, tuned: Mapping[str, Any], result: Result) -> float:
        """The cost to tell the library."""
        if result.score < self._lowest[0]:
            self._lowest = (result.score, tuned)
        if math.isfinite(result.score):
            self._worst = max(self._worst, result.score)
            return result.score
        return self._worst if math.isfinite(self._worst) else 60 * self._problem.trial_minutes


class SyneTune(_Best):
    """A Syne Tune scheduler driven by its own callbacks. loss_based: it sees evals and may stop trials."""

    def __init__(self, problem: Problem, scheduler: Callable[[dict[str, Any]], Any], *, loss_based: bool) -> None:
        super().__init__(problem)
        logging.getLogger("syne_tune").setLevel(logging.ERROR)
        self._scheduler = scheduler({n: _syne_domain(d) for n, d in problem.distributions.items()})
        self._loss_based = loss_based
        self._numbers = itertools.count()
        self._last: dict[int, dict[str, float]] = {}

    def ask(self) -> Ask:
        from syne_tune.backend.trial_status import Trial

        suggestion = self._scheduler.suggest()
        trial = Trial(trial_id=next(self._numbers), config=suggestion.config, creation_time=datetime.now())
        self._scheduler.on_trial_add(trial)
        return Ask(trial, _typed(self._problem.distributions, suggestion.config))

    def report(self, trial: Any, _samples: float, loss: float, second: float, _timing: Timing) -> bool:
        if not self._loss_based or not math.isfinite(loss):
            return False
        self._last[trial.trial_id] = {"loss": loss, "seconds": max(1, int(second))}
        return bool(self._scheduler.on_trial_result(trial, self._last[trial.trial_id]) == "STOP")

    def tell(self, trial: Any, result: Result) -> None:
        cost = self._note(_typed(self._problem.distributions, trial.config), result)
        if not self._loss_based:
            self._scheduler.on_trial_complete(trial, {"cost": cost})
        elif result.verdict == "reached":
            self._scheduler.on_trial_complete(trial, self._last[trial.trial_id])
        elif result.verdict == "pruned" and trial.trial_id in self._last:
            self._scheduler.on_trial_remove(trial)
        else:
            self._scheduler.on_trial_error(trial)


def _syne_domain(distribution: BaseDistribution) -> Any:
    from syne_tune import config_space

    if isinstance(distribution, CategoricalDistribution):
        return config_space.choice(list(distribution.choices))
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    if isinstance(distribution, IntDistribution):
        return (config_space.lograndint if distribution.log else config_space.randint)(
            distribution.low, distribution.high
        )
    return (config_space.loguniform if distribution.log else config_space.uniform)(distribution.low, distribution.high)


def _typed(distributions: Mapping[str, BaseDistribution], config: Mapping[str, Any]) -> dict[str, Any]:
    """A library's values as plain Python ones, whole numbers whole."""
    found: dict[str, Any] = {}
    for name, distribution in distributions.items():
        value = config[name]
        value = value.item() if isinstance(value, np.generic) else value
        found[name] = round(value) if isinstance(distribution, IntDistribution) else value
    return found


def syne_asha(problem: Problem, seed: int) -> SyneTune:
    """ASHA over eval losses at equal seconds, from the first evals of good runs on."""
    from syne_tune.optimizer.baselines import ASHA

    return SyneTune(problem, lambda space: ASHA(space, random_seed=seed, **_rungs(problem)), loss_based=True)


def syne_asha_cqr(problem: Problem, seed: int) -> SyneTune:
    """The same with conformalised quantile regression proposing."""
    from syne_tune.optimizer.baselines import ASHACQR

    return SyneTune(problem, lambda space: ASHACQR(space, random_seed=seed, **_rungs(problem)), loss_based=True)


def _rungs(problem: Problem) -> dict[str, Any]:
    limit = int(60 * problem.trial_minutes)
    return {"metric": "loss", "time_attr": "seconds", "max_t": limit, "grace_period": limit // 4}


def syne_cqr(problem: Problem, seed: int) -> SyneTune:
    """Conformalised quantile regression on the final score."""
    from syne_tune.optimizer.baselines import CQR

    return SyneTune(problem, lambda space: CQR(space, metric="cost", random_seed=seed), loss_based=False)


class Smac(_Best):
    """SMAC3's facade for hyperparameters of a noisy objective: random forest, log expected improvement, racing."""

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__(problem)
        from ConfigSpace import Categorical, ConfigurationSpace, Float, Integer
        from smac import HyperparameterOptimizationFacade, Scenario

        space = ConfigurationSpace(seed=seed)
        for name, d in problem.distributions.items():
            if isinstance(d, CategoricalDistribution):
                space.add(Categorical(name, list(d.choices)))
            elif isinstance(d, IntDistribution):
                space.add(Integer(name, (d.low, d.high), log=d.log))
            elif isinstance(d, FloatDistribution):
                space.add(Float(name, (d.low, d.high), log=d.log))
        folder = tempfile.mkdtemp(prefix="smac-")
        scenario = Scenario(space, deterministic=False, n_trials=10_000, seed=seed, output_directory=folder)
        self._smac = HyperparameterOptimizationFacade(
            scenario, _unused, overwrite=True, logging_level=False,
            initial_design=HyperparameterOptimizationFacade.get_initial_design(scenario, n_configs=10),
        )  # fmt: skip

    def ask(self) -> Ask:
        info = self._smac.ask()
        return Ask(info, _typed(self._problem.distributions, dict(info.config)))

    def report(self, _info: Any, _samples: float, _loss: float, _second: float, _timing: Timing) -> bool:
        return False

    def tell(self, info: Any, result: Result) -> None:
        from smac.runhistory.dataclasses import TrialValue
        from smac.runhistory.enumerations import StatusType

        cost = self._note(_typed(self._problem.distributions, dict(info.config)), result)
        status = StatusType.SUCCESS if math.isfinite(result.score) else StatusType.CRASHED
        self._smac.tell(info, TrialValue(cost=cost, status=status), save=False)


def _unused(_config: Any, seed: int = 0) -> float:  # noqa: ARG001  # SMAC asks for an argument of this name
    raise AssertionError("the arena runs the trials")


class Ax(_Best):
    """Ax's client with its default strategy: Sobol, then a Gaussian process with noisy expected improvement."""

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__(problem)
        logging.getLogger("ax").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        from ax.api.client import Client
        from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig

        parameters: list[Any] = []
        for name, d in problem.distributions.items():
            if isinstance(d, CategoricalDistribution):
                values = [str(c) for c in d.choices]
                parameters.append(
                    ChoiceParameterConfig(name=name, parameter_type="str", values=values, is_ordered=False)
                )
            elif isinstance(d, FloatDistribution | IntDistribution):
                kind: Any = "int" if isinstance(d, IntDistribution) else "float"
                scaling: Any = "log" if d.log else "linear"
                parameters.append(
                    RangeParameterConfig(name=name, parameter_type=kind, bounds=(d.low, d.high), scaling=scaling)
                )
        self._client = Client(random_seed=seed)
        self._client.configure_experiment(parameters=parameters, name="lab")
        self._client.configure_optimization(objective="-score")
        self._client.configure_generation_strategy(
            method="fast", initialization_budget=STARTS, initialization_random_seed=seed
        )

    def ask(self) -> Ask:
        with contextlib.redirect_stdout(None):
            ((index, parameters),) = self._client.get_next_trials(max_trials=1).items()
        return Ask((index, parameters), _typed(self._problem.distributions, parameters))

    def report(self, _trial: Any, _samples: float, _loss: float, _second: float, _timing: Timing) -> bool:
        return False

    def tell(self, trial: Any, result: Result) -> None:
        index, parameters = trial
        cost = self._note(_typed(self._problem.distributions, parameters), result)
        self._client.complete_trial(trial_index=index, raw_data={"score": cost})


class FirstEvalThenTop(_Best):
    """The cheap trick: ``wide`` random configurations to their first eval, then the best ``keep`` to the end."""

    def __init__(self, problem: Problem, seed: int, *, wide: int = 16, keep: int = 4) -> None:
        super().__init__(problem)
        self._random = random.Random(seed)
        self._wide, self._keep = wide, keep
        self._open = 0
        self._first: list[tuple[float, dict[str, Any]]] = []
        self._finalists: list[dict[str, Any]] = []

    def ask(self) -> Ask:
        if self._finalists:
            tuned = self._finalists.pop(0)
            return Ask(("final", tuned), tuned)
        tuned = {n: from_unit(d, self._random.uniform(-1, 1)) for n, d in self._problem.distributions.items()}
        return Ask(("wide", tuned), tuned)

    def report(self, trial: Any, _samples: float, loss: float, _second: float, _timing: Timing) -> bool:
        stage, tuned = trial
        if stage == "final" or loss <= self._problem.target:
            return False
        self._first.append((loss if math.isfinite(loss) else math.inf, tuned))
        return True

    def tell(self, trial: Any, result: Result) -> None:
        stage, tuned = trial
        self._note(tuned, result)
        if stage == "wide":
            self._open += 1
        if self._open >= self._wide:
            ranked = sorted(self._first, key=lambda f: f[0])
            self._finalists += [t for _, t in ranked[: self._keep]]
            self._open, self._first = 0, []


METHODS: dict[str, Callable[[Problem, int], Any]] = {
    "syne-tune asha": syne_asha,
    "syne-tune asha+cqr": syne_asha_cqr,
    "syne-tune cqr": syne_cqr,
    "smac3": Smac,
    "ax": Ax,
    "first eval, then top k": FirstEvalThenTop,
}
"""Name -> a method for (problem, seed)."""
