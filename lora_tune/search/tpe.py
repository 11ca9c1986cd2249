"""Optuna's TPE for long studies: asking costs as much at ten thousand trials as at some hundred.

Every finished trial is read once, and of a long study the best trials and the newest ones are modelled.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.samplers._tpe.sampler import _get_infeasible_trial_score, _get_pruned_trial_score, default_gamma
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from lora_tune.search.parzen import ParzenEstimator

NEWEST = 300
"""Finished trials that stand for all that are not good; a study of no more than these is looked at whole.

From 241 trials on TPE counts 25 as good, however many follow, so that older ones only blur what they are held against.
Against all trials, 20 seeds each (``python -m benchmarks.long_studies``, 2026-11-21): excess of the trial that looked
best 3.2% instead of 4.3% after 900 trials of the simulated 8 x H100 (median; lower in 10 seeds, higher in 7), 0.0034
instead of 0.0041 after 1,500 trials in a bent valley of integers (9, 11); the later proposals were better in both.
"""

Space = dict[str, BaseDistribution]
Row = tuple[float, ...]
Rank = tuple[int, float, float, int]


class WindowedTPESampler(TPESampler):
    """As TPESampler for a study of one objective, and the same proposals until ``NEWEST`` trials have finished.

    TPE splits trials into at most 25 good ones and the others, and proposes what is likely among the good ones and
    unlikely among the others. The good ones stay those of the whole study; of the others only the newest are used.
    One sampler serves one study. Its storage hands out trials by number, as Optuna's storages do.
    """

    def __init__(self, **options: Any) -> None:
        """options: those of TPESampler, but for group and constraints_func."""
        super().__init__(**options)
        self._parzen_estimator_cls = ParzenEstimator
        self._history = _History()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> Space:
        """The parameters of more than one value that all finished trials share, by name."""
        if not self._is_multivariate(study):
            return {}
        self._history.read(study)
        return {name: found for name, found in self._history.shared.items() if not found.single()}

    def _sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Space) -> dict[str, Any]:
        # The history is as infer_relative_search_space has just read it.
        few = len(self._history.finished) < self._n_startup_trials
        return {} if few or not search_space else self._propose(study, trial, search_space)

    def _sample(self, study: optuna.Study, trial: FrozenTrial, search_space: Space) -> dict[str, Any]:
        self._history.read(study)
        return self._propose(study, trial, search_space)

    def _propose(self, study: optuna.Study, trial: FrozenTrial, search_space: Space) -> dict[str, Any]:
        history, trials = self._history, self._history.trials
        window = history.finished[-NEWEST:]
        best = sorted(rank[-1] for rank in history.ranks[: default_gamma(len(window))])
        running = (n for n in history.open if trials[n].state is TrialState.RUNNING and n != trial.number)
        others = sorted({*window, *(running if self._constant_liar else ())}.difference(best))
        good, rest = (
            self._build_parzen_estimator(study, search_space, [trials[n] for n in numbers], handle_below=below)
            for numbers, below in ((best, True), (others, False))
        )
        candidates = good.sample(self._rng.rng, self._n_ei_candidates)
        chosen = self._compare(candidates, self._compute_acquisition_func(candidates, good, rest))
        return {name: found.to_external_repr(chosen[name]) for name, found in search_space.items()}

    def _get_internal_repr(
        self, trials: list[FrozenTrial], search_space: Space, study: optuna.Study
    ) -> dict[str, npt.NDArray[Any]]:
        known = self._history.rows(search_space)
        rows = []
        for trial in trials:
            if trial.number not in known:
                row = _row(self._get_params(trial, study), search_space)
                # What a running trial will try is settled once all its parameters stand in the storage.
                if trial.state.is_finished() or search_space.keys() <= trial.params.keys():
                    known[trial.number] = row
            else:
                row = known[trial.number]
            if row is not None:
                rows.append(row)
        columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(search_space))
        return dict(zip(search_space, columns.T, strict=True))


class _History:
    """What is known of a study's trials, each of which is read once when it has finished."""

    def __init__(self) -> None:
        self.trials: Sequence[FrozenTrial] = ()
        """All trials by number, as read last."""
        self.finished: list[int] = []
        """Numbers of complete and pruned trials, rising."""
        self.ranks: list[Rank] = []
        """The same trials, the best first, each with its number at the end."""
        self.open: list[int] = []
        """Numbers of trials that were running or waiting when last seen, rising."""
        self.shared: Space = {}
        """The distributions that all finished trials have in common, by name."""
        self._upto = 0
        self._rows: dict[tuple[str, ...], tuple[Space, dict[int, Row | None]]] = {}

    def read(self, study: optuna.Study) -> None:
        """Read all trials; those that have finished since the last call are taken in."""
        self.trials = trials = study._get_trials(deepcopy=False)
        before, self.open = [*self.open, *range(self._upto, len(trials))], []
        for number in before:
            trial = trials[number]
            if not trial.state.is_finished():
                self.open.append(number)
            elif trial.state is not TrialState.FAIL:
                self._add(trial, study)
        self._upto = len(trials)

    def _add(self, trial: FrozenTrial, study: optuna.Study) -> None:
        if not self.finished:
            self.shared = dict(sorted(trial.distributions.items()))
        else:
            # The newest of equal objects is kept: comparing an object with itself is free, the choices' texts are not.
            new = trial.distributions
            self.shared = {n: new[n] for n, d in self.shared.items() if n in new and (new[n] is d or new[n] == d)}
        bisect.insort(self.finished, trial.number)
        bisect.insort(self.ranks, _rank(trial, study))

    def rows(self, space: Space) -> dict[int, Row | None]:
        """The values of trials in ``space`` that were read before, by number; None: a trial lacks some of them."""
        of, found = self._rows.get(tuple(space), ({}, {}))
        if not all(of.get(name) is d or of.get(name) == d for name, d in space.items()):
            found = {}
        self._rows[tuple(space)] = dict(space), found
        return found


def _row(params: dict[str, Any], space: Space) -> Row | None:
    if not space.keys() <= params.keys():
        return None
    return tuple(found.to_internal_repr(params[name]) for name, found in space.items())


def _rank(trial: FrozenTrial, study: optuna.Study) -> Rank:
    """Lower is better, in TPE's order: complete by value, pruned by step and value there, infeasible by violation."""
    violation = _get_infeasible_trial_score(trial)
    if violation > 0:
        return 2, violation, 0.0, trial.number
    if trial.state is TrialState.PRUNED:
        return 1, *_get_pruned_trial_score(trial, study), trial.number
    value = math.inf if trial.value is None or math.isnan(trial.value) else trial.value
    return 0, -value if study.direction is StudyDirection.MAXIMIZE else value, 0.0, trial.number
