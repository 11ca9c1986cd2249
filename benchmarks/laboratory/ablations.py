"""The grey-box sampler with one of its ideas taken away."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import optuna
from optuna.distributions import BaseDistribution

from lora_tune.search.grey_box.acquisition import Action
from lora_tune.search.grey_box.features import Coordinates, Values
from lora_tune.search.grey_box.model import SearchModel
from lora_tune.search.grey_box.sampler import GreyBoxSampler
from lora_tune.search.observations import Observation


class JointCoordinates(Coordinates):
    """All parameters decide one quantity; nothing is known to factor."""

    @cached_property
    def speed_names(self) -> tuple[str, ...]:
        return ()

    @cached_property
    def convergence_names(self) -> tuple[str, ...]:
        return tuple(sorted(self.distributions))

    @cached_property
    def _layouts(self) -> Coordinates:
        return Coordinates(distributions=self.distributions, gpus=self.gpus, fixed=self.fixed)

    @cached_property
    def rate_feature(self) -> int | None:
        return self._layouts.rate_feature

    def total_samples(self, values: Values) -> float:
        return math.inf

    def convergence_features(self, values: Values) -> list[float]:
        return [*self._layouts.convergence_features(values), *(f / 2 for f in self._layouts.speed_features(values))]


class WithoutDecomposition(GreyBoxSampler):
    """One Gaussian process of ln(seconds) over all parameters; acquisition, features and censoring stay."""

    def coordinates(self, search_space: Mapping[str, BaseDistribution]) -> Coordinates:
        return JointCoordinates(distributions=dict(search_space), gpus=self._gpus, fixed=self._fixed)

    def observations(self, study: optuna.Study, names: frozenset[str], skip: int = -1) -> list[Observation]:
        return [_in_seconds(o) for o in super().observations(study, names, skip) if not o.source]


def _in_seconds(o: Observation) -> Observation:
    """The observation with seconds in the place of samples; a death of memory counts as a run that diverged."""
    seconds = float(o.attributes.get("stop_seconds", math.nan))
    spent = 3600 * o.node_hours if o.node_hours > 0 else math.nan
    return replace(
        o, evals=(), reached=seconds, bound=spent, samples_per_second=1.0 if o.ran else math.nan,
        seconds_per_eval=1e-6, diverged=o.diverged or o.infeasible, infeasible=False, attributes={},
    )  # fmt: skip


class WithoutReplicates(GreyBoxSampler):
    """Never another seed of hyperparameters that were tried."""

    def choose(self, model: SearchModel, actions: Sequence[Action]) -> Action:
        names = model.coordinates.convergence_names

        def key(values: Mapping[str, Any]) -> tuple[Any, ...]:
            return tuple(values.get(n) for n in names)

        tried = {key(o.values) for o in model.observations if not o.source}
        return next((a for a in actions if a.kind == "probe" or key(a.values) not in tried), actions[0])
