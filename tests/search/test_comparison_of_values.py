"""Comparisons of a metric's values: of either sign, in either direction, with no spread known beforehand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.search.comparison import CannotSeparate, ComparisonRules, Decided, RunSummary, Verdict, means, plan
from lora_tune.search.noise import ResultScale, scale_of
from tests.builders import STUDY, study_of

LOSS = ResultScale(relative=False, got="measured a value", missed="measured no value")
ACCURACY = ResultScale(relative=False, maximise=True)


def verdict_on(results: dict[str, list[RunSummary]], rules: ComparisonRules | None = None) -> Verdict | None:
    return plan(results, rules).verdict


def runs(*values: float) -> list[RunSummary]:
    return [RunSummary(value, 0.5) for value in values]


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


def test_runs_that_are_compared_by_their_cost_are_not_called_fast() -> None:
    assert scale_of(study_of()).better == "faster"
    costs = study_of(STUDY.replace("[objective]", '[objective]\nscore = "node_hours"'))
    assert scale_of(costs).better == "better"


def test_runs_without_a_value_are_no_results() -> None:
    results = {"a": runs(math.inf, math.inf, math.inf), "b": runs(math.inf, math.nan, math.inf)}
    found = verdict_on(results, ComparisonRules(scale=LOSS))
    assert isinstance(found, Decided)
    assert found.sentence == "no run of any configuration measured a value; nothing to choose"


def test_equal_configurations_are_separated_no_more_often_than_the_confidence_allows() -> None:
    """Without a spread known beforehand, and without one that depends on the values' size."""
    rng, rules, wrong, fields = np.random.default_rng(5), ComparisonRules(confidence=0.9, scale=LOSS), 0, 400
    for _ in range(fields):
        found = verdict_on({name: runs(*rng.normal(3.0, 0.2, 10)) for name in "ab"}, rules)
        wrong += isinstance(found, Decided)
    assert wrong <= 0.1 * fields + 2 * math.sqrt(fields * 0.1 * 0.9)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), st.lists(st.builds(RunSummary, st.floats()), max_size=12), min_size=1))
def test_no_values_break_it(results: dict[str, list[RunSummary]]) -> None:
    assert plan(results, ComparisonRules(scale=ACCURACY))
    assert all(low <= mean <= high for mean, low, high in means(results, ComparisonRules(scale=ACCURACY)).values())


def test_what_is_compared_follows_from_the_objective() -> None:
    assert scale_of(study_of()).relative, "a time to the target"
