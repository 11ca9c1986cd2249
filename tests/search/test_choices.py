"""A search over lists of choices for a reward."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.search.choices import ChoiceSearch

SPACE = {"batch": [8, 16, 32, 64], "layout": ["tp1", "tp2", "tp4"], "buckets": [[1, 2], [3]], "sizes": [None]}


@settings(max_examples=15, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1),
    st.integers(0, 100),
)
def test_every_combination_is_proposed_once_and_then_none(choices: dict[str, list[int]], seed: int) -> None:
    search = ChoiceSearch({n: list(enumerate(v)) for n, v in choices.items()}, seed=seed, startup=2, first=False)
    seen = []
    while (action := search.ask()) is not None:
        assert action.keys() == choices.keys()
        seen.append(tuple(action[name][0] for name in choices))
        search.tell(float(sum(value for _, value in action.values())) if len(seen) % 3 else None)
    assert len(seen) == len({*seen}) == search.size == math.prod(map(len, choices.values()))


def test_values_of_any_kind_come_back_as_they_were_given() -> None:
    action = ChoiceSearch(SPACE, seed=0, startup=5, first=True).ask()
    assert action == {"batch": 8, "layout": "tp1", "buckets": [1, 2], "sizes": None}


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_what_cannot_run_is_avoided(bad: float | None) -> None:
    """Half of the space cannot run; a search that learned nothing of that would ask for it half of the time."""
    tried = 0
    for seed in range(3):
        search = ChoiceSearch({"mode": ["ok", "broken"], "size": list(range(100))}, seed=seed, startup=5, first=False)
        for _ in range(30):
            action = search.ask()
            assert action is not None
            tried += action["mode"] == "broken"
            search.tell(bad if action["mode"] == "broken" else 1.0 + action["size"] / 100)
    assert tried < 3 * 30 * 0.4


def test_more_is_better_and_order_is_used() -> None:
    """The best of 4,000 combinations is at one end of both lists; 40 random draws come to 0.9 of it at best, mostly."""
    found = []
    for seed in range(3):
        search = ChoiceSearch({"a": list(range(80)), "b": list(range(50))}, seed=seed, startup=5, first=True)
        best = 0.0
        for _ in range(40):
            action = search.ask()
            assert action is not None
            best = max(best, reward := (action["a"] / 79 + action["b"] / 49) / 2)
            search.tell(reward)
        found.append(best)
    assert sorted(found)[1] > 0.95


def test_a_parameter_without_a_value_is_named() -> None:
    with pytest.raises(ValueError, match="b has no value"):
        ChoiceSearch({"a": [1], "b": []}, seed=0, startup=5, first=False)
