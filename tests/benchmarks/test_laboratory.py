"""The laboratory: what it makes of its records, its problems, and the methods that know what a user knows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from optuna.distributions import FloatDistribution
from optuna.samplers import RandomSampler

from benchmarks.laboratory.arena import Result, Trace, play
from benchmarks.laboratory.catalogue import CATALOGUE
from benchmarks.laboratory.expert import AsPublished, TwoStages
from benchmarks.laboratory.families import FAMILIES
from benchmarks.laboratory.optuna_methods import OptunaMethod, narrowed
from benchmarks.laboratory.ours import Default
from benchmarks.laboratory.problem import Problem
from benchmarks.laboratory.scripts import SCRIPTS
from benchmarks.laboratory.summary import Record, ahead, calibration, regret_at
from lora_tune.search.grey_box.unit_range import at_random

RECORD: dict[str, Any] = {
    "study": "own_switches",
    "method": "random",
    "nodes": 2,
    "repeat": 3,
    "budget": 1.0,
    "trials": 9,
}


def site(number: int, *claims: tuple[float, float, float]) -> Record:
    """A record with (node-hours, claimed, true) looks."""
    return Record(
        study="h100", method="ours", nodes=1, repeat=number, budget=40.0, trials=9, points=((1.0, 0.1),), claims=claims
    )


def test_claims_are_compared_with_the_truth_over_all_looks_and_doubted_by_site() -> None:
    timid = [site(k, (2.0, 9.0, 0.1), (10.0, 0.04, 0.02), (20.0, 0.02, 0.01)) for k in range(6)]
    bold = [site(k, (10.0, 0.01, 0.02), (20.0, math.inf, 0.02)) for k in range(6, 12)]
    found = calibration([*timid, *bold], after=5)
    assert found is not None
    assert found.claimed == pytest.approx((6 * 0.06 + 6 * 0.01) / 18)
    assert found.true == pytest.approx((6 * 0.03 + 6 * 0.02) / 18)
    assert 0.5 < found.low < found.claimed / found.true < found.high < 2.0
    alike = calibration(timid, after=5)
    assert alike is not None
    assert alike.low == pytest.approx(alike.high) == pytest.approx(2.0)


def test_methods_without_claims_have_no_calibration() -> None:
    assert calibration([], after=5) is None
    assert calibration([site(1, (2.0, 0.1, 0.1)), site(2)], after=5) is None


def test_a_method_is_held_against_the_lowest_of_the_others_on_the_sites_that_all_have() -> None:
    def row(method: str, number: int, *points: tuple[float, float]) -> Record:
        return Record(
            study="h100",
            method=method,
            nodes=1,
            repeat=number,
            budget=20.0,
            trials=9,
            points=((0.5, math.inf), *points),
        )

    ours = [row("ours", k, (1.0, 0.04), (4.0, 0.01)) for k in (1, 2, 3)]
    start = [row("as published", k, (1.0, 0.03)) for k in (1, 2, 3)]
    expert = [row("two stages", k, (1.0, 0.05), (10.0, 0.02)) for k in (1, 2)]
    found = ahead([*ours, *start, *expert], "ours", ["as published", "two stages"], [1, 5, 20])
    assert found is not None
    assert (found.sites, found.best, found.regret, found.hours) == (2, "two stages", 0.02, 4.0)
    assert found.worse == pytest.approx((0.01, -0.02, -0.01))
    assert ahead(ours, "ours", ["two stages"], [20]) is None


@pytest.mark.parametrize("name", [*FAMILIES, *SCRIPTS])
def test_every_problem_begins_at_a_configuration_that_reaches_the_target(name: str) -> None:
    problem = CATALOGUE[name](2)
    assert problem.start is not None
    assert math.isfinite(problem.score(problem.start))
    assert problem.start.keys() == problem.distributions.keys()


@pytest.fixture(scope="module")
def switches() -> Problem:
    """A user's own script; its best point is searched once for the tests that need it."""
    return CATALOGUE["own_switches"](1)


