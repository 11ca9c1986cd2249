"""Our TPE proposes what Optuna's does, and what it models of a long study stays as much."""

from __future__ import annotations

import copy
import math
import random
from typing import Any
from zlib import crc32

import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState

from lora_tune.search import tpe
from lora_tune.search.tpe import GOOD, NEWEST, History, WindowedTPESampler, as_range, nearest

Space = dict[str, BaseDistribution]
Kind = type[TPESampler] | type[WindowedTPESampler]

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
    ours = proposals(WindowedTPESampler(**options), SPACES[name], seed, 50, direction)
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

    assert asked(WindowedTPESampler) == asked(TPESampler)


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

    assert asked(WindowedTPESampler) == asked(TPESampler)


def test_of_a_long_study_the_best_and_the_newest_are_modelled() -> None:
    study = long_study(WindowedTPESampler(seed=0, multivariate=True, constant_liar=True))
    open_ = study.ask({"x": FloatDistribution(0, 1)})
    shown = [t.number for t in History().modelled(study.get_trials(deepcopy=False), study.direction)]
    best = range(100 - GOOD // 2, 100 + GOOD // 2 + 1)
    assert shown == [*best, *range(500, NEWEST + 500), open_.number], "the best, though they are old, and the newest"


def test_the_best_of_a_long_study_draw_its_proposals_and_asking_changes_nothing_else() -> None:
    study = long_study(WindowedTPESampler(seed=0, multivariate=True, constant_liar=True))
    before = study.get_trials()
    for _ in range(20):
        study.tell(study.ask({"x": FloatDistribution(0, 1)}), 1.0)
    asked = [trial.params["x"] for trial in study.trials[len(before) :]]
    assert sum(x < 0.2 for x in asked) > 15, "the 25 best lie at 0.05, the newest 300 above 0.25"
    assert study.get_trials()[: len(before)] == before


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_the_best_are_complete_ones_then_pruned_ones_then_those_that_break_a_constraint(direction: str) -> None:
    sign = 1 if direction == "minimize" else -1
    study = optuna.create_study(direction=direction)
    for _ in range(GOOD - 3):
        study.tell(study.ask(), 0.0)
    for late, loss in ((7, 1.0), (7, 2.0), (3, 0.5)):
        trial = study.ask()
        trial.report(sign * loss, late)
        study.tell(trial, state=TrialState.PRUNED)
    for _ in range(2):
        trial = study.ask()
        trial.set_constraint("feasible", 1.0)
        study.tell(trial, -9.0 * sign)
    for _ in range(NEWEST):
        study.tell(study.ask(), state=TrialState.PRUNED)
    shown = [t.number for t in History().modelled(study.get_trials(deepcopy=False), study.direction)]
    assert shown[:-NEWEST] == [*range(GOOD)], "all but the newest, and not the infeasible"


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_a_study_that_grows_is_modelled_as_if_read_for_the_first_time(direction: str) -> None:
    chance, kept = random.Random(7), History()
    study = optuna.create_study(direction=direction, sampler=optuna.samplers.RandomSampler(seed=7))
    running: list[optuna.Trial] = []
    for _ in range(NEWEST + 150):
        running.append(study.ask({"LR": FloatDistribution(0, 1)}))
        if chance.random() < 0.9:
            end(study, running.pop(chance.randrange(len(running))), chance)
        trials = study.get_trials(deepcopy=False)
        assert kept.modelled(trials, study.direction) == History().modelled(trials, study.direction)
    other = long_study(optuna.samplers.RandomSampler()).get_trials(deepcopy=False)
    for trials in (other, other[:-50], copy.deepcopy(other)):
        for towards in (StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE):
            assert kept.modelled(trials, towards) == History().modelled(trials, towards), "of another study"


def test_each_finished_trial_is_ranked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked: list[int] = []
    rank = tpe._rank
    monkeypatch.setattr(tpe, "_rank", lambda trial, direction: (ranked.append(trial.number), rank(trial, direction))[1])
    study = long_study(WindowedTPESampler(seed=0, multivariate=True, constant_liar=True))
    count = len(study.get_trials(deepcopy=False))
    for _ in range(3):
        study.tell(study.ask({"x": FloatDistribution(0, 1)}), 1.0)
    assert sorted(ranked) == [*range(count + 2)], "the third has finished after the last proposal"


FINE: Space = {
    "MAX_STEPS": IntDistribution(100, 2500), "WARMUP": IntDistribution(0, 500, step=5),
    "GBS": IntDistribution(200, 4000, log=True), "dropout": FloatDistribution(0, 0.2, step=0.001),
}  # fmt: skip
COARSE: Space = {
    "rank": IntDistribution(1, 64), "alpha": IntDistribution(1, 4096, log=True), "LR": FloatDistribution(1e-5, 1e-2),
    "decay": FloatDistribution(0, 1, step=0.1), "layout": CategoricalDistribution(["tp1", "tp4"]),
}  # fmt: skip


def test_of_a_long_study_fine_grids_are_ranges_to_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna computes the probability of each cell of a grid one number at a time, a density at once."""
    space, seen = FINE | COARSE, {}
    sampler = WindowedTPESampler(seed=3, multivariate=True, constant_liar=True)
    relative = sampler._tpe.sample_relative

    def noting(study: optuna.Study, trial: Any, ranges: Space) -> dict[str, Any]:
        seen.update(ranges)
        return relative(study, trial, ranges)

    monkeypatch.setattr(sampler._tpe, "sample_relative", noting)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    for _ in range(NEWEST + 1):
        trial = study.ask(space)
        study.tell(trial, abs(trial.params["MAX_STEPS"] - 700) / 1000)
    study.sampler = sampler
    asked = [study.ask(space).params for _ in range(20)]
    assert seen == COARSE | {name: as_range(grid) for name, grid in FINE.items()}
    for params in asked:
        for name, value in params.items():
            assert space[name]._contains(space[name].to_internal_repr(value)), (name, value)
    assert all(isinstance(params["MAX_STEPS"], int) for params in asked)
    assert sum(abs(params["MAX_STEPS"] - 700) < 300 for params in asked) > 15, "it learns as much"


def test_proposals_with_ranges_are_nearly_always_those_with_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=5))
    for _ in range(NEWEST + 1):
        trial = study.ask(SPACES["usual"])
        study.tell(trial, abs(trial.params["MAX_STEPS"] - 700) / 1000 + abs(math.log(trial.params["LR"] / 4e-4)))
    trials = study.get_trials(deepcopy=False)

    def first(seed: int) -> dict[str, Any]:
        fresh = optuna.create_study(sampler=WindowedTPESampler(seed=seed, multivariate=True, constant_liar=True))
        fresh.add_trials(trials)
        return fresh.ask(SPACES["usual"]).params

    ranges = [first(seed) for seed in range(20)]
    monkeypatch.setattr(tpe, "as_range", lambda grid: grid)
    assert sum(first(seed) == proposed for seed, proposed in enumerate(ranges)) >= 18


@pytest.mark.parametrize("name", FINE)
def test_every_value_of_a_grid_has_its_part_of_the_range(name: str) -> None:
    grid = FINE[name]
    assert isinstance(grid, IntDistribution | FloatDistribution)
    assert grid.step
    range_ = as_range(grid)
    assert isinstance(range_, FloatDistribution)
    assert (nearest(range_.low, grid), nearest(range_.high, grid)) == (grid.low, grid.high)
    middle = grid.low + 7 * grid.step
    for off in (-0.49, 0.0, 0.49):
        assert nearest(middle + off * grid.step, grid) == pytest.approx(middle)


def long_study(sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    """``NEWEST`` + 500 trials at rising x, the best of which is the 100th."""
    study = optuna.create_study(sampler=sampler)
    for number in range(NEWEST + 500):
        values = {"params": {"x": number / 2000}, "distributions": {"x": FloatDistribution(0, 1)}}
        study.add_trial(optuna.trial.create_trial(value=abs(number - 100) / 1000, **values))  # type: ignore[arg-type]
    return study


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

    assert asked(WindowedTPESampler) == asked(TPESampler)
