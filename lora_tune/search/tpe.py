"""Optuna's TPE for long studies: it looks at the open, the best and the newest trials, so that asking stays cheap."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

NEWEST = 1000
"""Finished trials that are looked at beside the best ones; a study that is shorter is looked at whole."""
BEST = 100
"""TPE models at most the 25 best trials by themselves (``optuna.samplers._tpe.sampler.default_gamma``)."""


class WindowedTPESampler(TPESampler):
    """As TPESampler, and the same proposals until a study has more than ``NEWEST + BEST`` finished trials.

    From then on the older ones that are not among the best are left out: TPE gives old trials little weight anyway,
    and its cost grows with every trial that it sees.
    """

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        window: Any = _Window(study)
        return super().sample_relative(window, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        window: Any = _Window(study)
        return super().sample_independent(window, trial, param_name, param_distribution)


class _Window:
    """A study of which samplers see some trials only."""

    def __init__(self, study: optuna.Study) -> None:
        self._study = study

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def _get_trials(
        self, deepcopy: bool = True, states: Container[TrialState] | None = None, use_cache: bool = False
    ) -> list[FrozenTrial]:
        trials = self._study._get_trials(deepcopy, states, use_cache)
        if len(trials) <= NEWEST + BEST:
            return trials
        finished = [t for t in trials if t.state.is_finished()]
        sign = 1 if self._study.direction == StudyDirection.MINIMIZE else -1
        old = sorted((t for t in finished[:-NEWEST] if t.state == TrialState.COMPLETE), key=lambda t: sign * _value(t))
        kept = {t.number for t in (*old[:BEST], *finished[-NEWEST:])}
        return [t for t in trials if t.number in kept or not t.state.is_finished()]


def _value(trial: FrozenTrial) -> float:
    return trial.value if trial.value is not None else math.nan
