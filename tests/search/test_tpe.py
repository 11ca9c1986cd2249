"""Without old trials our TPE proposes what Optuna's does."""

from __future__ import annotations

import math
import random
from typing import Any
from zlib import crc32

import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.trial import TrialState

from lora_tune.search.optuna_samplers import WarmTPESampler

Space = dict[str, BaseDistribution]
Kind = type[TPESampler] | type[WarmTPESampler]

SPACES: dict[str, Space] = {
    "usual": {
        "LR": FloatDistribution(1e-5, 1e-2, log=True),
        "MAX_STEPS": IntDistribution(100, 2500),
        "layout": CategoricalDistribution(["tp1", "tp4", "tp8", "$(x) 'é\n"]),
    },
    "grids": {
        "a": FloatDistribution(0, 1, step=0.1), "b": IntDistribution(1, 1024, log=True), "LR": FloatDistribution(-5, 5),
    },
    "few": {"LR": IntDistribution(0, 3), "b": CategoricalDistribution([0, 1]), "fixed": IntDistribution(3, 3)},
}  # fmt: skip


def proposals(sampler: optuna.samplers.BaseSampler, space: Space, seed: int, count: int, direction: str) -> list[Any]:
    """A study with every kind of end, in any order; what it was asked to try."""
    chance = random.Random(seed)
    study = optuna.create_study(sampler=sampler, direction=direction)
    study.enqueue_trial({"LR": 1})
    asked, running = [], []
    for _ in range(count):
        running.append(study.ask(space))
        asked.append(running[-1].params)
        while len(running) > chance.randint(0, 5):
            end(study, running.pop(chance.randrange(len(running))), chance)
    return asked


def end(study: optuna.Study, trial: optuna.Trial, chance: random.Random) -> None:
    how, value = chance.random(), crc32(repr(trial.params).encode()) % 30 / 10
    if how < 0.1:
        study.tell(trial, state=TrialState.FAIL)
    elif how < 0.2:
        trial.set_constraint("feasible", chance.random())
        study.tell(trial, state=TrialState.PRUNED)
    elif how < 0.5:
        for step in range(chance.randint(0, 3)):
            trial.report(chance.choice([value, math.nan, 1.0]), step)
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, value)


@pytest.mark.filterwarnings("ignore:Fixed parameter:UserWarning")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize("name", SPACES)
def test_proposals_are_those_of_optuna(name: str, direction: str, seed: int) -> None:
    options = {"seed": seed, "n_startup_trials": 5, "multivariate": True, "constant_liar": seed == 1}
    plain = proposals(TPESampler(**options), SPACES[name], seed, 50, direction)  # type: ignore[arg-type]
    ours = proposals(WarmTPESampler(**options), SPACES[name], seed, 50, direction)
    assert ours == plain


@pytest.mark.filterwarnings("ignore:.*warn_independent_sampling:FutureWarning")
def test_proposals_are_those_of_optuna_where_parameters_come_and_go() -> None:
    names = [("LR", "MAX_STEPS", "layout"), ("LR", "layout"), ("LR", "MAX_STEPS")]

    def asked(kind: Kind) -> list[Any]:
        sampler = kind(seed=4, n_startup_trials=5, multivariate=True, warn_independent_sampling=False)
        study = optuna.create_study(sampler=sampler)
        found = []
        for number in range(30):
            found.append(study.ask({name: SPACES["usual"][name] for name in names[number // 4 % 3]}))
            study.tell(found[-1], math.sin(number))
        return [trial.params for trial in found]

    assert asked(WarmTPESampler) == asked(TPESampler)


def test_two_processes_share_one_study(tmp_path: Any) -> None:
    """A trial that another process asked for and ended counts as in Optuna, whenever it ends."""

    def asked(kind: Kind) -> list[Any]:
        url = f"sqlite:///{tmp_path / kind.__name__}.db"
        optuna.create_study(storage=RDBStorage(url), study_name="s")
        here, there = (
            optuna.load_study(
                study_name="s",
                storage=RDBStorage(url),
                sampler=kind(seed=n, n_startup_trials=3, multivariate=True, constant_liar=True),
            )
            for n in (1, 2)
        )
        found, late = [], []
        for number in range(10):
            mine, other = here.ask(SPACES["usual"]), there.ask(SPACES["usual"])
            found += [mine.params, other.params]
            late.append(other)
            here.tell(mine, math.sin(number))
            if number % 3 == 2:
                there.tell(late.pop(0), math.cos(number))
        return found

    assert asked(WarmTPESampler) == asked(TPESampler)


def test_without_one_complete_trial_the_nearest_to_that_are_followed_as_by_optuna() -> None:
    def asked(kind: Kind) -> list[Any]:
        study = optuna.create_study(sampler=kind(seed=5, n_startup_trials=5, multivariate=True))
        found = []
        for number in range(30):
            trial = study.ask(SPACES["usual"])
            found.append(trial.params)
            if number % 10:
                trial.set_constraint("feasible", 1 + number % 7)
            study.tell(trial, state=TrialState.PRUNED)
        return found

    assert asked(WarmTPESampler) == asked(TPESampler)
