"""Optuna's TPE for long studies: asking costs as much at ten thousand trials as at some hundred.

Of a long study the best trials and the newest ones are modelled; each finished trial is ranked once.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

NEWEST = 300
"""Finished trials that stand for all that are not good; a study of no more than these is looked at whole.

From 241 trials on TPE counts 25 as good, however many follow, so that older ones only blur what they are held against.
Against all trials, 20 seeds each (``python -m benchmarks.long_studies``, 2026-11-21): excess of the trial that looked
best 3.2% instead of 4.3% after 900 trials of the simulated 8 x H100 (median; lower in 10 seeds, higher in 7), 0.0034
instead of 0.0041 after 1,500 trials in a bent valley of integers (9, 11); the later proposals were better in both.
"""
GOOD = 25
"""Trials that TPE counts as good, at most."""

Space = dict[str, BaseDistribution]
Rank = tuple[int, float, float]


class WindowedTPESampler(BaseSampler):
    """As TPESampler for a study of one objective, and the same proposals until ``NEWEST`` trials have finished.

    TPE splits trials into at most ``GOOD`` good ones and the others, and proposes what is likely among the good ones
    and unlikely among the others. The good ones stay those of the whole study; of the others only the newest are used.
    """

    def __init__(self, **options: Any) -> None:
        """options: those of TPESampler, but for group and constraints_func."""
        self._tpe = TPESampler(**options)
        self._best = Best()

    def reseed_rng(self) -> None:
        """Fresh randomness for a worker process."""
        self._tpe.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Space:
        """The parameters of more than one value that all finished trials share, by name."""
        return self._tpe.infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Space) -> dict[str, Any]:
        """A value for each parameter of ``search_space``; none before the start-up trials are over."""
        return self._tpe.sample_relative(self._windowed(study), trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A value for a parameter that not all trials have."""
        return self._tpe.sample_independent(self._windowed(study), trial, param_name, param_distribution)

    def _windowed(self, study: optuna.Study) -> optuna.Study:
        """The study as TPE is shown it; itself while it is short."""
        trials = study.get_trials(deepcopy=False)
        shown = modelled(trials, study.direction, self._best)
        if len(shown) == len(trials):
            return study
        return optuna.load_study(study_name="window", storage=_Window(shown, study.direction))


class Best:
    """The ``GOOD`` best finished trials of a study that grows.

    A finished trial never changes, so that only those that have finished since the last call are ranked.
    """

    def __init__(self) -> None:
        self._direction = StudyDirection.NOT_SET
        self._ranked: dict[int, FrozenTrial] = {}
        self._best: list[tuple[Rank, int]] = []

    def numbers(self, finished: Sequence[FrozenTrial], direction: StudyDirection) -> set[int]:
        """The numbers of the best of the finished trials; of equal ones the oldest come first."""
        fresh = [t for t in finished if self._ranked.get(t.number) is not t]
        # Of another study, or read anew by a storage that keeps no objects: what was ranked is not among these.
        if direction is not self._direction or len(finished) - len(fresh) != len(self._ranked):
            self._direction, self._ranked, self._best, fresh = direction, {}, [], list(finished)
        self._ranked |= {t.number: t for t in fresh}
        self._best = sorted([*self._best, *((_rank(t, direction), t.number) for t in fresh)])[:GOOD]
        return {number for _, number in self._best}


def modelled(trials: Sequence[FrozenTrial], direction: StudyDirection, best: Best) -> list[FrozenTrial]:
    """The trials that TPE is shown of a study, by number: the good ones, the newest and the running ones.

    best: of this study as it grows.
    """
    finished = [t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    if len(finished) <= NEWEST:
        return list(trials)
    numbers = best.numbers(finished, direction).union(t.number for t in finished[-NEWEST:])
    return [t for t in trials if t.number in numbers or t.state is TrialState.RUNNING]


def _rank(trial: FrozenTrial, direction: StudyDirection) -> Rank:
    """Lower is better, in TPE's order: complete by value, pruned by step and value there, infeasible by violation."""
    sign = -1.0 if direction is StudyDirection.MAXIMIZE else 1.0
    violation = sum(max(0.0, excess) for excess in trial.constraints.values())
    if violation > 0:
        return 2, violation, 0.0
    if trial.state is TrialState.PRUNED:
        last = max(trial.intermediate_values, default=None)
        return (1, 1.0, 0.0) if last is None else (1, -last, _low(sign * trial.intermediate_values[last]))
    return 0, _low(math.nan if trial.value is None else sign * trial.value), 0.0


def _low(value: float) -> float:
    return math.inf if math.isnan(value) else value


class _Window(InMemoryStorage):
    """The storage of one study, of which only some trials are read, under their own numbers."""

    def __init__(self, trials: list[FrozenTrial], direction: StudyDirection) -> None:
        super().__init__()
        self.shown, self.direction = trials, direction

    def get_study_id_from_name(self, study_name: str) -> int:
        return 0

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        return [self.direction]

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        return [t for t in self.shown if states is None or t.state in states]

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """TPE notes what it proposes for other processes, until the trial holds it: here it does at once."""
