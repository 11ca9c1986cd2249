"""Comparing configurations by equally many seeds: who runs next, when it is decided, and what is said.

Of times, and of a metric's values: of either sign, in either direction, with no spread known beforehand.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lora_tune.search.comparison import (
    CannotSeparate,
    ComparisonPlan,
    ComparisonRules,
    Decided,
    RunSummary,
    Verdict,
    means,
    plan,
)
from lora_tune.search.noise import TIMES, ResultScale, scale_of
from tests.builders import STUDY, study_of

LOSS = ResultScale(relative=False, got="measured a value", missed="measured no value")
ACCURACY = ResultScale(relative=False, maximise=True)


def runs(*seconds: float, node_hours: float = 0.5) -> list[RunSummary]:
    return [RunSummary(s, node_hours) for s in seconds]


def noisy(mean: float, count: int, seed: int, sd: float = 0.05) -> list[RunSummary]:
    noise = np.random.default_rng(seed).normal(0, sd, count)
    return runs(*(mean * np.exp(noise) / np.exp(noise).mean()))


def verdict_on(results: dict[str, list[RunSummary]], rules: ComparisonRules | None = None) -> Verdict | None:
    return plan(results, rules).verdict


def test_every_configuration_first_gets_the_fewest_runs() -> None:
    assert plan({"a": [], "b": []}) == ComparisonPlan({"a": 3, "b": 3})
    few = {"a": runs(100, 101, 99), "b": runs(90)}
    assert plan(few, ComparisonRules(batch=5)).required == {"a": 3, "b": 3}


def test_a_clear_winner_ends_it_early() -> None:
    found = verdict_on({"a": noisy(100, 10, 1), "b": noisy(160, 10, 2)})
    assert isinstance(found, Decided)
    assert found.winner == "a"
    assert "a is better than b by " in found.sentence
    assert found.sentence.endswith(" with 95% confidence, after 6 runs")


def test_close_configurations_get_equally_many_runs_until_the_next_look() -> None:
    field = {"a": noisy(100, 3, 1), "b": noisy(105, 3, 2), "c": noisy(103, 3, 3)}
    assert plan(field).required == {"a": 4, "b": 4, "c": 4}
    assert plan(field, ComparisonRules(batch=3)).required == {"a": 6, "b": 6, "c": 6}


def test_a_configuration_that_is_beaten_gets_no_further_run() -> None:
    field = {"a": noisy(100, 3, 1), "near": noisy(103, 3, 2), "far": noisy(200, 3, 3)}
    assert plan(field).required == {"a": 4, "near": 4}


def test_equal_configurations_are_honestly_not_separated() -> None:
    found = verdict_on({"a": noisy(100, 10, 1), "b": noisy(101, 10, 2)})
    assert isinstance(found, CannotSeparate)
    assert found.sentence.endswith("take a, the faster so far")
    assert found.leaders == ("a", "b")
    assert found.difference == pytest.approx(0.01, rel=0.02)
    assert found.margin > 0.02
    assert found.node_hours == pytest.approx(found.more_runs * 0.5)
    assert (found.more_runs, found.seeds > 10) == (2 * (found.seeds - 10), True)
    assert "a and b cannot be separated: difference 1.0% +/- " in found.sentence
    assert "more runs = " in found.sentence


def test_the_cheaper_of_two_inseparable_configurations_is_recommended() -> None:
    seconds = [r.result for r in noisy(100, 10, 1)]
    found = verdict_on({"a": runs(*seconds, node_hours=1.0), "b": runs(*(s * 1.005 for s in seconds), node_hours=0.8)})
    assert isinstance(found, CannotSeparate)
    assert found.recommended == "b"
    assert "take b, the cheaper" in found.sentence


def test_the_more_robust_is_recommended_where_one_run_failed() -> None:
    found = verdict_on({"a": [*noisy(100, 9, 1), RunSummary(math.inf)], "b": noisy(101, 10, 2)})
    assert isinstance(found, CannotSeparate)
    assert found.recommended == "b"


def test_two_failures_put_a_configuration_out() -> None:
    found = verdict_on({"a": [*runs(math.inf, math.inf), *runs(90, 91, 92)], "b": noisy(110, 5, 2)})
    assert isinstance(found, Decided)
    assert found.winner == "b"


def test_one_that_was_beaten_comes_back_where_the_leader_fails_afterwards() -> None:
    leader = [*runs(100, 101, 99), *runs(math.inf, math.inf), *runs(100, 101, 99, 100, 101)]
    found = verdict_on({"a": leader, "near": [*noisy(103, 3, 2), *runs(*[math.inf] * 7)], "far": noisy(150, 3, 3)})
    assert isinstance(found, Decided)
    assert found.winner == "far"


def test_one_configuration_alone_wins_and_none_is_an_error() -> None:
    alone = verdict_on({"a": runs(100, 101, 102)})
    assert alone == Decided("a", "a ran alone: there is nothing to compare it with")
    others = verdict_on({"a": runs(100, 101, 102), "b": runs(math.inf, math.inf, math.inf)})
    assert others == Decided("a", "a is the only configuration that reached the target")
    with pytest.raises(ValueError, match="give at least one"):
        plan({})


@pytest.mark.parametrize("noise", [0.01, 0.2])
def test_the_spread_of_these_runs_decides_and_no_other(noise: float) -> None:
    """A lead of five standard deviations, whatever those are."""
    rng = np.random.default_rng(4)
    lead = {
        name: [RunSummary(100 * math.exp(m * noise + rng.normal(0, noise))) for _ in range(10)]
        for name, m in (("a", 0), ("b", 5))
    }
    assert isinstance(verdict_on(lead), Decided)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 12), st.floats(0.5, 0.999))
def test_all_looks_together_spend_the_error_and_most_of_it_is_kept_for_the_last(
    fewest: int, most: int, batch: int, confidence: float
) -> None:
    looks = ComparisonRules(confidence=confidence, fewest=fewest, most=most, batch=batch).looks()
    assert sum(looks.values()) == pytest.approx(1 - confidence)
    assert all(error > 0 for error in looks.values())
    assert (list(looks), list(looks)[-1]) == (sorted(looks), most)
    assert looks[most] >= 0.8 * (1 - confidence) * (1 - 1e-9)


@pytest.mark.parametrize("scale", [TIMES, ACCURACY])
@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.lists(st.builds(RunSummary, st.floats(), st.floats()), max_size=12), min_size=1
    )
)
@example({"a": runs(0.0, 0.0, 1e-300), "b": runs(1e308, 1e308, 1e308)})
def test_no_results_break_it(scale: ResultScale, results: dict[str, list[RunSummary]]) -> None:
    rules = ComparisonRules(scale=scale)
    assert isinstance(plan(results, rules), ComparisonPlan)
    assert all(low <= mean <= high for mean, low, high in means(results, rules).values())
    assert scale.maximise or all(low >= 0 for _, low, _ in means(results, rules).values())


def replayed(truth: dict[str, list[RunSummary]], rules: ComparisonRules) -> tuple[ComparisonPlan, int]:
    """Runs come out as in ``truth``, as they are wanted; the last plan and how many runs it took."""
    done: dict[str, list[RunSummary]] = {name: [] for name in truth}
    while True:
        stands = plan(done, rules)
        if stands.verdict is not None:
            return stands, sum(map(len, done.values()))
        for name, wanted in stands.required.items():
            done[name].extend(truth[name][len(done[name]) : wanted])


def test_after_the_verdict_the_rest_of_the_winners_runs_is_wanted_for_its_score() -> None:
    truth = {"a": noisy(100, 10, 1), "b": noisy(118, 10, 2), "c": noisy(120, 10, 3)}
    stands, used = replayed(truth, ComparisonRules())
    assert isinstance(stands.verdict, Decided)
    assert stands.verdict.winner == "a"
    assert stands.required == {"a": 10}
    assert used < 20


def test_runs_on_top_change_no_verdict() -> None:
    """After an interruption, or for the score, there are more runs than were asked for."""
    truth = {"a": noisy(100, 10, 1), "b": noisy(118, 10, 2)}
    stands, _ = replayed(truth, ComparisonRules())
    slower = {**truth, "a": [*truth["a"][:7], *runs(*[150.0] * 20)]}
    assert plan(slower, ComparisonRules()).verdict == stands.verdict


def test_where_nobody_has_a_result_nothing_more_is_wanted() -> None:
    lost = {"a": runs(math.inf, math.inf, math.inf), "b": runs(math.inf, math.nan, math.inf)}
    stands = plan(lost, ComparisonRules(scale=LOSS))
    assert stands.required == {}
    assert isinstance(stands.verdict, Decided)
    assert stands.verdict.sentence == "no run of any configuration measured a value; nothing to choose"


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 10), st.integers(1, 4), st.floats(0, 0.1))
def test_every_plan_ends_within_its_runs(seed: int, most: int, batch: int, difference: float) -> None:
    rng = np.random.default_rng(seed)
    truth = {
        name: runs(*(100 * (1 + at * difference) * np.exp(rng.normal(0, 0.05, most)))) for at, name in enumerate("abc")
    }
    stands, used = replayed(truth, ComparisonRules(fewest=min(3, most), most=most, batch=batch))
    assert stands.verdict is not None
    assert used <= 3 * most


def test_the_mean_of_a_configuration_comes_with_an_interval_that_shrinks() -> None:
    few = means({"a": noisy(100, 3, 1), "b": runs(math.inf)})
    many = means({"a": noisy(100, 10, 1)})
    assert few.keys() == {"a"}
    assert few["a"][0] == pytest.approx(100, rel=5e-3)
    assert few["a"][1] < many["a"][1] < 100 < many["a"][2] < few["a"][2]


def test_what_is_called_a_mean_is_the_arithmetic_one_and_decides() -> None:
    """Of times that scatter the geometric one lies below it: at 30% by four percent."""
    times = [80.0, 100.0, 160.0]
    mean, low, high = means({"a": [RunSummary(s) for s in times]})["a"]
    assert mean == pytest.approx(sum(times) / 3)
    assert low < mean < high
    found = verdict_on({"steady": runs(*[112.0, 111.0] * 5), "wild": runs(*[60.0, 170.0] * 5)})
    assert isinstance(found, CannotSeparate)
    assert found.leaders[0] == "steady", "the geometric mean of the other is 101"


@pytest.mark.parametrize(
    ("scale", "noise", "field"),
    [
        *((TIMES, noise, field) for noise in (0.05, 0.2) for field in ((0, 0), (0, 0, 0), (0, 0, 0.3))),
        (LOSS, 0.2, (0, 0)),
    ],
)
def test_of_equal_configurations_one_is_called_better_in_one_of_twenty_comparisons_at_most(
    scale: ResultScale, noise: float, field: tuple[float, ...]
) -> None:
    """Over all looks together, with and without a spread known beforehand; 27 of 300 is three standard errors above."""
    rng, wrong = np.random.default_rng(7), 0
    for _ in range(300):
        places = {str(at): 3.0 + off + rng.normal(0, noise, 10) for at, off in enumerate(field)}
        results = {name: runs(*(np.exp(each) if scale.relative else each)) for name, each in places.items()}
        wrong += isinstance(verdict_on(results, ComparisonRules(scale=scale)), Decided)
    assert wrong <= 27


def test_a_difference_of_twice_the_spread_is_found_in_most_comparisons_of_three() -> None:
    rng, right = np.random.default_rng(7), 0
    for _ in range(100):
        results = {
            str(at): runs(*(100 * np.exp(off + rng.normal(0, 0.05, 10)))) for at, off in enumerate((0, 0.1, 0.1))
        }
        found = verdict_on(results)
        right += isinstance(found, Decided) and found.winner == "0"
    assert right >= 85


@pytest.mark.parametrize("shift", [0.0, -0.5, -100.0])
def test_the_lower_loss_wins_wherever_zero_lies(shift: float) -> None:
    results = {"a": runs(*(shift + v for v in (0.50, 0.51, 0.49))), "b": runs(*(shift + v for v in (0.70, 0.71, 0.69)))}
    found = verdict_on(results, ComparisonRules(scale=LOSS))
    assert isinstance(found, Decided)
    assert found.winner == "a"
    assert "a is better than b by 0.2 with 95% confidence" in found.sentence


def test_the_higher_accuracy_wins_where_more_is_better() -> None:
    results = {"a": runs(0.80, 0.81, 0.79), "b": runs(0.90, 0.91, 0.89)}
    found = verdict_on(results, ComparisonRules(scale=ACCURACY))
    assert isinstance(found, Decided)
    assert found.winner == "b"
    mean, low, high = means(results, ComparisonRules(scale=ACCURACY))["b"]
    assert (low < mean < high, mean) == (True, pytest.approx(0.9))


def test_an_accuracy_of_zero_is_no_negative_one() -> None:
    mean, low, high = means({"a": runs(0.0, 0.0)}, ComparisonRules(scale=ACCURACY))["a"]
    assert (str(mean), low < 0 < high) == ("0.0", True)


def test_leaders_too_close_are_told_apart_by_how_much_in_the_values_own_unit() -> None:
    results = {"a": runs(*(0.50, 0.60) * 5), "b": runs(*(0.51, 0.61) * 5)}
    found = verdict_on(results, ComparisonRules(scale=LOSS))
    assert isinstance(found, CannotSeparate)
    assert "difference 0.01 +/- 0.04" in found.sentence
    assert found.sentence.endswith("take a, the better so far")


def test_values_that_are_equal_are_said_to_be_and_no_number_of_runs_is_named() -> None:
    found = verdict_on({"a": runs(*(0.50, 0.60) * 5), "b": runs(*(0.50, 0.60) * 5)}, ComparisonRules(scale=LOSS))
    assert isinstance(found, CannotSeparate)
    assert (found.more_runs, found.node_hours) == (0, 0.0)
    assert found.sentence == (
        "a and b cannot be separated: difference 0 +/- 0.0408; take a, as good as the other so far"
    )


def test_equal_means_of_runs_that_scatter_are_no_proof_that_configurations_are_equal() -> None:
    """Means of a few runs meet by chance too: how far apart the two may be is said, and none is called faster."""
    found = verdict_on({"a": runs(*(95.0, 105.0) * 5), "b": runs(*(105.0, 95.0) * 5)})
    assert isinstance(found, CannotSeparate)
    assert found.margin > 0.03
    assert "difference 0.0% +/- 4." in found.sentence
    assert found.sentence.endswith("; take a, as good as the other so far")


def test_what_a_run_did_is_said_in_the_words_of_its_objective() -> None:
    some, none = runs(*(0.50, 0.60) * 5), runs(math.nan)
    found = verdict_on({"a": [*some[:-1], *none], "b": some}, ComparisonRules(scale=LOSS))
    assert isinstance(found, CannotSeparate)
    assert found.sentence.endswith("take b, all of whose runs measured a value")
    found = verdict_on({"a": [*none, *none, *some[:-2]], "b": runs(*(0.80, 0.90) * 5)}, ComparisonRules(scale=LOSS))
    assert isinstance(found, Decided)
    assert found.sentence.startswith("a measured no value in 2 of 3 runs; b is left")


def test_what_is_compared_follows_from_the_objective() -> None:
    """A time to the target; runs that are compared by their cost are not called fast."""
    assert (scale_of(study_of()).relative, scale_of(study_of()).better) == (True, "faster")
    costs = study_of(STUDY.replace("[objective]", '[objective]\nscore = "node_hours"'))
    assert scale_of(costs).better == "better"
