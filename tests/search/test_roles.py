"""What a parameter decides, as a study says it; and published results in studies that tune more than they name."""

from __future__ import annotations

import math
from pathlib import Path

import optuna
import pytest
from click.testing import CliRunner
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from lora_tune.base.errors import StudyError
from lora_tune.cli import commands
from lora_tune.config.study import Study, parse_study, study_changes
from lora_tune.config.tables import replaced_in
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.model import ASSUMED_SD, filled_in
from lora_tune.search.grey_box.sampler import GreyBoxSampler
from lora_tune.search.observations import readings
from lora_tune.search.optuna_samplers import WarmTPESampler
from lora_tune.search.published import CLOSED_DIVISION, llama2_70b_lora
from lora_tune.search.samplers import make_sampler
from lora_tune.search.throughput import ThroughputSampler
from tests.conftest import REPOSITORY
from tests.fakes import command_study, write_study


def study(role: str = "", score: str = "time_to_target") -> Study:
    """A study of LR and STEPS, that names no sampler of its own, with another parameter."""
    knob = f'HIDDEN = {{ type = "int", low = 64, high = 512{role} }}\n'
    text = command_study(trials=5).replace("[space]\n", "[space]\n" + knob)
    text = text.replace('sampler = "random"', 'sampler = "auto"')
    return parse_study(text.replace("[objective]\n", f'[objective]\nscore = "{score}"\n'), Path("x.toml"))


def test_a_study_states_what_a_parameter_decides() -> None:
    assert study().search_space.roles() == {}
    assert study(', role = "both"').search_space.roles() == {"HIDDEN": "both"}


def test_a_role_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(StudyError, match="'speed', 'convergence', 'both', 'switch' or 'precision'"):
        study(', role = "fast"')


@pytest.mark.parametrize(
    ("role", "speed", "convergence"), [("speed", True, False), ("convergence", False, True), ("both", True, True)]
)
def test_a_stated_role_goes_before_the_guess_from_the_name(role: str, speed: bool, convergence: bool) -> None:
    c = Coordinates(distributions={"NCCL_ALGO": CategoricalDistribution(("ring", "tree"))}, roles={"NCCL_ALGO": role})
    assert ("NCCL_ALGO" in c.speed_names, "NCCL_ALGO" in c.convergence_names) == (speed, convergence)


def test_throughput_has_a_search_of_its_own() -> None:
    fastest = study(score="throughput")
    assert isinstance(make_sampler(fastest), ThroughputSampler)


def test_a_script_of_which_nothing_is_known_is_searched_by_tpe_unless_the_sweep_ends_by_an_expected_gain() -> None:
    assert isinstance(make_sampler(study()), WarmTPESampler)
    assert isinstance(make_sampler(study(', role = "both"')), WarmTPESampler)
    unknown = study()
    stopping = unknown.model_copy(update={"budget": unknown.budget.model_copy(update={"stop_below": 0.002})})
    assert isinstance(make_sampler(stopping), GreyBoxSampler)


def test_a_study_that_names_the_portfolio_is_read_as_one_of_today_and_says_so() -> None:
    """Records of earlier sweeps hold it: they are read too, and the file is no other study once it is mended."""
    text = command_study(trials=5).replace('sampler = "random"', 'sampler = "portfolio"')
    old = parse_study(text, Path("x.toml"))
    mended = parse_study(text.replace("portfolio", "auto"), Path("x.toml"))
    assert old.search.sampler == "auto"
    assert study_changes(old, mended) == []
    assert replaced_in(text) == (
        'search.sampler: "portfolio" is gone and read as "auto"; write that, or remove the line'
    )
    assert replaced_in(text.replace("portfolio", "tpe")) == ""


def test_a_sweep_warns_of_the_sampler_that_is_gone(tmp_path: Path) -> None:
    study = write_study(tmp_path, command_study(trials=5).replace('sampler = "random"', 'sampler = "portfolio"'))
    done = CliRunner().invoke(commands.sweep, ["--study", str(study), "--dry-run"])
    assert 'warning: search.sampler: "portfolio" is gone and read as "auto"' in done.output


def test_trials_of_several_sizes_have_no_expected_gain_of_a_time() -> None:
    text = command_study(trials=5, stop_below=0.002).replace('sampler = "random"\n', "")
    text = text.replace("[space]\n", '[space]\nNODES = { type = "categorical", choices = [1, 2] }\n')
    with pytest.raises(StudyError, match="no search for a time knows its expected gain where NODES varies"):
        parse_study(text, Path("x.toml"))


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


def stated(line: str, sampler: str = "auto", text: str = command_study(trials=5)) -> Study:
    return parse_study(text.replace('sampler = "random"', f'sampler = "{sampler}"\n{line}'), Path("x.toml"))


def test_a_stated_rate_of_full_fine_tuning_moves_the_first_proposals() -> None:
    """A grey box that knows of it asks near ten times that first; it is asked even without layouts."""
    study = stated("full_fine_tuning_lr = 1e-4", sampler="grey_box")
    sampler = make_sampler(study)
    assert isinstance(sampler, GreyBoxSampler)
    assert sampler.coordinates(study.search_space.distributions()).full_fine_tuning_lr == 1e-4
    told = make_sampler(stated("full_fine_tuning_lr = 1e-4"))
    assert isinstance(told, GreyBoxSampler)


@pytest.mark.parametrize(
    ("line", "sampler", "words"),
    [
        ("full_fine_tuning_lr = 0", "auto", "full_fine_tuning_lr"),
        ("full_fine_tuning_lr = 2", "auto", "full_fine_tuning_lr"),
        ("full_fine_tuning_lr = 1e-5", "tpe", "this sampler has no use for it"),
    ],
)
def test_a_stated_rate_without_effect_is_refused(line: str, sampler: str, words: str) -> None:
    with pytest.raises(StudyError, match=words):
        stated(line, sampler)


def test_a_stated_rate_is_refused_where_published_results_say_more_or_no_rate_is_tuned() -> None:
    line, fixed = "full_fine_tuning_lr = 1e-5", command_study(trials=5).replace("\nLR = {", "\nRATE = {")
    with pytest.raises(StudyError, match="no LR or LEARNING_RATE is tuned"):
        stated(line, text=fixed)
    closed = (REPOSITORY / "studies" / "h200.toml").read_text().replace("[search]", f"[search]\n{line}")
    with pytest.raises(StudyError, match="starts from published results"):
        parse_study(closed, REPOSITORY / "studies" / "h200.toml")


def test_of_published_results_those_in_fp4_say_when_they_were_healed() -> None:
    healed = [o for o in llama2_70b_lora() if "HEALING_ITER" in o.values]
    assert {o.source for o in healed} == {
        "v5.1 NVIDIA tyche_ngpu8_ngc25.09_nemo", "v5.1 Nebius nebius_b200_n2", "v6.0 AMD MI355X_EPYC_9575F_primus",
        "v6.0 Cisco 1xC880A_M8-8xB300-SXM-288GB", "v6.0 GigaComputing G893-ZX1-AAX4_pytorch",
        "v6.0 MiTAC 8xMI350X_2xEPYC_9575F_SUTA", "v6.0 NVIDIA theia_ngpu8_ngc26.04_nemo",
    }  # fmt: skip
    amds = {o.values["HEALING_ITER"] for o in healed if "MI35" in o.source or "AAX4" in o.source}
    assert amds == {340}
    assert {o.values["HEALING_ITER"] for o in healed} == {340, 350}
    assert {o.values["MAX_STEPS"] for o in healed if o.source.startswith("v6.0")} == {550}


def _empty() -> object:
    import optuna

    return optuna.create_study()