def test_the_best_point_is_no_worse_than_random_ones_and_much_better_than_the_start(switches: Problem) -> None:
    rng = np.random.default_rng(3)
    lowest = min(switches.score(at_random(switches.distributions, switches.distributions, rng)) for _ in range(40))
    assert switches.best <= lowest
    assert switches.regret(dict(switches.start or {})) > 0.05


def test_where_the_layout_drives_convergence_the_same_rate_needs_other_samples_elsewhere() -> None:
    surface = CATALOGUE["h100_coupled"](0).surface
    here, there = ({"LR": 4e-4, "MAX_STEPS": 800, "TP": tp, "PP": 1, "CP": 4 // tp, "MINIBS": 4} for tp in (2, 4))
    recipe = surface.base.recipe
    assert recipe(here) == recipe(there)
    assert surface.at(here).site != surface.at(there).site


def test_a_failed_run_is_told_as_the_worst_so_far_to_samplers_that_ignore_pruned_trials() -> None:
    told: list[float] = []

    class Listening(RandomSampler):
        def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
            told.append(values[0])

    method = OptunaMethod(CATALOGUE["own_batch"](0), Listening(seed=1), penalised=True)
    for score in (math.inf, 300.0, 200.0, math.inf):
        ask = method.ask()
        method.tell(ask.handle, Result(verdict="reached", score=score, samples=1.0, facts={}))
    assert told == [1200.0, 300.0, 200.0, 300.0]


def test_every_method_of_optuna_measures_the_start_first() -> None:
    problem = CATALOGUE["own_size"](0)
    assert OptunaMethod(problem, RandomSampler(seed=1)).ask().tuned == problem.start


def test_narrow_ranges_hold_the_start() -> None:
    problem = CATALOGUE["h100"](0)
    assert problem.start is not None
    found = narrowed(problem)
    assert found["LR"] == FloatDistribution(2e-4, 8e-4, log=True)
    assert all(found[name]._contains(found[name].to_internal_repr(value)) for name, value in problem.start.items())


def test_the_two_stage_expert_probes_ten_layouts_and_stays_on_the_fastest() -> None:
    problem = CATALOGUE["h100"](1)
    expert, kinds, layouts = TwoStages(problem, 1), [], []
    for _ in range(14):
        ask = expert.ask()
        kinds.append(ask.kind)
        layouts.append(ask.tuned["layout"])
        speed = 9.0 if ask.tuned["layout"] == layouts[min(4, len(layouts) - 1)] else 2.0
        facts = {"samples_per_second": speed, "seconds_per_eval": 10.0}
        expert.tell(ask.handle, Result(verdict="reached", score=1e3 / speed, samples=1.0, facts=facts))
    assert kinds == ["full"] + 10 * ["probe"] + 3 * ["full"]
    assert len(set(layouts[:11])) == 11
    assert len(set(layouts[11:])) == 1


def test_keeping_the_start_has_the_regret_of_the_start_at_every_budget(switches: Problem) -> None:
    trace = play(switches, AsPublished(switches), slots=1, budget=0.5, seed=1)
    assert switches.start is not None
    assert {regret for _, regret in trace.points} == {switches.regret(switches.start)}


def test_looks_at_given_node_hours_say_what_was_in_force_then(switches: Problem) -> None:
    def trace(looks: list[float] | None) -> Trace:
        method = OptunaMethod(switches, RandomSampler(seed=3))
        return play(switches, method, slots=2, budget=1.0, seed=3, looks=looks)

    always, at_times = Record(**RECORD, points=tuple(trace(None).points)), trace([0.25, 0.5, 1.0])
    assert [hours for hours, _ in at_times.points] == [0.25, 0.5, 1.0]
    assert [regret for _, regret in at_times.points] == [regret_at(always, hours) for hours in (0.25, 0.5, 1.0)]


def test_looking_at_the_recommendation_changes_no_proposal(switches: Problem) -> None:
    def asked(looks: list[float] | None) -> list[str]:
        method = Default(switches, 1)
        play(switches, method, slots=2, budget=0.6, seed=1, looks=looks)
        return method.log

    often, seldom = asked(None), asked([0.6])
    assert len(seldom) > 3
    assert often[: len(seldom)] == seldom[: len(often)]
