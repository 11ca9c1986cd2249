"""Racing: who runs next, when the race is over, and what is said."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lora_tune.search.contenders import RunSummary, means
from lora_tune.search.race_limits import LimitShape, limit_constant
from lora_tune.search.race_scale import RAW_SD, RaceScale
from lora_tune.search.race_verdicts import CannotSeparate, Decided
from lora_tune.search.racing import (
    RacePlan,
    RaceSettings,
    RunMore,
    next_action,
    plan,
)


def runs(*seconds: float, node_hours: float = 0.5) -> list[RunSummary]:
    return [RunSummary(s, node_hours) for s in seconds]


def noisy(mean: float, count: int, seed: int, sd: float = 0.05) -> list[RunSummary]:
    noise = np.random.default_rng(seed).normal(0, sd, count)
    return runs(*(mean * np.exp(noise - noise.mean())))


def test_every_configuration_first_gets_the_fewest_runs() -> None:
    assert next_action({"a": [], "b": []}) == RunMore({"a": 1})
    assert next_action({"a": runs(100, 101, 99), "b": runs(90)}, RaceSettings(batch=5)) == RunMore({"b": 2})


def test_a_clear_winner_ends_the_race_early() -> None:
    found = next_action({"a": noisy(100, 4, 1), "b": noisy(160, 4, 2)})
    assert isinstance(found, Decided)
    assert found.winner == "a"
    assert "a is better than b by 60.0% with 90% confidence, after 8 runs" in found.sentence


def test_close_configurations_run_on_the_one_with_fewer_runs_next() -> None:
    found = next_action({"a": noisy(100, 4, 1), "b": noisy(105, 3, 2)})
    assert found == RunMore({"b": 1})


def test_equal_configurations_are_honestly_not_separated() -> None:
    found = next_action({"a": noisy(100, 10, 1), "b": noisy(101, 10, 2)})
    assert isinstance(found, CannotSeparate)
    assert found.leaders == ("a", "b")
    assert found.difference == pytest.approx(0.01)
    assert found.margin > 0.02
    assert found.node_hours == pytest.approx(found.more_runs * 0.5)
    assert "a and b cannot be separated: difference 1.0% +/- " in found.sentence
    assert "more runs = " in found.sentence


def test_a_comparison_without_prospects_is_given_up_before_the_last_run() -> None:
    found = next_action({"a": noisy(100, 8, 1), "b": noisy(100, 8, 2)})
    assert isinstance(found, CannotSeparate)


def test_the_cheaper_of_two_inseparable_configurations_is_recommended() -> None:
    seconds = [r.result for r in noisy(100, 10, 1)]
    found = next_action({"a": runs(*seconds, node_hours=1.0), "b": runs(*(s * 1.005 for s in seconds), node_hours=0.8)})
    assert isinstance(found, CannotSeparate)
    assert found.recommended == "b"
    assert "take b, the cheaper" in found.sentence


def test_the_more_robust_is_recommended_where_one_run_failed() -> None:
    found = next_action({"a": [*noisy(100, 9, 1), RunSummary(math.inf)], "b": noisy(101, 10, 2)})
    assert isinstance(found, CannotSeparate)
    assert found.recommended == "b"


def test_two_failures_put_a_configuration_out() -> None:
    found = next_action({"a": [*runs(90, 91, 92), *runs(math.inf, math.inf)], "b": noisy(110, 4, 2)})
    assert isinstance(found, Decided)
    assert found.winner == "b"


def test_one_configuration_alone_wins_and_none_is_an_error() -> None:
    alone = next_action({"a": runs(100, 101, 102)})
    assert alone == Decided("a", "a ran alone: there is nothing to compare it with")
    others = next_action({"a": runs(100, 101, 102), "b": runs(math.inf, math.inf, math.inf)})
    assert others == Decided("a", "a is the only configuration that reached the target")
    with pytest.raises(ValueError, match="give at least one"):
        next_action({})


@pytest.mark.parametrize("noise", [0.01, 0.2])
def test_the_spread_of_these_runs_decides_and_no_other(noise: float) -> None:
    """A lead of five standard deviations, whatever those are."""
    rng = np.random.default_rng(4)
    lead = {
        name: [RunSummary(100 * math.exp(m * noise + rng.normal(0, noise))) for _ in range(4)]
        for name, m in (("a", 0), ("b", 5))
    }
    assert isinstance(next_action(lead), Decided)


def test_one_of_many_equals_is_not_called_the_best() -> None:
    equal = {f"c{i}": noisy(100, 5, i) for i in range(8)}
    assert not isinstance(next_action(equal), Decided)


def test_of_many_the_leader_and_its_nearest_rival_run_on() -> None:
    field = {"a": runs(100, 104, 96), "near": runs(103, 99, 107), "far": runs(115, 111, 119)}
    assert next_action(field) == RunMore({"a": 1}), "the leader is in every comparison"
    assert next_action(field | {"a": runs(100, 104, 96, 101, 99)}) == RunMore({"near": 1})


def test_where_nothing_separates_two_the_faster_so_far_is_recommended() -> None:
    found = next_action({"a": noisy(100, 5, 1, 10), "b": noisy(100.5, 5, 1, 10)})
    assert isinstance(found, CannotSeparate)
    assert found.recommended == "a"
    assert "the faster so far" in found.sentence


def test_looking_often_costs_a_higher_limit() -> None:
    once = limit_constant(0.1, 20, 20, LimitShape(20, 0.25))
    assert once == pytest.approx(1.645, abs=0.03)
    assert limit_constant(0.1, 3, 20, LimitShape(20, 0.25)) > once + 0.2


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.lists(st.builds(RunSummary, st.floats(), st.floats()), max_size=12), min_size=1
    )
)
@example({"a": runs(0.0, 0.0, 1e-300), "b": runs(1e308, 1e308, 1e308)})
def test_no_results_break_the_race(results: dict[str, list[RunSummary]]) -> None:
    found = next_action(results)
    assert isinstance(found, RunMore | Decided | CannotSeparate)
    assert all(0 <= low <= mean <= high for mean, low, high in means(results).values())
    for together in (True, False):
        assert isinstance(plan(results, RaceSettings(), together=together), RacePlan)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.floats(0, 0.1))
def test_every_race_ends(seed: int, difference: float) -> None:
    rng = np.random.default_rng(seed)
    results: dict[str, list[RunSummary]] = {"a": [], "b": [], "c": []}
    for _ in range(RaceSettings().total(3) + 1):
        action = next_action(results)
        if not isinstance(action, RunMore):
            return
        (config,) = action.runs
        mean = 100 * (1 + difference * "abc".index(config))
        results[config].append(RunSummary(mean * np.exp(rng.normal(0, 0.05))))
    pytest.fail("the race asked for more than its runs")


def replayed(
    truth: dict[str, list[RunSummary]], settings: RaceSettings, *, together: bool = False
) -> tuple[RacePlan, int]:
    """A race whose runs come out as in ``truth``, one job at a time; its last plan and how many runs it took."""
    done: dict[str, list[RunSummary]] = {name: [] for name in truth}
    while True:
        stands = plan(done, settings, together=together)
        short = [name for name, wanted in stands.wanted.items() if len(done[name]) < wanted]
        if stands.verdict is not None or not short:
            return stands, sum(map(len, done.values()))
        for name in short:
            done[name].append(truth[name][len(done[name])])


def test_a_plan_goes_the_way_of_next_action_and_wants_the_rest_of_the_winners_runs_for_its_score() -> None:
    truth = {"a": noisy(100, 10, 1), "b": noisy(118, 10, 2), "c": noisy(120, 10, 3)}
    stands, used = replayed(truth, RaceSettings())
    assert isinstance(stands.verdict, Decided)
    assert stands.verdict.winner == "a"
    assert stands.wanted == {"a": 10}
    assert used < 20
    by_hand: dict[str, list[RunSummary]] = {name: [] for name in truth}
    while isinstance(action := next_action(by_hand), RunMore):
        (config,) = action.runs
        by_hand[config].append(truth[config][len(by_hand[config])])
    assert stands.verdict == action


def test_runs_on_top_change_no_verdict() -> None:
    """After an interruption, or for the score, there are more runs than the race asked for."""
    truth = {"a": noisy(100, 10, 1), "b": noisy(118, 10, 2)}
    stands, _ = replayed(truth, RaceSettings())
    slower = {**truth, "a": [*truth["a"][:6], *runs(*[150.0] * 20)]}
    assert plan(slower, RaceSettings()).verdict == stands.verdict


def test_configurations_that_run_together_are_looked_at_after_equal_numbers_of_runs() -> None:
    truth = {name: noisy(100, 10, seed) for name, seed in (("a", 1), ("b", 2), ("c", 3))}
    four = {name: found[:3] for name, found in truth.items()}
    assert plan(four, RaceSettings(), together=True).wanted == {"a": 4, "b": 4, "c": 4}
    alone = plan(four, RaceSettings()).wanted
    assert sorted(alone.values()) == [3, 3, 4]


def test_a_race_that_nobody_finishes_wants_nothing_more() -> None:
    lost = runs(math.inf, math.inf, math.inf)
    stands = plan({"a": lost, "b": lost}, RaceSettings())
    assert stands.wanted == {}
    assert isinstance(stands.verdict, Decided)
    assert "no run of any configuration" in stands.verdict.sentence


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 10), st.integers(1, 4), st.booleans())
def test_every_plan_ends_within_its_runs(seed: int, most: int, batch: int, together: bool) -> None:
    rng = np.random.default_rng(seed)
    truth = {name: runs(*(100 * np.exp(rng.normal(0, 0.05, 2 * most)))) for name in "abc"}
    rules = RaceSettings(fewest=min(3, most), most=most, batch=batch)
    stands, used = replayed(truth, rules, together=together)
    assert stands.verdict is not None
    assert used <= rules.total(3)


def test_the_mean_of_a_configuration_comes_with_an_interval_that_shrinks() -> None:
    few = means({"a": noisy(100, 3, 1), "b": runs(math.inf)})
    many = means({"a": noisy(100, 10, 1)})
    assert few.keys() == {"a"}
    assert few["a"][0] == pytest.approx(100, rel=1e-3)
    assert few["a"][1] < many["a"][1] < 100 < many["a"][2] < few["a"][2]


def test_what_is_called_a_mean_is_the_arithmetic_one() -> None:
    """Of times that scatter the geometric one lies below it: at 30% by four percent."""
    times = [80.0, 100.0, 160.0]
    mean, low, high = means({"a": [RunSummary(s) for s in times]})["a"]
    assert mean == pytest.approx(sum(times) / 3)
    assert low < mean < high


def test_of_equal_configurations_confirm_calls_one_better_in_one_of_twenty_races_at_most() -> None:
    """At its own confidence, over all looks together; 9 of 100 is two standard errors above that."""
    rng, wrong = random.Random(7), 0
    for _ in range(100):
        races = {name: [RunSummary(math.exp(rng.gauss(0, 0.1))) for _ in range(10)] for name in "ab"}
        verdict = plan(races, RaceSettings(confidence=0.95, scale=RaceScale(prior_sd=RAW_SD))).verdict
        wrong += isinstance(verdict, Decided)
    assert wrong <= 9
