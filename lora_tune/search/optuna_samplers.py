"""Optuna's TPE and Gaussian process, optionally started from trials of earlier studies."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.search_space import intersection_search_space
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from lora_tune.search.grey_box.features import is_ordered

Space = dict[str, BaseDistribution]
Rank = tuple[int, float, float]
OldTrials = Callable[[], Sequence[FrozenTrial]]


class WarmTPESampler(BaseSampler):
    """TPESampler for one objective that starts from old trials; without them its proposals equal TPESampler's.

    A proposal takes 0.02 s of CPU time at 1,000 trials, 0.12 s at 10,000.
    """

    def __init__(self, old_trials: OldTrials = tuple, **options: Any) -> None:
        """old_trials: returns the current finished trials of earlier studies. options: of TPESampler, except group."""
        self._old, self._tpe = old_trials, TPESampler(**options)

    def reseed_rng(self) -> None:
        """Reseed for a worker process."""
        self._tpe.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Space:
        """Parameters with more than one value that all finished trials share, by name."""
        return _shared(self._old(), study) if self._old() else self._tpe.infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Space) -> dict[str, Any]:
        """A value for each parameter of ``search_space``; none before the start-up trials have ended."""
        if (best := untried(self._old(), study)) is not None:
            return {name: best[name] for name in search_space}
        return self._tpe.sample_relative(self._with_old(study), trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A value for a parameter that not all trials have."""
        return self._tpe.sample_independent(self._with_old(study), trial, param_name, param_distribution)

    def _with_old(self, study: optuna.Study) -> optuna.Study:
        old = self._old()
        return _of([*old, *study.get_trials(deepcopy=False)], study.direction) if old else study


def _shared(old: Sequence[FrozenTrial], study: optuna.Study) -> Space:
    common = intersection_search_space([*old, *study.get_trials(deepcopy=False)])
    return {name: distribution for name, distribution in common.items() if not distribution.single()}


def untried(old: Sequence[FrozenTrial], study: optuna.Study) -> dict[str, Any] | None:
    """Values of the best old trial, if it is better than all trials of the study and none of them has its values.

    The best point elsewhere is run here first. With few old trials in one part of the space, TPE itself would start at
    the edges of the space, where it has no trials.
    """
    best = min(old, key=lambda t: _rank(t, study.direction), default=None)
    if best is None:
        return None
    of_study, place = study.get_trials(deepcopy=False), _rank(best, study.direction)
    tried = any(t.params == best.params for t in of_study)
    behind = any(t.state is TrialState.COMPLETE and _rank(t, study.direction) < place for t in of_study)
    return None if tried or behind else best.params


def _rank(trial: FrozenTrial, direction: StudyDirection) -> Rank:
    """Sort key, lower is better, as in TPE: complete by value, pruned by step and value, infeasible by violation."""
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


class Window(InMemoryStorage):
    """In-memory storage of one study that exposes a subset of trials under their own numbers."""

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
        """No-op: TPE stores its proposal here for other processes until the trial holds it, which is immediate here."""


def _of(trials: list[FrozenTrial], direction: StudyDirection) -> optuna.Study:
    """A study with these trials."""
    return optuna.load_study(study_name="window", storage=Window(trials, direction))


# Gaussian process for the lowest loss of short studies: numeric choices are ordinal, long studies use TPE.
#
# On eight public tables of networks it beats TPE on six after 15 trials and on five after 30 (median excess over the
# best 22.4 and 16.5%, TPE's 21.9 and 19.0%; three repetitions, ``python -m benchmarks.lowest_loss``). Its cost is cubic
# in the number of trials.


MOST = 100
"""Maximum number of trials for the Gaussian process, which then takes half a second of CPU time per proposal."""

WORST = 2.0
"""Results are clipped at this many times the distance from the best to the median, above the median. A diverged run
would hide all differences between the others."""


