"""Fair shares of a cap of nodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_tune.controller.quota import Demand, NodeQuota, demand, shares
from tests.builders import STUDY, study_of, sweep_of

demands = st.lists(
    st.builds(
        Demand,
        name=st.sampled_from("abcdefgh"),
        nodes=st.integers(1, 8),
        trials=st.integers(0, 20),
        had=st.integers(0, 50),
    ),
    unique_by=lambda d: d.name,
    max_size=6,
)


@given(demands, st.integers(1, 64))
def test_the_cap_holds_and_no_node_is_idle_that_somebody_could_use(found: list[Demand], cap: int) -> None:
    given_ = shares(found, cap)
    used = sum(given_[d.name] * d.nodes for d in found)
    assert used <= cap
    assert all(given_[d.name] == d.trials or d.nodes > cap - used for d in found)


@given(demands, st.integers(1, 64))
def test_nobody_is_ahead_by_more_than_one_trial_of_somebody_who_could_use_it(found: list[Demand], cap: int) -> None:
    given_ = shares(found, cap)
    free = cap - sum(given_[d.name] * d.nodes for d in found)
    for poor in found:
        if given_[poor.name] == poor.trials:
            continue
        for rich in found:
            # Taking one trial from the rich would make room for one of the poor only where it fits.
            if rich.nodes + free >= poor.nodes:
                assert (given_[rich.name] - 1) * rich.nodes <= given_[poor.name] * poor.nodes


def test_equal_studies_get_equal_parts_and_the_rest_goes_to_who_had_least() -> None:
    three = [Demand(name=n, nodes=1, trials=9, had=t) for n, t in (("a", 3), ("b", 1), ("c", 2))]
    assert shares(three, 7) == {"a": 2, "b": 3, "c": 2}


def test_a_study_of_large_trials_gets_its_turn() -> None:
    gate = NodeQuota(4)
    gate.note(Demand(name="large", nodes=4, trials=2))
    gate.note(Demand(name="small", nodes=1, trials=9))
    assert gate.admit("large")
    assert not gate.admit("small"), "nothing is free"
    gate.note(Demand(name="large", nodes=4, trials=1))  # its trial ended
    assert [gate.admit("small") for _ in range(5)] == [True, True, True, True, False]
    for left in (3, 2, 1):
        gate.note(Demand(name="small", nodes=1, trials=9, open=left, used=left))
        assert not gate.admit("small"), "the nodes are kept for the large one now"
        assert not gate.admit("large"), "until there are enough"
    gate.note(Demand(name="small", nodes=1, trials=9))
    assert gate.admit("large")


def test_without_a_cap_everybody_may() -> None:
    assert NodeQuota(None).admit("anybody")


def test_what_a_study_has_and_could_have() -> None:
    study = study_of()  # 40 trials, 2 at one time
    seen = demand(study, sweep_of(study, trials=6, running=1), 1_760_010_000.0)
    assert (seen.open, seen.trials, seen.used) == (1, 2, 1)
    nearly = study.with_options({"budget": {"trials": 6}})
    assert demand(nearly, sweep_of(study, trials=6, running=1), 1_760_010_000.0).trials == 1, "all are proposed"


def test_the_largest_trial_of_a_study_whose_trials_differ() -> None:
    varied = STUDY.replace("minibs = [1, 2, 4]", "minibs = [1, 2, 4], nodes = [1, 2, 8]")
    assert study_of(varied).search_space.most_nodes == 8
    assert study_of().search_space.most_nodes == 1
