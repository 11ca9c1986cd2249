"""Memory and speed from physics: against measured peaks and deaths, and in the search that uses them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest

from benchmarks.laboratory.ours import OtherStack
from benchmarks.laboratory.problems import PUBLISHED_H100, h100_wide
from benchmarks.layout_replay import RECORDS, recorded, replay
from lora_tune.base.llama import SHAPES
from lora_tune.config.layout import Layout
from lora_tune.config.study import load_study, parse_study
from lora_tune.search import physics
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.memory import MemoryModel, fit
from lora_tune.search.grey_box.model import SearchModel
from lora_tune.search.grey_box.model import learn as learn_grey_box
from lora_tune.search.grey_box.objective import Goal
from lora_tune.search.grey_box.sampler import GreyBoxSampler
from lora_tune.search.observations import Observation
from lora_tune.search.physics import far_over_memory, physics_of
from lora_tune.search.samplers import _time_to_target, make_sampler
from lora_tune_simulation.machine import Degrees

TWO = RECORDS / "nemo_h200x2"
PROBES = json.loads((RECORDS / "nemo_70b_probes_h200x4" / "probes.json").read_text(encoding="utf-8"))["records"]
SEVENTY = SHAPES["70b"]


def step(**values) -> physics.Step:
    return physics.step_of(SEVENTY, 8192, values)


@pytest.mark.parametrize("probe", PROBES, ids=[p["name"] for p in PROBES])
def test_peaks_are_near_those_measured_on_four_gpus(probe) -> None:
    values = probe["variables"]
    layout = Layout(tp=values["TP"], cp=values.get("CP", 1), sp=values.get("SP", 0), minibs=4)
    assert physics.gib(step(**values), layout, 4) == pytest.approx(probe["gib"], rel=0.05)


def test_which_trials_of_the_recorded_sweep_died_follows_from_physics_alone() -> None:
    study = load_study(TWO / "study.toml")
    known = physics_of(study)
    assert known is not None
    for trial in recorded(TWO, study):
        assert (known.gib(trial.values) > known.limit) == trial.infeasible, trial.number


def test_what_saves_memory_and_what_costs_it() -> None:
    one = Layout(tp=1, minibs=4)
    plain = physics.gib(step(), one, 8)
    for less in (
        physics.gib(step(), Layout(tp=2, minibs=4), 8),
        physics.gib(step(), Layout(tp=1, cp=2, minibs=4), 8),
        physics.gib(step(), Layout(tp=1, pp=2, minibs=4), 8),
        physics.gib(step(RECOMPUTE_GRANULARITY="full", RECOMPUTE_METHOD="block", RECOMPUTE_NUM_LAYERS=40), one, 8),
    ):
        assert less < plain
    assert physics.gib(step(), Layout(tp=1, minibs=4, mbs=2), 8) > plain
    assert physics.gib(step(), Layout(tp=2, sp=1, minibs=4), 8) < physics.gib(step(), Layout(tp=2, minibs=4), 8)
    assert physics.gib(step(FP8=1, FP8_PARAMS=1), one, 8) < physics.gib(step(FP8=1), one, 8)


def test_trials_correct_physics() -> None:
    """A peak that was measured 20% above it moves all layouts; a death and a survival bound it."""
    gib, at = np.array([[100.0], [130.0]]), np.array([[110.0], [125.0]])
    none = np.array([math.nan])

    def belief(x: np.ndarray, died: list[bool], measured: np.ndarray) -> MemoryModel:
        return fit(x, died, (), limit=140.0, level_sd=physics.LEVEL_SD, measured=measured)

    before = belief(np.empty((0, 1)), [], np.empty(0))
    assert (before.chance(at)[0] < 0.2).all()
    after = belief(gib[:1], [False], np.array([120.0]))
    assert after.chance(at)[0][0] < 0.1 < 0.9 < after.chance(at)[0][1]
    died = belief(gib[1:], [True], none)
    assert died.chance(at)[0][1] > 2 * before.chance(at)[0][1]


def test_a_peak_that_a_trial_printed_moves_the_risk_of_the_others() -> None:
    """Physics finds room for both; the first one's log says that this stack holds a third more."""
    study = load_study(TWO / "study.toml")
    known = physics_of(study)
    assert known is not None
    lived = [o for o in recorded(TWO, study) if not o.infeasible]
    small, large = (f(lived, key=lambda o: known.gib(o.values)) for f in (min, max))
    coordinates = Coordinates(
        distributions=study.search_space.distributions(), gpus=2, roles=dict.fromkeys(small.values, "speed")
    )

    def risk(**changes) -> float:
        seen = replace(small, attributes={}, **changes)
        chance, _ = learn_grey_box(coordinates, Goal(), [seen], needs=known).memory.chance([large.values])
        return float(chance[0])

    plain, tight = risk(peak_gib=math.nan), risk(peak_gib=1.33 * known.gib(small.values))
    assert tight > plain + 0.2
    died = {"infeasible": True, "samples_per_second": math.nan}
    assert risk(peak_gib=61_000.0) == plain, "a peak in MiB, as other programs print it, is none in GiB"
    assert risk(peak_gib=1.0, **died) == risk(peak_gib=math.nan, **died), "what was printed before a death says nothing"


