"""Studies of samples/s alone: the fastest point that fits into memory, found without asking twice for what died."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from benchmarks.laboratory.problems import h100_wide
from lora_tune.config.layout import parse_layout
from lora_tune.config.study import load_study
from lora_tune.search import throughput
from lora_tune.search.grey_box import memory
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.gaussian import positive_part
from lora_tune.search.samplers import make_sampler
from lora_tune.search.throughput import ThroughputSampler, best
from lora_tune_simulation.machine import Degrees

STUDIES = Path(__file__).resolve().parents[2] / "studies"
LAYOUTS = ("tp1 pp1 cp1 minibs4 mbs1", "tp1 pp1 cp2 minibs4 mbs1", "tp2 pp1 cp1 minibs4 mbs1 sp1")
SPACE: Mapping[str, BaseDistribution] = {
    "layout": CategoricalDistribution(LAYOUTS), "FP8_PARAMS": CategoricalDistribution([1, 0]),
    "FP8_DPA": CategoricalDistribution([0, 1]), "RECOMPUTE_NUM_LAYERS": IntDistribution(0, 40, step=20),
}  # fmt: skip


def point(layout: str, params: int = 1, dpa: int = 0, layers: int = 40) -> dict[str, Any]:
    return {"layout": layout, "FP8_PARAMS": params, "FP8_DPA": dpa, "RECOMPUTE_NUM_LAYERS": layers}


def add(study: optuna.Study, values: Mapping[str, Any], speed: float | None) -> None:
    """A finished trial of this speed; None: it died of memory."""
    facts = {"verdict": "infeasible"} if speed is None else {"verdict": "reached", "samples_per_second": speed}
    state = TrialState.PRUNED if speed is None else TrialState.COMPLETE
    study.add_trial(
        create_trial(params=dict(values), distributions=dict(SPACE), user_attrs=facts, state=state, value=speed)
    )


def new_study(seed: int = 0) -> optuna.Study:
    sampler = ThroughputSampler(SPACE, gpus=2, seed=seed)
    return optuna.create_study(direction="maximize", sampler=sampler)


@pytest.mark.parametrize("seed", range(5))
def test_what_needs_as_much_memory_as_a_point_that_died_is_not_proposed(seed: int) -> None:
    """TP1 CP2 died with every saving there is: with any fewer it dies as well, whatever its attention computes in."""
    study = new_study(seed)
    add(study, point(LAYOUTS[2]), 0.55)
    add(study, point(LAYOUTS[1]), None)
    for _ in range(5):
        trial = study.ask(dict(SPACE))
        assert trial.params["layout"] == LAYOUTS[2], trial.user_attrs["why"]
        add_result = 0.5 + 0.02 * trial.params["FP8_DPA"] - 0.001 * trial.params["RECOMPUTE_NUM_LAYERS"]
        trial.set_user_attr("samples_per_second", add_result)
        study.tell(trial, add_result)


def test_a_proposal_says_what_it_expects_and_risks() -> None:
    study = new_study()
    assert "nothing was measured yet" in study.ask(dict(SPACE)).user_attrs["why"]
    add(study, point(LAYOUTS[2]), 0.55)
    why = study.ask(dict(SPACE)).user_attrs["why"]
    assert "samples/s expected" in why
    assert "% risk of running out of memory" in why


def test_the_expected_gain_falls_as_the_space_becomes_known_and_ends_with_it() -> None:
    study = new_study()
    sampler = study.sampler
    assert isinstance(sampler, ThroughputSampler)
    assert sampler.expected_gain(study) is None, "nothing was measured"
    gains = []
    for _ in range(36):
        trial = study.ask(dict(SPACE))
        speed = 0.5 + 0.02 * trial.params["FP8_DPA"] - 0.001 * trial.params["RECOMPUTE_NUM_LAYERS"]
        trial.set_user_attr("samples_per_second", speed)
        trial.set_user_attr("node_hours", 0.02)
        study.tell(trial, speed)
        gains.append(sampler.expected_gain(study))
    assert gains[0] > 0.1
    assert max(gains[20:]) < 0.1 * gains[0]
    assert gains[-1] == 0.0, "every point was tried"


def test_no_point_is_tried_twice_and_an_exhausted_space_is_sampled_at_random() -> None:
    study = new_study()
    seen = []
    for _ in range(36):
        trial = study.ask(dict(SPACE))
        seen.append(tuple(trial.params.values()))
        trial.set_user_attr("samples_per_second", 1.0)
        study.tell(trial, 1.0)
    assert len(set(seen)) == 36, "the space holds 3 x 2 x 2 x 3 points"
    assert tuple(study.ask(dict(SPACE)).params.values()) in set(seen)


def test_open_trials_count_as_known() -> None:
    study = new_study()
    asked = [tuple(study.ask(dict(SPACE)).params.values()) for _ in range(8)]
    assert len(set(asked)) == 8


def test_points_are_valued_once_until_a_trial_begins_or_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study with ``stop_below`` asks for the gain at every look, and then for the proposal that it belongs to."""
    study = new_study()
    add(study, point(LAYOUTS[0]), 1.0)
    valued: list[int] = []
    monkeypatch.setattr(throughput, "best", lambda *known: valued.append(0) or best(*known))
    sampler = study.sampler
    assert isinstance(sampler, ThroughputSampler)
    assert sampler.expected_gain(study) == sampler.expected_gain(study)
    first = study.ask(dict(SPACE))
    assert len(valued) == 1
    sampler.expected_gain(study)
    assert len(valued) == 2
    first.set_user_attr("samples_per_second", 2.0)
    study.tell(first, 2.0)
    sampler.expected_gain(study)
    assert len(valued) == 3


