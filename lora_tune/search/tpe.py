"""Optuna's TPE for long studies: it looks at the open, the best and the newest trials, so that asking stays cheap."""

from __future__ import annotations

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

RENEWED = 50
"""Trials after which the best ones are looked for again; in between they are among the newest."""


class WindowedTPESampler(TPESampler):
    """As TPESampler, and the same proposals until a study has more than ``NEWEST + BEST`` trials.

    From then on trials before the ``NEWEST`` last finished ones are left out, but for the best: TPE gives old trials
    little weight anyway, and its cost grows with every trial that it sees.
    """

    def __init__(self, **options: Any) -> None:
        """options: those of TPESampler."""
        super().__init__(**options)
        self._best: tuple[int, list[FrozenTrial]] = (0, [])

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        window: Any = _Window(study, self._window(study))
        return super().sample_relative(window, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        window: Any = _Window(study, self._window(study))
        return super().sample_independent(window, trial, param_name, param_distribution)

    def _window(self, study: optuna.Study) -> list[FrozenTrial]:
        """The trials that are looked at, by number."""
        trials = study._get_trials(deepcopy=False)
        if len(trials) <= NEWEST + BEST:
            return trials
        first = len(trials)
        finished = 0
        while first and finished < NEWEST:
            first -= 1
            finished += trials[first].state.is_finished()
        if len(trials) - self._best[0] >= RENEWED:
            self._best = len(trials), _best(study, trials)
        return [*(t for t in self._best[1] if t.number < first), *trials[first:]]


def _best(study: optuna.Study, trials: list[FrozenTrial]) -> list[FrozenTrial]:
    """The ``BEST`` best complete trials, by number."""
    sign = 1 if study.direction == StudyDirection.MINIMIZE else -1
    complete = [t for t in trials if t.state == TrialState.COMPLETE and t.value is not None]
    complete.sort(key=lambda t: sign * (t.value or 0.0))
    return sorted(complete[:BEST], key=lambda t: t.number)


class _Window:
    """A study of which samplers see some trials only."""

    def __init__(self, study: optuna.Study, trials: list[FrozenTrial]) -> None:
        self._study, self._trials = study, trials

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def _get_trials(
        self, deepcopy: bool = True, states: Container[TrialState] | None = None, use_cache: bool = False
    ) -> list[FrozenTrial]:
        """Optuna's signature; these are never copied, as no sampler asks for copies."""
        return [t for t in self._trials if states is None or t.state in states]
