"""The lowest loss of a short study is searched by Optuna's Gaussian process, with numbers in order."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

from lora_tune.config.study import Study, parse_study
from lora_tune.search.samplers import make_sampler

pytest.importorskip("torch")
from lora_tune.search import optuna_samplers as gp
from lora_tune.search.optuna_samplers import OrderedGPSampler, WarmTPESampler

BATCHES = (4, 64, 8, 16, 1024, 32, 128, 512, 256)
SPACE = {
    "batch": CategoricalDistribution(BATCHES),
    "lr": FloatDistribution(1e-5, 1e-1, log=True),
    "optimizer": CategoricalDistribution(("adam", "lion")),
}
TEXT = """
[workload]
kind = "command"
argv = ["bash", "train.sh"]
[site]
launcher = "local"
[budget]
trials = 20
[space]
LR = { type = "float", low = 1e-5, high = 1e-2, log = true }
[objective]
"""


def loss(values: dict[str, Any]) -> float:
    bowl = (math.log2(values["batch"]) - 7) ** 2 / 20 + (math.log10(values["lr"]) + 3) ** 2
    return 1 + bowl + (0.1 if values["optimizer"] == "lion" else 0.0)


def searched(sampler: optuna.samplers.BaseSampler, trials: int, direction: str = "minimize") -> optuna.Study:
    study = optuna.create_study(sampler=sampler, direction=direction)
    for _ in range(trials):
        trial = study.ask(SPACE)
        study.tell(trial, loss(trial.params) * (1 if direction == "minimize" else -1))
    return study


def study_of(objective: str) -> Study:
    return parse_study(TEXT + objective, Path("study.toml"))


@pytest.mark.parametrize(("direction", "trials", "most"), [("minimize", 15, 1.06), ("maximize", 10, 1.2)])
def test_a_bowl_over_a_list_of_numbers_is_soon_found(direction: str, trials: int, most: float) -> None:
    best = searched(OrderedGPSampler(seed=1, n_startup_trials=5), trials, direction).best_trial
    assert loss(best.params) < most


def test_what_was_stopped_died_or_blew_up_is_kept_away_from() -> None:
    """Half of the range blows up, is stopped or does not fit; what is left is searched as if it were all."""
    study = optuna.create_study(sampler=OrderedGPSampler(seed=2, n_startup_trials=5))
    lost = 0
    for number in range(16):
        trial = study.ask(SPACE)
        if trial.params["lr"] < 1e-3 * 1.2:
            study.tell(trial, loss(trial.params))
            continue
        lost += number >= 8
        if number % 3 == 0:
            study.tell(trial, 1e30)
        elif number % 3 == 1:
            trial.report(9.0, 1)
            study.tell(trial, state=TrialState.PRUNED)
        else:
            trial.set_constraint("feasible", 1.0)
            study.tell(trial, state=TrialState.PRUNED)
    assert loss(study.best_params) < 1.1
    assert lost <= 5


def test_open_trials_are_not_proposed_again() -> None:
    study = searched(OrderedGPSampler(seed=3, n_startup_trials=5), 8)
    asked = [tuple(study.ask(SPACE).params.values()) for _ in range(4)]
    assert len(set(asked)) == 4


def test_a_long_study_is_left_to_the_other_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gp, "MOST", 8)
    later = WarmTPESampler(seed=4, n_startup_trials=0, multivariate=True)
    study = searched(OrderedGPSampler(seed=4, n_startup_trials=5, later=later), 9)
    monkeypatch.setattr(gp.GPSampler, "sample_relative", None)  # whoever calls it fails
    assert study.ask(SPACE).params.keys() == SPACE.keys()


def test_the_lowest_loss_gets_it_where_torch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    objectives = ('metric = "eval_loss"', "target = 0.5", 'target = 0.5\nscore = "node_hours"')
    lowest, timed, hours = map(study_of, objectives)
    assert isinstance(make_sampler(lowest), OrderedGPSampler)
    assert not isinstance(make_sampler(timed), OrderedGPSampler)
    assert not isinstance(make_sampler(hours), OrderedGPSampler)
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else known(name))
    assert isinstance(make_sampler(lowest), WarmTPESampler)


def test_the_first_proposals_do_not_load_torch() -> None:
    code = f"""
import pathlib, sys, optuna
from lora_tune.config.study import parse_study
from lora_tune.search.samplers import make_sampler
study = parse_study({TEXT + 'metric = "eval_loss"'!r}, pathlib.Path("study.toml"))
asked = optuna.create_study(sampler=make_sampler(study))
asked.tell(asked.ask(study.search_space.distributions()), 1.0)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