@pytest.mark.parametrize("site", [0, 1, 2])
def test_the_fastest_layout_of_a_simulated_machine_is_found_in_twenty_of_113(site: int) -> None:
    problem = h100_wide(site)
    layouts, machine = problem.distributions["layout"], problem.surface.machine
    assert isinstance(layouts, CategoricalDistribution)
    study = optuna.create_study(direction="maximize", sampler=ThroughputSampler({"layout": layouts}, gpus=8, seed=site))
    fastest = 0.0
    for _ in range(20):
        trial = study.ask({"layout": layouts})
        degrees = Degrees.of(problem.space.resolve({**problem.space.corner(), **trial.params}))
        if machine.oom_probability(degrees) > 0.5:
            trial.set_user_attr("verdict", "infeasible")
            study.tell(trial, state=TrialState.PRUNED)
            continue
        fastest = max(fastest, machine.samples_per_second(degrees))
        trial.set_user_attr("samples_per_second", machine.samples_per_second(degrees))
        study.tell(trial, machine.samples_per_second(degrees))
    known = [Degrees.of(problem.space.resolve({**problem.space.corner(), "layout": c})) for c in layouts.choices]
    best = max(machine.samples_per_second(d) for d in known if machine.oom_probability(d) <= 0.5)
    assert fastest > 0.99 * best


SIZES = CategoricalDistribution([f"{text} nodes{n}" for text in LAYOUTS for n in (1, 2, 4, 8)])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_of_several_node_counts_the_fastest_is_found_and_small_ones_are_measured_first(seed: int) -> None:
    study = optuna.create_study(
        direction="maximize", sampler=ThroughputSampler({"layout": SIZES}, gpus=2, seed=seed)
    )  # fmt: skip
    asked = []
    for _ in range(7):  # of twelve
        trial = study.ask({"layout": SIZES})
        layout = parse_layout(trial.params["layout"])
        speed = (0.5 + 0.1 * (layout.cp == 2) - 0.1 * (layout.tp == 2)) * layout.nodes**0.9
        trial.set_user_attr("samples_per_second", speed)
        study.tell(trial, speed)
        asked.append(layout)
    assert asked[0].nodes == 1
    assert study.best_params["layout"] == f"{LAYOUTS[1]} nodes8"


def test_node_counts_are_learned_alike_as_a_parameter_and_as_part_of_the_layout() -> None:
    number = Coordinates(distributions={"NODES": IntDistribution(1, 8)}, roles={"NODES": "speed"})
    part = Coordinates(distributions={"layout": SIZES}, roles={"layout": "speed"})
    assert number.speed_labels == ("nodes",)
    assert part.speed_labels[-1] == "nodes"
    values = {"layout": f"{LAYOUTS[0]} nodes4"}
    assert number.speed_features({"NODES": 4}) == [2.0] == part.speed_features(values)[-1:]
    assert number.nodes({"NODES": 4}) == 4 == part.nodes(values)
    assert "nodes" not in part.memory_labels


def test_a_throughput_study_of_several_sizes_is_searched_by_it() -> None:
    study = load_study(STUDIES / "peft_fsdp.toml")
    assert study.search_space.varies_nodes
    assert isinstance(make_sampler(study), ThroughputSampler)


def test_throughput_studies_get_this_sampler_where_they_name_the_grey_box() -> None:
    assert isinstance(make_sampler(load_study(STUDIES / "nemo_h200x2.toml")), ThroughputSampler)
    assert not isinstance(make_sampler(load_study(STUDIES / "simulated_h100.toml")), ThroughputSampler)


@given(st.floats(-2, 2), st.floats(0.05, 2), st.floats(-2, 2))
def test_expected_improvement_is_the_mean_excess(mean: float, sd: float, known: float) -> None:
    draws = mean + sd * np.random.default_rng(0).standard_normal(40_000)
    excess = np.maximum(draws - known, 0)
    (found,) = positive_part(np.array([mean - known]), np.array([sd]))
    assert found == pytest.approx(excess.mean(), abs=5 * excess.std() / math.sqrt(len(draws)) + 1e-6)


POINTS = st.builds(
    point, st.sampled_from(LAYOUTS), st.sampled_from([0, 1]), st.sampled_from([0, 1]), st.sampled_from([0, 20, 40])
)


@given(POINTS)
def test_memory_needs_are_ordered_by_what_saves_memory(values: dict[str, Any]) -> None:
    c = Coordinates(distributions=SPACE, gpus=2, roles=dict.fromkeys(SPACE, "speed"))

    def needs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        rows = [np.array([c.memory_features(v)]) for v in (one, other)]
        (found,) = memory.needs_as_much(rows[0], rows[1], c.memory_labels)
        return bool(found)

    assert needs(values, values)
    assert needs({**values, "FP8_PARAMS": 0, "RECOMPUTE_NUM_LAYERS": 0}, values)
    assert needs({**values, "FP8_DPA": 1 - values["FP8_DPA"]}, values), "attention's precision hardly matters"
    if values["FP8_PARAMS"] == 0:
        assert not needs({**values, "FP8_PARAMS": 1}, values)
    if values["layout"] == LAYOUTS[0]:
        assert not needs({**values, "layout": LAYOUTS[1]}, values)
        assert needs(values, {**values, "layout": LAYOUTS[1]})