class OrderedGPSampler(BaseSampler):
    """GPSampler for one objective with ordinal numeric choices. Pruned and infeasible runs also count, by their last
    value, clipped at the worst. ``later`` proposes after more than ``MOST`` trials.

    old_trials: returns the current finished trials of earlier studies.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        n_startup_trials: int = 10,
        later: BaseSampler | None = None,
        old_trials: OldTrials = tuple,
    ) -> None:
        self._seed, self._startup, self._later, self._old = seed, n_startup_trials, later, old_trials
        self._random = RandomSampler(seed=seed)
        self._gp: GPSampler | None = None  # created late, since it imports torch

    def reseed_rng(self) -> None:
        """Reseed for a worker process."""
        self._random.reseed_rng()
        self._gp, self._seed = None, None
        if self._later is not None:
            self._later.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Space:
        """Parameters with more than one value that all finished trials share, by name."""
        return _shared(self._old(), study)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Space) -> dict[str, Any]:
        """A value for each parameter of ``search_space``; none before the start-up trials have ended."""
        trials = [t for t in study.get_trials(deepcopy=False) if t.number != trial.number]
        if self._later is not None and len(trials) > MOST:
            return self._later.sample_relative(study, trial, search_space)
        if (best := untried(self._old(), study)) is not None:
            return {name: best[name] for name in search_space}
        known = [t for t in (*self._old(), *trials) if search_space.keys() <= t.params.keys()]
        complete = [t for t in known if t.state is TrialState.COMPLETE]
        if not search_space or len(complete) < max(1, self._startup):
            return {}
        ordered = {name: _in_order(distribution) for name, distribution in search_space.items()}
        shown = _Shown(search_space, ordered, complete, study.direction)
        window = _of([point for t in known if (point := shown.of(t)) is not None], StudyDirection.MINIMIZE)
        self._gp = self._gp or GPSampler(seed=self._seed, n_startup_trials=0)
        drawn = self._gp.sample_relative(window, trial, ordered)
        return {name: _outward(search_space[name], value) for name, value in drawn.items()}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """At random; after ``MOST`` trials by ``later``."""
        if self._later is not None and len(study.get_trials(deepcopy=False)) > MOST:
            return self._later.sample_independent(study, trial, param_name, param_distribution)
        return self._random.sample_independent(study, trial, param_name, param_distribution)


class _Shown:
    """Converts trials to the Gaussian process's space and scale: minimised, clipped, ordinal choices."""

    def __init__(
        self, space: Space, ordered: Space, complete: Sequence[FrozenTrial], direction: StudyDirection
    ) -> None:
        self._space, self._ordered = space, ordered
        self._sign = -1.0 if direction is StudyDirection.MAXIMIZE else 1.0
        values = np.array([self._sign * t.values[0] for t in complete])
        best, median = float(values.min()), float(np.median(values))
        self._worst = min(float(values.max()), median + WORST * (median - best)) if median > best else best

    def of(self, trial: FrozenTrial) -> FrozenTrial | None:
        """The converted trial; None if it has no usable result."""
        running = trial.state is TrialState.RUNNING
        if not running and trial.state not in (TrialState.COMPLETE, TrialState.PRUNED):
            return None
        value = None if running else min(self._worst, self._last(trial))
        params = {name: _inward(d, trial.params[name]) for name, d in self._space.items()}
        try:
            return create_trial(
                state=TrialState.RUNNING if running else TrialState.COMPLETE, value=value, params=params,
                distributions=self._ordered,
            )  # fmt: skip
        except ValueError:  # the trial is older than the space
            return None

    def _last(self, trial: FrozenTrial) -> float:
        infeasible = any(excess > 0 for excess in trial.constraints.values())
        value = math.nan if infeasible or not trial.values else self._sign * trial.values[0]
        return math.inf if math.isnan(value) else value


def _ordered(distribution: BaseDistribution) -> list[Any]:
    """Sorted values of a choice of numbers; empty for other parameters."""
    return sorted(distribution.choices) if is_ordered(distribution) else []  # type: ignore[attr-defined]


def _in_order(distribution: BaseDistribution) -> BaseDistribution:
    """A choice of numbers as an integer index of its sorted values; others unchanged."""
    choices = _ordered(distribution)
    return IntDistribution(0, len(choices) - 1) if choices else distribution


def _inward(distribution: BaseDistribution, value: Any) -> Any:
    if not (choices := _ordered(distribution)):
        return value
    return choices.index(value) if value in choices else -1


def _outward(distribution: BaseDistribution, place: Any) -> Any:
    choices = _ordered(distribution)
    return choices[place] if choices else place