def test_the_replayed_sweep_proposes_nothing_that_dies_and_finds_the_fastest_early() -> None:
    study = load_study(TWO / "study.toml")
    world = recorded(TWO, study)
    told = replay(study, world, physics_of(study))
    fastest = max(o.samples_per_second for o in world if not o.infeasible)
    assert sum(o.infeasible for o in told) < 0.2 * len(told)
    assert [o.samples_per_second for o in told].index(fastest) < 12
    assert len(told) == sum(not o.infeasible for o in world), "and misses nothing that fits"


def test_the_first_proposals_of_the_four_gpu_study_fit_by_physics() -> None:
    study = load_study(Path(__file__).resolve().parents[2] / "studies" / "nemo_h200x4.toml")
    known = physics_of(study)
    assert known is not None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    made = optuna.create_study(direction="maximize", sampler=make_sampler(study))
    for _ in range(4):
        trial = made.ask(study.search_space.distributions())
        assert known.gib(trial.params) < known.limit
        trial.set_user_attr("samples_per_second", 1.0)
        made.tell(trial, 1.0)


def test_a_death_far_over_the_limit_is_certain_and_one_at_the_limit_is_not() -> None:
    study = load_study(TWO / "study.toml")
    points = {o.number: study.search_space.resolve(o.values) for o in recorded(TWO, study)}
    assert far_over_memory(study, points[10]), "268 GiB of weights and activations on 140"
    assert not far_over_memory(study, points[23]), "153 GiB by physics, which may be 10% off"


def test_of_other_models_and_machines_physics_says_nothing() -> None:
    text = (TWO / "study.toml").read_text(encoding="utf-8")
    for changed in (text.replace('LLAMA = "70b"', 'LLAMA = "mine"'), text.replace('system = "H200"', 'system = "X"')):
        assert physics_of(parse_study(changed, TWO / "study.toml")) is None


class TestInTheGreyBox:
    """The memory of layouts in a search for the time to the target, by physics of a stack that is not ours."""

    def test_memory_by_physics_is_in_proportion_to_the_simulated_machine_that_stands_on_public_results(self) -> None:
        problem = h100_wide(101)
        needs, machine = OtherStack(problem.space, 79.1), problem.surface.machine
        points = [{"layout": text} for text in problem.distributions["layout"].choices]
        there = [machine.memory(Degrees.of({**problem.space.resolve({**PUBLISHED_H100, **p})})) for p in points]
        assert np.corrcoef(np.log([needs.gib(p) for p in points]), np.log(there))[0, 1] > 0.95

    def test_one_survival_makes_room_for_what_needs_less_and_one_death_closes_what_needs_more(self) -> None:
        small, middle, large = (
            {**PUBLISHED_H100, "layout": layout}
            for layout in ("tp8 pp1 cp1 minibs8 mbs1", "tp4 pp1 cp1 minibs4 mbs1", "tp2 pp1 cp1 minibs2 mbs1")
        )
        lived = Observation(number=0, values=middle, samples_per_second=2.0)
        died = Observation(number=1, values=middle, infeasible=True)
        before, after_life, after_death = (self.risks([small, large], seen) for seen in ([], [lived], [died]))
        assert after_life[0] < before[0]
        assert after_life[0] < 0.1
        assert after_death[1] > before[1]
        assert after_death[1] > 0.95

    def test_a_layout_keeps_its_own_record(self) -> None:
        """Physics says that it does not fit; it fitted four times."""
        large = {**PUBLISHED_H100, "layout": "tp1 pp1 cp1 minibs1 mbs1"}
        lived = [Observation(number=n, values=large, samples_per_second=2.0) for n in range(4)]
        assert self.risks([large], lived)[0] < 0.05

    def test_draws_of_death_rates_average_to_the_risk(self) -> None:
        points = [{**PUBLISHED_H100, "layout": text} for text in list(self.layouts())[:20]]
        model = self.model([Observation(number=0, values=PUBLISHED_H100, samples_per_second=2.0)])
        drawn = model.memory.draws(points, np.random.default_rng(1), 4000).mean(axis=1)
        assert drawn == pytest.approx(model.memory.chance(points)[0], abs=0.03)

    def layouts(self) -> list[str]:
        return list(h100_wide(0).distributions["layout"].choices)

    def model(self, seen: list[Observation]) -> SearchModel:
        problem = h100_wide(0)
        return learn_grey_box(problem.coordinates, Goal(), seen, needs=OtherStack(problem.space, 79.1))

    def risks(self, points, seen: list[Observation]) -> np.ndarray:
        return self.model(seen).memory.chance(points)[0]

    def test_a_study_of_our_own_recipes_that_wants_the_time_to_the_target_begins_with_physics(self) -> None:
        """A layout that physics puts far over the GPU's memory is not tried while others are left."""
        text = (TWO / "study.toml").read_text(encoding="utf-8")
        study = parse_study(text.replace('score = "throughput"', "target = 0.925"), TWO / "study.toml")
        sampler = _time_to_target(study, tuple, GreyBoxSampler)
        space = study.search_space.distributions()
        model = sampler.model(space, [])
        known, points = physics_of(study), [o.values for o in recorded(TWO, study)]
        assert known is not None
        risks = model.memory.chance(points)[0]
        over = np.array([known.gib(p) / known.limit for p in points])
        assert (risks[over > 1.3] > 0.95).all()
        assert (risks[over < 0.85] < 0.1).all()
