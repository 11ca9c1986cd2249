"""The grey-box search with this project's own pruning, and its ablations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState

from lora_tune.curve import Timing
from lora_tune.lab.arena import Ask, Result
from lora_tune.lab.problem import Problem
from lora_tune.lab.stopping import Stopper
from lora_tune.mllog import Eval
from lora_tune.search.acquisition import recommend_from
from lora_tune.search.goal import Goal, closed_schedule, no_reference, rcp_mean
from lora_tune.search.model import without_open
from lora_tune.search.observations import Observation
from lora_tune.search.published import llama2_70b_lora
from lora_tune.search.sampler import GreyBoxSampler


class GreyBox:
    """The sampler in an Optuna study, as the driver would use it."""

    def __init__(
        self, problem: Problem, seed: int, *, prior: tuple[Observation, ...] = (), probes: bool = True,
        capped: bool = True,
    ) -> None:  # fmt: skip
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        normalised = getattr(problem.surface, "score", "") == "mlperf_score"
        self._goal = Goal(
            target=problem.target,
            schedule=closed_schedule,
            reference_samples=rcp_mean if normalised else no_reference,
            nodes=problem.nodes,
        )
        self._problem, self._capped = problem, capped
        self._sampler = GreyBoxSampler(
            problem.distributions, goal=self._goal, gpus=problem.space.gpus, prior=prior, probes=probes, capped=capped,
            seed=seed,
        )  # fmt: skip
        self._study = optuna.create_study(sampler=self._sampler)
        self._evals: dict[int, list[Eval]] = {}
        self._stopper = Stopper(problem, published=bool(prior))
        self.claimed_regret = np.inf
        self.log: list[str] = []

    def ask(self) -> Ask:
        trial = self._study.ask(self._problem.distributions)
        self.log.append(f"{trial.number}: {trial.params} {trial.user_attrs['why']}")
        return Ask(trial, dict(trial.params), trial.user_attrs["kind"])

    def report(self, trial: optuna.Trial, samples: float, loss: float, second: float, timing: Timing) -> bool:
        trial.report(loss, int(samples))
        evals = self._evals.setdefault(trial.number, [])
        evals.append(Eval(samples, loss, second))
        if not self._capped or loss <= self._goal.target:
            return False
        return self._stopper.stop(trial.params, evals, timing)

    def tell(self, trial: optuna.Trial, result: Result) -> None:
        for name, value in result.facts.items():
            trial.set_user_attr(name, value)
        if result.verdict == "reached":
            self._stopper.finished(trial.params, self._evals[trial.number], float(result.facts["stop_seconds"]))
            self._study.tell(trial, result.score)
            return
        if result.verdict == "infeasible":
            trial.set_constraint("feasible", 1.0)
        self._study.tell(trial, state=TrialState.PRUNED)

    def recommend(self) -> Mapping[str, Any] | None:
        space = self._problem.distributions
        model = self._sampler.model(space, self._sampler.observations(self._study, frozenset(space)))
        found = recommend_from(without_open(model), np.random.default_rng(0))
        self.claimed_regret = found.regret
        return dict(found.values)


METHODS: dict[str, Callable[[Problem, int], GreyBox]] = {
    "ours": lambda p, seed: GreyBox(p, seed, prior=llama2_70b_lora()),
    "ours, no prior": lambda p, seed: GreyBox(p, seed),
    "ours, no probes": lambda p, seed: GreyBox(p, seed, prior=llama2_70b_lora(), probes=False),
    "ours, no capping": lambda p, seed: GreyBox(p, seed, prior=llama2_70b_lora(), capped=False),
}
"""Name -> a method for (problem, seed)."""
