"""A search over lists of choices for a reward: for programs that run trials themselves and say how good each was."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import Trial, TrialState

from lora_tune.search.recorded import INFEASIBLE
from lora_tune.search.tpe import WindowedTPESampler

Point = tuple[int, ...]

_ASKED = 20
"""Proposals in a row that were tried already, after which one that was not is drawn at random."""

_LISTED = 100_000
"""Combinations up to which the untried ones are listed; of more, a random one is hardly ever tried already."""


class ChoiceSearch:
    """Proposes one combination at a time, and none twice.

    Parameters
    ----------
    choices : mapping of str to sequence
        The values of each parameter, at least one each. Rising or falling numbers are taken as an order.
    seed : int
        Of all that is drawn.
    startup : int
        Random proposals before TPE's model is used.
    first : bool
        The first proposal is the first value of each parameter, which is what the user has.

    Raises
    ------
    ValueError
        A parameter has no value.
    """

    def __init__(self, choices: Mapping[str, Sequence[Any]], *, seed: int, startup: int, first: bool) -> None:
        if empty := [name for name, values in choices.items() if not values]:
            raise ValueError(f"{empty[0]} has no value to choose from")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._choices = dict(choices)
        self._space: dict[str, BaseDistribution] = {n: _places(values) for n, values in choices.items()}
        sampler = WindowedTPESampler(seed=seed, n_startup_trials=startup, multivariate=True)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._rng = np.random.default_rng(seed)
        self._tried: set[Point] = set()
        self._open: Trial | None = None
        if first:
            self._study.enqueue_trial(dict.fromkeys(choices, 0))

    @property
    def size(self) -> int:
        """The number of combinations."""
        return math.prod(len(values) for values in self._choices.values())

    def ask(self) -> dict[str, Any] | None:
        """The next combination to try; None where every one was tried."""
        if len(self._tried) >= self.size:
            return None
        for _ in range(_ASKED):
            trial = self._study.ask(self._space)
            if self._point(trial) not in self._tried:
                break
            self._study.tell(trial, state=TrialState.FAIL)  # of which the sampler learns nothing
        else:
            self._study.enqueue_trial(dict(zip(self._space, self._untried(), strict=True)))
            trial = self._study.ask(self._space)
        point = self._point(trial)
        self._tried.add(point)
        self._open = trial
        return {name: values[at] for (name, values), at in zip(self._choices.items(), point, strict=True)}

    def tell(self, reward: float | None) -> None:
        """What the last combination was worth, the higher the better; None or no finite number: it cannot run."""
        assert self._open is not None, "told before it was asked"
        if reward is None or not math.isfinite(reward):
            self._open.set_constraint(INFEASIBLE, 1.0)
            self._study.tell(self._open, state=TrialState.PRUNED)
        else:
            self._open.set_constraint(INFEASIBLE, 0.0)
            self._study.tell(self._open, reward)
        self._open = None

    def _point(self, trial: Trial) -> Point:
        return tuple(int(trial.params[name]) for name in self._space)

    def _untried(self) -> Point:
        """A combination that was not tried, at random; one there is."""
        lengths = [len(values) for values in self._choices.values()]
        if self.size <= _LISTED:
            left = [p for p in itertools.product(*map(range, lengths)) if p not in self._tried]
            return left[int(self._rng.integers(len(left)))]
        while (point := tuple(int(self._rng.integers(n)) for n in lengths)) in self._tried:
            pass
        return point


def _places(values: Sequence[Any]) -> BaseDistribution:
    """The places of a list's values, from 0: in order where the values are numbers in order."""
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if numbers and len(values) > 2 and list(values) in (sorted(values), sorted(values, reverse=True)):
        return IntDistribution(0, len(values) - 1)
    return CategoricalDistribution(range(len(values)))
