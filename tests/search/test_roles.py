"""What a parameter decides, as a study says it; and published results in studies that tune more than they name."""

from __future__ import annotations

import math
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from lora_tune.base.errors import StudyError
from lora_tune.config.study import Study, parse_study
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.sampler import GreyBoxSampler
from lora_tune.search.observations import readings
from lora_tune.search.optuna_trials import ASSUMED_SD, filled_in
from lora_tune.search.portfolio import PortfolioSampler
from lora_tune.search.published import CLOSED_DIVISION, llama2_70b_lora
from lora_tune.search.samplers import make_sampler
from lora_tune.search.throughput import ThroughputSampler
from tests.fakes import command_study


def study(role: str = "", score: str = "time_to_target") -> Study:
    """A study of LR and STEPS, searched by the portfolio, with another parameter."""
    knob = f'HIDDEN = {{ type = "int", low = 64, high = 512{role} }}\n'
    text = command_study(trials=5).replace("[space]\n", "[space]\n" + knob)
    text = text.replace('sampler = "random"', 'sampler = "portfolio"')
    return parse_study(text.replace("[objective]\n", f'[objective]\nscore = "{score}"\n'), Path("x.toml"))


def test_a_study_states_what_a_parameter_decides() -> None:
    assert study().search_space.roles() == {}
    assert study(', role = "both"').search_space.roles() == {"HIDDEN": "both"}


def test_a_role_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(StudyError, match="'speed', 'convergence' or 'both'"):
        study(', role = "fast"')


@pytest.mark.parametrize(
    ("role", "speed", "convergence"), [("speed", True, False), ("convergence", False, True), ("both", True, True)]
)
def test_a_stated_role_goes_before_the_guess_from_the_name(role: str, speed: bool, convergence: bool) -> None:
    c = Coordinates(distributions={"NCCL_ALGO": CategoricalDistribution(("ring", "tree"))}, roles={"NCCL_ALGO": role})
    assert ("NCCL_ALGO" in c.speed_names, "NCCL_ALGO" in c.convergence_names) == (speed, convergence)


def test_the_portfolio_searches_times_and_leaves_throughput_to_its_own_search() -> None:
    assert isinstance(make_sampler(study()), PortfolioSampler)
    fastest = study(score="throughput")
    assert isinstance(make_sampler(fastest), ThroughputSampler)


def test_one_more_parameter_keeps_all_published_results_at_the_published_value() -> None:
    space = {"LR": FloatDistribution(1e-4, 1e-3, log=True), "WEIGHT_DECAY": FloatDistribution(1e-6, 1e-1, log=True)}
    sampler = GreyBoxSampler(space, prior=llama2_70b_lora(), defaults=CLOSED_DIVISION)
    model = sampler.model(space, sampler.observations(_empty(), frozenset(space)))
    assert len(model.convergence.data.y) == len(llama2_70b_lora())
    assert {o.values["WEIGHT_DECAY"] for o in model.observations} == {1e-4}


def test_a_value_that_is_only_assumed_is_doubted_and_one_without_a_learning_rate_says_nothing() -> None:
    published = llama2_70b_lora()[0]
    wanted = {"MOMENTUM": FloatDistribution(0.0, 0.9), "SCHEDULE": CategoricalDistribution(("cosine", "linear"))}
    found = filled_in(published, wanted, {"MOMENTUM": 0.2})
    assert (found.values["MOMENTUM"], found.values["SCHEDULE"]) == (0.2, "cosine")
    assert readings([found], 0.925, [math.inf])[0].extended == pytest.approx(ASSUMED_SD)
    named = filled_in(published, {"MOMENTUM": wanted["MOMENTUM"]}, {"MOMENTUM": 0.2})
    assert readings([named], 0.925, [math.inf])[0].extended == 0
    assert "LEARNING_RATE" not in filled_in(published, {"LEARNING_RATE": wanted["MOMENTUM"]}, {}).values


@pytest.mark.parametrize("rates", [("4e-4", "6e-4"), (3.7e-4,), ("low", "high")], ids=str)
def test_learning_rates_as_categories_that_nobody_published_do_not_end_the_search(rates: tuple[str | float]) -> None:
    space = {"LR": CategoricalDistribution(rates), "WARMUP_STEPS": IntDistribution(0, 40)}
    sampler = GreyBoxSampler(space, prior=llama2_70b_lora(), defaults=CLOSED_DIVISION)
    assert optuna.create_study(sampler=sampler).ask(space).params["LR"] in rates


def test_of_published_results_those_in_fp4_say_when_they_were_healed() -> None:
    healed = [o for o in llama2_70b_lora() if "HEALING_ITER" in o.values]
    assert {o.source for o in healed} == {"v5.1 NVIDIA tyche_ngpu8_ngc25.09_nemo", "v5.1 Nebius nebius_b200_n2"}
    assert {o.values["HEALING_ITER"] for o in healed} == {350}


def _empty() -> object:
    import optuna

    return optuna.create_study()
