"""An Optuna sampler that knows that time = samples / speed + evals, and spends node-hours where they teach most."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.search_space import IntersectionSearchSpace
from optuna.trial import FrozenTrial, TrialState

from lora_tune.config.parameters import Conditions
from lora_tune.search.fits_in_memory import Needs
from lora_tune.search.grey_box.acquisition import Action, value_actions
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.forecast import Advantage, compared, forecast
from lora_tune.search.grey_box.model import SearchModel, as_known, learn
from lora_tune.search.grey_box.objective import Goal
from lora_tune.search.grey_box.recommendation import Recommendation, recommend_from
from lora_tune.search.grey_box.scales import GreyBoxScales
from lora_tune.search.grey_box.words import explain, sentence
from lora_tune.search.observations import Observation
from lora_tune.search.optuna_trials import TrialReader, annotate, filled_in

PATIENCE = 4
"""Finished trials after which a study that recorded no samples to target is left to Optuna's default sampler."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """What to run: values, "full" or "probe", ln(score) that it is expected to gain a node-hour, and why."""

    values: dict[str, Any]
    kind: str
    rate: float
    why: str


class GreyBoxSampler(BaseSampler):
    """Proposes what improves the recommendation most per node-hour.

    Works in any single-objective Optuna study whose trials record the pieces as user attributes; their names are in
    :mod:`lora_tune.search.observations`. A study that records none of them is sampled by TPE.

    distributions: the search space; without it the first trial is random and the space is what trials share.
    goal: target, eval schedule, rules. gpus: of one trial, from which a layout's batch follows. fixed: values that do
    not vary but count. roles: what parameters decide, where the study says it. defaults: the values with which other
    sources ran of parameters that they do not name. conditions: which parameters exist only under others' values.
    full_fine_tuning_lr: of the same base in full, where it is known: LoRA's is expected by it. needs: of GPU memory, by
    physics. prior: observations of other sources, or a function that says which there are now. probes: short speed runs
    may be proposed (attribute ``kind`` = "probe" on the trial). capped: bad runs are stopped early. Each trial gets
    ``why``, a sentence.
    """

    def __init__(
        self,
        distributions: Mapping[str, BaseDistribution] | None = None,
        *,
        goal: Goal | None = None,
        gpus: int = 1,
        fixed: Mapping[str, Any] | None = None,
        roles: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        conditions: Conditions | None = None,
        full_fine_tuning_lr: float | None = None,
        needs: Needs | None = None,
        prior: Sequence[Observation] | Callable[[], Sequence[Observation]] = (),
        probes: bool = False,
        capped: bool = True,
        seed: int | None = None,
    ) -> None:
        self._distributions = dict(distributions) if distributions else None
        self._goal = goal or Goal()
        self._gpus, self._fixed = gpus, dict(fixed or {})
        self._roles, self._defaults = dict(roles or {}), dict(defaults or {})
        self._conditions, self._needs, self._rate = conditions or Conditions(), needs, full_fine_tuning_lr
        self._prior, self._probes, self._capped = prior, probes, capped
        self._rng = np.random.default_rng(seed)
        self._fallback = TPESampler(seed=seed, multivariate=True, constant_liar=True)
        self._random = RandomSampler(seed=seed)
        self._intersection = IntersectionSearchSpace()
        self._scales: GreyBoxScales | None = None
        self._learned: SearchModel | None = None
        self._known: tuple[SearchModel, SearchModel] | None = None
        self._readers: dict[frozenset[str], TrialReader] = {}
        self._gain: tuple[object, float | None] = (None, None)
        self._filled: tuple[tuple[Observation, ...], frozenset[str], list[Observation]] = ((), frozenset(), [])

    def reseed_rng(self) -> None:
        """Fresh randomness for a worker process."""
        self._rng = np.random.default_rng()
        self._fallback.reseed_rng()
        self._random.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters, where known."""
        if self._distributions is not None:
            return dict(self._distributions)
        return {n: d for n, d in self._intersection.calculate(study).items() if not d.single()}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The values of the best action; ``why`` and ``kind`` become user attributes of the trial."""
        if not search_space:
            return {}
        proposed = self.proposal(study, search_space, skip=trial.number)
        if proposed is None:
            annotate(study, trial, why="no trial recorded samples to target: proposed by Optuna's TPE", kind="full")
            return self._fallback.sample_relative(study, trial, search_space)
        annotate(study, trial, why=proposed.why, kind=proposed.kind)
        return proposed.values

    def proposal(
        self, study: optuna.Study, search_space: Mapping[str, BaseDistribution], skip: int = -1
    ) -> Proposed | None:
        """The best action by all trials but ``skip``; None where trials record no samples to the target."""
        observations = self.observations(study, frozenset(search_space), skip=skip)
        if self._pieces_missing(study, observations):
            return None
        model = self.model(search_space, observations)
        action = self.choose(model, value_actions(model, self._rng, probes=self._probes, capped=self._capped))
        return Proposed(dict(action.values), action.kind, action.rate, explain(model, action))

    def choose(self, model: SearchModel, actions: Sequence[Action]) -> Action:
        """The action to take out of all that were valued, best first."""
        return actions[0]

    def expected_gain(self, study: optuna.Study) -> float | None:
        """Share of the score by which the next node-hour is expected to improve the recommendation.

        None while nothing has reached the target, so that nobody knows. Asked again before a trial was added or
        ended, it answers at once.
        """
        trials = study.get_trials(deepcopy=False)
        known = len(self._prior() if callable(self._prior) else self._prior)
        key = (len(trials), sum(t.state.is_finished() for t in trials), known)
        if key != self._gain[0]:
            self._gain = (key, self._gain_now(study, trials))
        return self._gain[1]

    def _gain_now(self, study: optuna.Study, trials: Sequence[FrozenTrial]) -> float | None:
        space = self.infer_relative_search_space(study, trials[-1] if trials else _NO_TRIAL)
        observations = self.observations(study, frozenset(space))
        if not space or not any(math.isfinite(o.reached) for o in observations if not o.source):
            return None
        actions = value_actions(self.model(space, observations), self._rng, probes=self._probes, capped=self._capped)
        return -math.expm1(-max(0.0, actions[0].rate))

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """At random: only parameters outside the known space come here."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def observations(self, study: optuna.Study, names: frozenset[str], skip: int = -1) -> list[Observation]:
        """What the study's trials and the prior teach; a trial is read again only when it has more to say."""
        if names not in self._readers:
            self._readers = {names: TrialReader(names, self._goal.target)}
        read = self._readers[names].read
        seen = (read(trial) for trial in study.get_trials(deepcopy=False) if trial.number != skip)
        return [*self._priors(names), *(o for o in seen if o is not None)]

    def _priors(self, names: frozenset[str]) -> list[Observation]:
        """The observations of other sources, what they do not say of convergence filled in."""
        known = tuple(self._prior() if callable(self._prior) else self._prior)
        before, about, _ = self._filled
        if names != about or len(known) != len(before) or any(a is not b for a, b in zip(known, before, strict=True)):
            spread = {n: d for n, d in (self._distributions or {}).items() if n in names}
            wanted = self.coordinates(spread).convergence_names
            self._filled = known, names, [filled_in(o, {n: spread[n] for n in wanted}, self._defaults) for o in known]
        return list(self._filled[2])

    def coordinates(self, search_space: Mapping[str, BaseDistribution]) -> Coordinates:
        """How the space's parameters become features."""
        return Coordinates(
            distributions=dict(search_space),
            gpus=self._gpus,
            fixed=self._fixed,
            roles=self._roles,
            centre=self._defaults,
            conditions=self._conditions,
            full_fine_tuning_lr=self._rate,
        )

    def model(self, search_space: Mapping[str, BaseDistribution], observations: Sequence[Observation]) -> SearchModel:
        """The model after ``observations``; its scales are kept for the next call, and it is where nothing changed."""
        known = self._learned
        if (
            known is not None
            and known.coordinates.distributions == search_space
            and known.observations == (tuple(observations))
        ):
            return known
        coordinates = self.coordinates(search_space)
        model = learn(coordinates, self._goal, observations, self._scales, needs=self._needs)
        self._scales, self._learned = model.scales, model
        return model

    def recommend(self, study: optuna.Study) -> tuple[dict[str, Any], float, str]:
        """The best configuration as far as is known: values, expected score in seconds, a sentence with the regret."""
        best = self.recommendation(study)
        return dict(best.values), best.score, sentence(best)

    def recommendation(self, study: optuna.Study) -> Recommendation:
        """The same with all that is known of it: a pure function of the study's trials and the prior."""
        space = self.infer_relative_search_space(study, study.trials[0] if study.trials else _NO_TRIAL)
        observations = self.observations(study, frozenset(space))
        model = as_known(learn(self.coordinates(space), self._goal, observations, needs=self._needs))
        return recommend_from(model, np.random.default_rng(0))

    def forecast(self, study: optuna.Study, values: Mapping[str, Any], skip: int = -1) -> tuple[float, float]:
        """Mean and sd of ln(score) of one run of ``values``, by what all trials but ``skip`` have shown so far."""
        space = self._distributions or {}
        return forecast(self._as_known(space, self.observations(study, frozenset(space), skip=skip)), values)

    def compared(
        self, study: optuna.Study, values: Mapping[str, Any], instead: Sequence[Mapping[str, Any]]
    ) -> list[Advantage]:
        """What is believed of ``values`` beside each of ``instead``.

        Empty while no run of the study itself has reached the target.
        """
        space = self._distributions or {}
        observations = self.observations(study, frozenset(space))
        if not any(math.isfinite(o.reached) for o in observations if not o.source):
            return []
        model = self._as_known(space, observations)
        return [compared(model, values, other) for other in instead]

    def _as_known(self, space: Mapping[str, BaseDistribution], observations: Sequence[Observation]) -> SearchModel:
        """The model that proposes, as far as trials have ended."""
        model = self.model(space, observations)
        if self._known is None or self._known[0] is not model:
            self._known = model, as_known(model)
        return self._known[1]

    def _pieces_missing(self, study: optuna.Study, observations: Sequence[Observation]) -> bool:
        own = [o for o in observations if not o.source and not o.open]
        says = any(math.isfinite(o.reached) or o.evals or math.isfinite(o.bound) or o.infeasible for o in own)
        if says:
            return False
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        return len(done) >= PATIENCE


_NO_TRIAL = optuna.trial.create_trial(state=TrialState.RUNNING)
