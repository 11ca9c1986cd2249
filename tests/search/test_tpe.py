"""Our TPE proposes what Optuna's does, and what it models of a long study stays as much."""

from __future__ import annotations

import math
import random
from typing import Any
from zlib import crc32

import numpy as np
import optuna
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.samplers._tpe._truncnorm import _log_gauss_mass
from optuna.samplers._tpe.parzen_estimator import _ParzenEstimator, _ParzenEstimatorParameters
from optuna.samplers._tpe.sampler import default_weights
from optuna.storages import RDBStorage
from optuna.trial import TrialState

from lora_tune.search.parzen import ParzenEstimator, log_mass
from lora_tune.search.tpe import NEWEST, WindowedTPESampler

Space = dict[str, BaseDistribution]

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

    def asked(kind: type[TPESampler]) -> list[Any]:
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

    def asked(kind: type[TPESampler]) -> list[Any]:
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


def test_of_a_long_study_the_best_and_the_newest_are_modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = WindowedTPESampler(seed=0, multivariate=True, constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    for number in range(NEWEST + 500):
        values = {"params": {"x": number / 2000}, "distributions": {"x": FloatDistribution(0, 1)}}
        study.add_trial(optuna.trial.create_trial(value=abs(number - 100) / 1000, **values))  # type: ignore[arg-type]
    open_ = study.ask({"x": FloatDistribution(0, 1)})
    seen: list[list[int]] = []
    build = sampler._build_parzen_estimator

    def watched(study: Any, space: Any, trials: list[Any], handle_below: bool) -> Any:
        seen.append([t.number for t in trials])
        return build(study, space, trials, handle_below)

    monkeypatch.setattr(sampler, "_build_parzen_estimator", watched)
    study.ask({"x": FloatDistribution(0, 1)})
    good, others = seen
    assert good == [*range(88, 113)], "the 25 best, though they are old"
    assert others == [*range(500, NEWEST + 500), open_.number], "the newest, and the open one"


def test_asking_reads_the_trials_once(monkeypatch: pytest.MonkeyPatch) -> None:
    study = optuna.create_study(sampler=WindowedTPESampler(seed=0, n_startup_trials=2, multivariate=True))
    for number in range(5):
        study.tell(study.ask(SPACES["usual"]), number)
    whole = study._storage.get_all_trials
    copies: list[None] = []

    def watched(study_id: int, deepcopy: bool = True, states: Any = None) -> Any:
        copies.extend([None] if states is None else [])
        return whole(study_id, deepcopy, states)

    monkeypatch.setattr(study._storage, "get_all_trials", watched)
    study.ask(SPACES["usual"])
    assert len(copies) == 1


def test_without_one_complete_trial_the_nearest_to_that_are_followed_as_by_optuna() -> None:
    def asked(kind: type[TPESampler]) -> list[Any]:
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


@given(a=st.floats(-60, 60), width=st.floats(1e-4, 60))
def test_masses_are_those_of_optuna(a: float, width: float) -> None:
    low, high = np.array([a]), np.array([a + width])
    assert log_mass(low, high) == pytest.approx(_log_gauss_mass(low, high), rel=1e-6)


@settings(max_examples=40, deadline=None)
@example(seed=0, count=0, width=1e-3)
@given(seed=st.integers(0, 2**31), count=st.integers(0, 40), width=st.floats(1e-6, 1.0))
def test_densities_are_those_of_optuna(seed: int, count: int, width: float) -> None:
    """Also where all trials lie together in a corner, so that candidates are far in a kernel's tail."""
    rng = np.random.default_rng(seed)
    space: Space = {
        "f": FloatDistribution(0, 1), "log": FloatDistribution(1e-6, 1, log=True), "i": IntDistribution(0, 100_000),
        "step": FloatDistribution(0, 1, step=1e-3), "intlog": IntDistribution(1, 100_000, log=True),
        "c": CategoricalDistribution(range(5)),
    }  # fmt: skip

    def drawn(n: int, width: float) -> dict[str, Any]:
        u = width * rng.random((n, 6))
        return {
            "f": u[:, 0], "log": 10 ** (-6 * (1 - u[:, 1])), "i": np.round(100_000 * u[:, 2]),
            "step": np.round(u[:, 3], 3), "intlog": np.round(10 ** (5 * u[:, 4])), "c": np.floor(4.99 * u[:, 5]),
        }  # fmt: skip

    parameters = _ParzenEstimatorParameters(1.0, True, False, default_weights, True)
    trials, candidates = drawn(count, width), drawn(24, 1.0)
    ours = ParzenEstimator(trials, space, parameters).log_pdf(candidates)
    theirs = _ParzenEstimator(trials, space, parameters).log_pdf(candidates)
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)
