"""A trial whose shared job was killed under it trains in smaller company, and in the end alone."""

from __future__ import annotations

import pytest

from lora_tune.controller.shared_jobs import max_packed_trials
from lora_tune.store.records import Attempt


def attempt(number: int, failure: str, state: str = "", exit_code: int | None = None) -> Attempt:
    """An attempt that ended so. state: what the launcher said, where it is not the failure's own name."""
    return Attempt(
        trial=0, number=number, job_name=f"study-0000-{number}", folder=f"0000-{number}", failure=failure,
        state=state or failure, exit_code=exit_code,
    )  # fmt: skip


SHORT, CRASH = ("host memory", "host memory", -9), ("preempted", "preempted", 137)
ENDED, UNTRIED = ("preempted", "preempted", 143), ("displaced", "displaced", None)


@pytest.mark.parametrize(
    ("earlier", "most", "expected"),
    [
        ([], 3, 0),
        ([SHORT], 3, 4),
        ([SHORT, SHORT], 3, 1),
        ([SHORT], 2, 1),
        ([CRASH], 3, 0),
        ([CRASH, CRASH], 9, 1),
        ([ENDED, CRASH], 3, 1),
        ([ENDED, ENDED], 3, 0),
        ([SHORT, UNTRIED], 3, 4),
        ([UNTRIED, UNTRIED], 3, 0),
        ([("infrastructure", "ended", 1)] * 2, 3, 0),
    ],
    ids=[
        *("first attempt", "short of memory", "twice", "the last that is allowed"),
        *("crashed, which may have been an accident", "crashed twice", "crashed, and the last", "asked to end"),
        *("what only waited does not count", "only waited", "failed for itself"),
    ],
)
def test_company_shrinks_with_the_jobs_that_died_under_a_trial(
    earlier: list[tuple[str, str, int | None]], most: int, expected: int
) -> None:
    attempts = [attempt(i, *end) for i, end in enumerate(earlier)]
    assert max_packed_trials(attempts, most, slots_used=16) == expected


def test_a_quarter_of_a_small_pack_is_one() -> None:
    assert [max_packed_trials([attempt(0, *SHORT)], 3, slots_used=slots) for slots in (1, 4, 8, 64)] == [1, 1, 2, 16]
