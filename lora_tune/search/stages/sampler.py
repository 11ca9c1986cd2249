"""Sampler of a study with switches: screening probes, whole runs for precision switches, then the grey box.

Each stage lasts while its next step is worth its node-hours:

a. speed switches, on the user's configuration, by probes (:mod:`lora_tune.search.stages.screening`); precision
   switches also by whole runs (:mod:`lora_tune.search.stages.arithmetic`);
b. layouts and c. learning rate, steps and warm-up: the grey box at the best setting of the switches, with all trials'
   speeds corrected to that setting;
d. one whole run of the recommendation, to compare with the base's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

from lora_tune.config.study import Study
from lora_tune.search.grey_box.objective import Goal
from lora_tune.search.grey_box.sampler import GreyBoxSampler, Proposed
from lora_tune.search.recorded import FIXED, annotate
from lora_tune.search.stages.knowledge import MIN_GAIN, PROBE_SHARE, USUAL_START, RunCosts, StageKnowledge
from lora_tune.search.stages.screening import Switch

Values = Mapping[str, Any]


def usual_costs(study: Study) -> RunCosts:
    """Costs of a study's runs before any has ended: a whole run takes at most its time limit."""
    seconds = 60 * study.budget.trial_minutes
    probe = min(seconds, USUAL_START + PROBE_SHARE * max(0.0, seconds - USUAL_START))
    return RunCosts(probe=probe * study.site.nodes / 3600, whole=seconds * study.site.nodes / 3600)


class StagesSampler(BaseSampler):
    """See the module's docstring.

    distributions: the search space. switches: names of the switches, and whether each changes arithmetic. start: the
    user's configuration, a value for each parameter. goal: of the study. grey_box: creates a grey box for given
    distributions. costs: before any run. min_gain: required gain per node-hour, as a share of the score. seed: of the
    designs.
    """

    def __init__(
        self,
        distributions: Mapping[str, BaseDistribution],
        *,
        switches: Mapping[str, bool],
        start: Values,
        goal: Goal,
        grey_box: Callable[[Mapping[str, BaseDistribution]], GreyBoxSampler],
        costs: RunCosts,
        min_gain: float | None = None,
        seed: int | None = None,
    ) -> None:
        self._space, self._start = dict(distributions), dict(start)
        rest = {n: d for n, d in self._space.items() if n not in switches}
        self._all = grey_box(rest)
        self._coordinates = self._all.coordinates(rest)
        layouts = {n: d for n, d in rest.items() if n in self._coordinates.speed_names}
        self._layouts = grey_box(layouts) if layouts else None
        self._switches = tuple(
            Switch(name=n, levels=_levels(d, start[n]), precision=switches[n])
            for n, d in sorted(self._space.items())
            if n in switches
        )
        self._goal, self._costs, self._min_gain = goal, costs, MIN_GAIN if min_gain is None else min_gain
        self._rng, self._random = np.random.default_rng(seed), RandomSampler(seed=seed)
        self._step: tuple[object, Proposed | None] = (None, None)

    def reseed_rng(self) -> None:
        """Reseed for a worker process."""
        self._rng = np.random.default_rng()
        self._random.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters."""
        return dict(self._space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Values of the next step; sets the user attributes ``why`` and ``kind`` of the trial."""
        if not search_space:
            return {}
        if FIXED in trial.system_attrs:  # a requested point: parameters missing from it stay at the start
            annotate(study, trial, kind="full")
            return dict(self._start)
        step = self._next(study, skip=trial.number)
        annotate(study, trial, why=step.why, kind=step.kind)
        return step.values

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """At random; only for parameters outside the known space."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def expected_gain(self, study: optuna.Study) -> float | None:
        """Expected improvement of the score by the next node-hour, as a share; None while a stage must first be
        completed."""
        if not any(t.state is TrialState.COMPLETE for t in study.get_trials(deepcopy=False)):
            return None
        rate = self._next(study).rate
        return None if math.isinf(rate) else -math.expm1(-max(0.0, rate))

    def _next(self, study: optuna.Study, skip: int = -1) -> Proposed:
        trials = [t for t in study.get_trials(deepcopy=False) if t.number != skip and t.state is not TrialState.WAITING]
        key = (len(trials), sum(t.state.is_finished() for t in trials))
        if self._step[0] != key or self._step[1] is None:
            self._step = key, self._known(trials).next_step(self._rng)
        assert self._step[1] is not None
        return self._step[1]

    def _known(self, trials: Sequence[FrozenTrial]) -> StageKnowledge:
        return StageKnowledge(
            trials=trials, switches=self._switches, start=self._start, goal=self._goal, of_all=self._all,
            of_layouts=self._layouts, coordinates=self._coordinates, costs=self._costs, min_gain=self._min_gain,
        )  # fmt: skip

    def recommend(self, study: optuna.Study) -> tuple[dict[str, Any], float, str]:
        """The best configuration: values, expected seconds, a sentence. A pure function of the trials.

        Raises ValueError before a run has reached the target.
        """
        trials = [t for t in study.get_trials(deepcopy=False) if t.state is not TrialState.WAITING]
        return self._known(trials).recommendation()

    def plan(self) -> list[str]:
        """Cost and possible gain of each stage before any run, or why it is skipped, one line each."""
        return [stage.description for stage in self._known(()).stages()]


def _levels(distribution: BaseDistribution, base: Any) -> tuple[Any, ...]:
    """A switch's values, the base's first."""
    choices: Sequence[Any] = getattr(distribution, "choices", (base,))
    return (base, *(c for c in choices if c != base or type(c) is not type(base)))
