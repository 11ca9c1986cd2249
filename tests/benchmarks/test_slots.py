"""64 slots asked at once: no two of them are given the same trial."""

from __future__ import annotations

import pytest

from benchmarks.slots import SLOTS, asked, made_up_end, packed_study, told_apart
from lora_tune.search.session import Session


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tpe_gives_64_slots_of_a_pack_64_different_trials_at_once_and_as_they_are_refilled(seed: int) -> None:
    session = Session(packed_study("tpe").with_options({"search": {"seed": seed}}))
    running, _ = asked(session, SLOTS)
    assert told_apart([proposal.tuned for proposal in running]) == SLOTS
    for proposal in running:
        session.tell(made_up_end(proposal))
    running, _ = asked(session, SLOTS)
    assert told_apart([proposal.tuned for proposal in running]) == SLOTS, "a barrier: all ended before the next ask"
    for _ in range(SLOTS):
        session.tell(made_up_end(running.pop(0)))
        (refilled,), _ = asked(session, 1)
        running.append(refilled)
    assert told_apart([proposal.tuned for proposal in running]) == SLOTS, "refilled one by one"


def test_two_trials_are_told_apart_by_another_value_or_by_a_hundredth_of_the_learning_rate() -> None:
    here, near, far, other = ({"LR": rate, "RANK": rank} for rate, rank in ((1.0, 8), (1.009, 8), (1.02, 8), (1.0, 16)))
    assert told_apart([here, near]) == 1
    assert told_apart([here, far]) == 2
    assert told_apart([here, other]) == 2
    assert told_apart([far, near, here, other]) == 3
