"""The grey-box search with this project's own pruning, as methods that play a problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState

from benchmarks.laboratory.arena import Ask, Result
from benchmarks.laboratory.problem import Problem
from benchmarks.laboratory.stopping import Stopper
from lora_tune.base.llama import SHAPES
from lora_tune.config.layout import parse_layout
from lora_tune.config.space import Space
from lora_tune.curves import Timing
from lora_tune.logs.run import Eval
from lora_tune.search import physics
from lora_tune.search.grey_box.memory import MemoryPhysics
from lora_tune.search.grey_box.objective import Goal, closed_schedule, no_family, no_reference, public_family, rcp_mean
from lora_tune.search.grey_box.sampler import GreyBoxSampler
from lora_tune.search.observations import Observation
from lora_tune.search.optuna_samplers import WarmTPESampler
from lora_tune.search.published import CLOSED_DIVISION, llama2_70b_lora


class GreyBox:
    """The sampler in an Optuna study, as the driver would use it."""

    def __init__(
        self, problem: Problem, seed: int, *, prior: tuple[Observation, ...] = (), probes: bool = True,
        capped: bool = True, sampler: type[GreyBoxSampler] = GreyBoxSampler,
        needs: MemoryPhysics | None = None,
    ) -> None:  # fmt: skip
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        normalised = getattr(problem.surface, "score", "") == "mlperf_score"
        self._goal = Goal(
            target=problem.target,
            schedule=closed_schedule if problem.published else None,
            reference_samples=rcp_mean if normalised else no_reference,
            family=public_family if prior else no_family,
            nodes=problem.nodes,
            limit_seconds=60 * problem.trial_minutes,
        )
        self._problem, self._capped = problem, capped
        self._make = partial(
            sampler, problem.distributions, goal=self._goal, gpus=problem.space.gpus, prior=prior, probes=probes,
            capped=capped, fixed={"VAL_CHECK_INTERVAL": problem.interval} if problem.interval else {}, seed=seed,
            defaults={**(problem.start or {}), **(CLOSED_DIVISION if prior else {})}, needs=needs,
        )  # fmt: skip
        self._sampler = self._make()
        self._study = optuna.create_study(sampler=self._sampler)
        if problem.start is not None:
            self._study.enqueue_trial(dict(problem.start), user_attrs={"why": "what was there before", "kind": "full"})
        self._evals: dict[int, list[Eval]] = {}
        self._stopped: dict[int, str] = {}
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
        self._stopped[trial.number] = self._stopper.stop(trial.params, evals, timing, start=trial.number == 0)
        return bool(self._stopped[trial.number])

    def tell(self, trial: optuna.Trial, result: Result) -> None:
        verdict = self._stopped.get(trial.number) or result.verdict
        for name, value in {**result.facts, "verdict": verdict}.items():
            trial.set_user_attr(name, value)
        if result.verdict == "reached":
            self._stopper.finished(trial.params, self._evals[trial.number], float(result.facts["stop_seconds"]))
            self._study.tell(trial, result.score)
            return
        if result.verdict == "infeasible":
            trial.set_constraint("feasible", 1.0)
        self._study.tell(trial, state=TrialState.PRUNED)

    def recommend(self) -> Mapping[str, Any] | None:
        """As in the product nothing before a run has reached the target."""
        if not self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            return None
        return self.believed()

    def believed(self) -> Mapping[str, Any] | None:
        """What the search believes best."""
        found = self._sampler.recommendation(self._study)
        self.claimed_regret = found.regret
        return dict(found.values)


class Luckiest(GreyBox):
    """The same search, judged by its fastest single run."""

    def recommend(self) -> Mapping[str, Any] | None:
        done = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return min(done, key=lambda t: float(t.value or np.inf)).params if done else None


class ProductTpe(Luckiest):
    """The product's TPE with the product's own stopping, as a study without ``search.sampler`` gets it."""

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__(problem, seed)
        sampler = WarmTPESampler(seed=seed, n_startup_trials=5, multivariate=True, constant_liar=True)
        self._study = optuna.create_study(sampler=sampler)
        if problem.start is not None:
            self._study.enqueue_trial(dict(problem.start))

    def ask(self) -> Ask:
        trial = self._study.ask(self._problem.distributions)
        return Ask(trial, dict(trial.params))


class Default(GreyBox):
    """The product's default sampler of studies with layouts or published results, with the product's own stopping."""

    def __init__(self, problem: Problem, seed: int, *, needs: MemoryPhysics | None = None) -> None:
        super().__init__(problem, seed, prior=published(problem), needs=needs, sampler=GreyBoxSampler)
        self._make = partial(self._make, start=problem.start)
        self._study.sampler = self._make()

    def believed(self) -> Mapping[str, Any] | None:
        """As the product's export and report: by a sampler of its own, which the search is none the wiser for."""
        return self._make().recommend(self._study)[0]


@dataclass(frozen=True)
class OtherStack:
    """Memory of MLPerf's Llama-2-70B by physics, in a stack that is not ours, on GPUs of ``limit`` GiB.

    What others fuse and keep changes the level of all layouts more than their order, so that the level is open.
    """

    space: Space
    limit: float
    level_sd: float = 0.3

    def gib(self, tuned: Mapping[str, Any]) -> float:
        """As public entries run: FP8 with weights in it alone, sequences split where tensors are."""
        layout = parse_layout(str(tuned["layout"]))
        step = physics.step_of(SHAPES["70b"], 8192, {"FP8": 1, "FP8_PARAMS": 1, "FP8_ACT": 1})
        return physics.gib(step, replace(layout, sp=1), self.space.gpus)


def needs(problem: Problem) -> OtherStack | None:
    """What physics says of memory, where the problem is MLPerf's benchmark on a GPU that is known by its name."""
    limit = physics.capacity(problem.name)
    return OtherStack(problem.space, limit) if problem.published and limit is not None else None


def ours(problem: Problem, seed: int, *, needs: MemoryPhysics | None = None) -> GreyBox:
    """What the product does with a study that names no sampler."""
    known = problem.coordinates.layout is not None or bool(published(problem))
    return Default(problem, seed, needs=needs) if known else ProductTpe(problem, seed)


def published(problem: Problem) -> tuple[Observation, ...]:
    """The published results where they are about this problem, as a study's ``curves`` says in the product."""
    return llama2_70b_lora() if problem.published else ()


def misleading(factor: float = 10.0) -> tuple[Observation, ...]:
    """The published table with its learning rates multiplied: it praises rates at which runs diverge."""
    return tuple(replace(o, values={**o.values, "LR": factor * o.values["LR"]}) for o in llama2_70b_lora())


METHODS: dict[str, Callable[[Problem, int], GreyBox]] = {
    "ours": ours,
    "ours, physics": lambda p, seed: ours(p, seed, needs=needs(p)),
    "grey box": lambda p, seed: GreyBox(p, seed, prior=published(p)),
    "grey box, misleading prior": lambda p, seed: GreyBox(p, seed, prior=misleading()),
}
"""Name -> a method for (problem, seed)."""
