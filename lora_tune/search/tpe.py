"""Optuna's TPE for long studies: asking costs as much at ten thousand trials as at some hundred.

Of a long study the best trials and the newest ones are modelled, and fine grids as the ranges that they divide; each
finished trial is ranked once.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.search_space import intersection_search_space
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

NEWEST = 300
"""Finished trials that stand for all that are not good; a study of no more than these is looked at whole.

From 241 trials on TPE counts 25 as good, however many follow, so that older ones only blur what they are held against.
"""
GOOD = 25
"""Trials that TPE counts as good, at most."""
KERNELS = 100
"""TPE's kernels are no narrower than this part of their range."""

Space = dict[str, BaseDistribution]
Rank = tuple[int, float, float]


class WindowedTPESampler(BaseSampler):
    """As TPESampler for a study of one objective, and the same proposals until ``NEWEST`` trials have finished.

    TPE splits trials into at most ``GOOD`` good ones and the others, and proposes what is likely among the good ones
    and unlikely among the others. The good ones stay those of the whole study; of the others only the newest are used.
    """

    def __init__(self, old_trials: Callable[[], Sequence[FrozenTrial]] = tuple, **options: Any) -> None:
        """old_trials: finished ones of before the study, as they are now. options: of TPESampler, but group and
        constraints_func."""
        self._old = old_trials
        self._tpe = TPESampler(**options)
        self._history = History()

    def reseed_rng(self) -> None:
        """Fresh randomness for a worker process."""
        self._tpe.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Space:
        """The parameters of more than one value that all finished trials share, by name."""
        if old := self._old():
            common = intersection_search_space([*old, *study.get_trials(deepcopy=False)])
            return {name: distribution for name, distribution in common.items() if not distribution.single()}
        return self._tpe.infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Space) -> dict[str, Any]:
        """A value for each parameter of ``search_space``; none before the start-up trials are over."""
        if (best := untried(self._old(), study)) is not None:
            return {name: best[name] for name in search_space}
        shown = self._windowed(study)
        if shown is study:
            return self._tpe.sample_relative(study, trial, search_space)
        ranges = {name: as_range(distribution) for name, distribution in search_space.items()}
        drawn = self._tpe.sample_relative(shown, trial, ranges)
        return {name: nearest(value, search_space[name]) for name, value in drawn.items()}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A value for a parameter that not all trials have."""
        shown = self._windowed(study)
        if shown is study:
            return self._tpe.sample_independent(study, trial, param_name, param_distribution)
        drawn = self._tpe.sample_independent(shown, trial, param_name, as_range(param_distribution))
        return nearest(drawn, param_distribution)

    def _windowed(self, study: optuna.Study) -> optuna.Study:
        """The study as TPE is shown it; itself while it is short."""
        trials = study.get_trials(deepcopy=False)
        shown = self._history.modelled(trials, study.direction)
        old = self._old()
        if len(shown) == len(trials) and not old:
            return study
        return optuna.load_study(study_name="window", storage=Window([*old, *shown], study.direction))


def untried(old: Sequence[FrozenTrial], study: optuna.Study) -> dict[str, Any] | None:
    """The values of the best old trial, while it is better than all of the study and none has them.

    What was best elsewhere is measured here first. Of few old trials in a part of the space TPE itself would begin
    at its edges, where it has seen none.
    """
    best = min(old, key=lambda t: _rank(t, study.direction), default=None)
    if best is None:
        return None
    of_study, place = study.get_trials(deepcopy=False), _rank(best, study.direction)
    tried = any(t.params == best.params for t in of_study)
    behind = any(t.state is TrialState.COMPLETE and _rank(t, study.direction) < place for t in of_study)
    return None if tried or behind else best.params


def as_range(distribution: BaseDistribution) -> BaseDistribution:
    """The range that a fine grid divides, half a step beyond both ends; every other distribution as it is.

    Optuna computes the probability of each cell of a grid one number at a time, which takes nine tenths of a proposal;
    where no cell is wider than a kernel can be, the density says the same.
    """
    if not isinstance(distribution, IntDistribution | FloatDistribution) or not distribution.step:
        return distribution
    half = distribution.step / 2
    low, high = distribution.low - half, distribution.high + half
    first = distribution.low + half
    widest, whole = (math.log(first / low), math.log(high / low)) if distribution.log else (2 * half, high - low)
    return FloatDistribution(low, high, log=distribution.log) if widest * KERNELS <= whole else distribution


def nearest(value: Any, distribution: BaseDistribution) -> Any:
    """The distribution's value that lies nearest to one of its range; a choice as it is."""
    if not isinstance(distribution, IntDistribution | FloatDistribution) or not distribution.step:
        return value
    low, step = distribution.low, distribution.step
    return distribution.to_external_repr(min(max(low + round((value - low) / step) * step, low), distribution.high))


class History:
    """What of the finished trials of one study, which grows, TPE is shown. A finished trial is read once."""

    def __init__(self) -> None:
        self._direction = StudyDirection.NOT_SET
        self._newest: FrozenTrial | None = None
        self._upto = 0
        self._open: list[int] = []
        self._finished: list[int] = []
        self._best: list[tuple[Rank, int]] = []

    def modelled(self, trials: Sequence[FrozenTrial], direction: StudyDirection) -> list[FrozenTrial]:
        """The good trials, the newest and the running ones, by number; all of a study that is short.

        trials: of the study, each at its number. Of equally good ones the oldest are good.
        """
        if not self._is_current(trials, direction):  # of another study, or read anew by a storage that keeps no objects
            self._direction, self._upto, self._open, self._finished, self._best = direction, 0, [], [], []
        self._read(trials)
        if len(self._finished) <= NEWEST:
            return list(trials)
        running = (n for n in self._open if trials[n].state is TrialState.RUNNING)
        return [trials[n] for n in sorted({*(n for _, n in self._best), *self._finished[-NEWEST:], *running})]

    def _is_current(self, trials: Sequence[FrozenTrial], direction: StudyDirection) -> bool:
        if direction is not self._direction or len(trials) < self._upto:
            return False
        return self._newest is None or trials[self._newest.number] is self._newest

    def _read(self, trials: Sequence[FrozenTrial]) -> None:
        before, self._open = [*self._open, *range(self._upto, len(trials))], []
        self._upto = len(trials)
        for trial in (trials[number] for number in before):
            if not trial.state.is_finished():
                self._open.append(trial.number)
            elif trial.state is not TrialState.FAIL:
                bisect.insort(self._finished, trial.number)
                bisect.insort(self._best, (_rank(trial, self._direction), trial.number))
                del self._best[GOOD:]
        self._newest = trials[self._finished[-1]] if self._finished else None


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


class Window(InMemoryStorage):
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
