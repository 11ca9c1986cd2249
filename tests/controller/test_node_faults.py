"""Failures that sit on one node are that node's, whatever their class."""

from __future__ import annotations

from typing import Any

import pytest

from lora_tune.controller import node_faults
from lora_tune.store.records import Attempt, StopKind, StudyRecords

NOW = 1_700_000_000.0


def ended(trial: int, node: str, ago: float, failure: str = "", **change: Any) -> Attempt:
    """An attempt of ten seconds that ended ``ago`` seconds before now."""
    values = {"number": 0, "job_name": f"x-{trial}", "folder": "", "state": "ended", "line": "a fault", **change}
    end = NOW - ago
    return Attempt(trial=trial, nodes=tuple(node.split()), started_at=end - 10, ended_at=end, failure=failure, **values)


def running(trial: int, node: str, seconds: float) -> Attempt:
    return Attempt(
        trial=trial, number=0, job_name="y", folder="", state="running", nodes=(node,), started_at=NOW - seconds
    )


def sweep(*attempts: Attempt) -> StudyRecords:
    records = {(a.trial, a.number): a for a in attempts}
    return StudyRecords(name="x", digest="d", study_toml="", began_at=NOW - 3600, attempts=records)


FAULT, OTHER = "infrastructure", "configuration"
WELL = ended(7, "n3", 20)


@pytest.mark.parametrize(
    ("attempts", "suspects"),
    [
        # A fault of the machine is its machine's.
        ([ended(0, "n1", 50, FAULT), ended(1, "n1", 40, "flaky")], {"n1"}),
        ([ended(0, "n1", 50, FAULT), ended(1, "n2", 40, FAULT)], set()),
        ([ended(0, "n1 n2", 50, FAULT), ended(1, "n1 n3", 40, FAULT)], {"n1"}),
        ([ended(0, "n1", 50, FAULT), ended(0, "n1", 40, FAULT, number=1)], set()),
        ([ended(0, "n1", 50, FAULT), ended(1, "n1", 40, FAULT), ended(2, "n1", 30)], set()),
        ([ended(0, "n1", 50, FAULT), ended(1, "n1", 40, FAULT, state="cancelled")], set()),
        ([ended(0, "n1", 50, FAULT), ended(1, "n1", 40, FAULT, state="cancelled", stop=StopKind.SILENT)], {"n1"}),
        ([ended(0, "n1", 90000, FAULT), ended(1, "n1", 40, FAULT)], set()),
        # Any other failure is, where other machines run trials and do not fail like this.
        ([ended(0, "n1", 50, OTHER), ended(1, "n1", 40, "unknown")], set()),
        ([ended(0, "n1", 50, OTHER), ended(1, "n1", 40, "unknown"), WELL], {"n1"}),
        ([ended(0, "n1", 50, FAULT), ended(1, "n1", 40, "infeasible"), WELL], {"n1"}),
        ([ended(0, "n1", 50, OTHER), ended(1, "n1", 40, OTHER), running(2, "n2", 60)], {"n1"}),
        ([ended(0, "n1", 50, OTHER), ended(1, "n1", 40, OTHER), running(2, "n2", 15)], set()),
        ([ended(0, "n1", 50, OTHER), ended(1, "n1", 40, OTHER), ended(2, "n2", 30, OTHER), WELL], set()),
        # A trial that fails there and runs elsewhere tells most.
        (
            [
                ended(0, "n1", 50, OTHER),
                ended(1, "n1", 40, OTHER),
                ended(2, "n2", 30, OTHER),
                ended(0, "n3", 20, number=1),
            ],
            {"n1"},
        ),
    ],
)
def test_a_node_where_trials_fail_one_after_another_is_left_out(attempts: list[Attempt], suspects: set[str]) -> None:
    found = node_faults.suspect_nodes(sweep(*attempts), NOW)
    assert set(found) == suspects
    assert all("2 trials in a row failed there, last: a fault" in why for why in found.values())


@pytest.mark.parametrize(
    ("others", "worth"),
    [
        ([], True),
        ([ended(1, "n1", 50, OTHER)], True),
        ([ended(1, "n2", 50, OTHER)], False),
        ([ended(1, "n2", 50, OTHER), WELL], True),
        ([ended(1, "n2", 50, OTHER), WELL, ended(2, "n1", 60)], False),
        ([ended(1, "n2", 90000, OTHER)], True),
    ],
)
def test_another_node_is_tried_until_one_more_fails_like_this(others: list[Attempt], worth: bool) -> None:
    failed = ended(0, "n1", 0, OTHER)
    assert node_faults.may_be_the_nodes(sweep(failed, *others), failed, NOW) is worth


def test_a_failure_on_no_known_node_is_nobodys() -> None:
    failed = ended(0, "", 0, OTHER)
    assert not node_faults.may_be_the_nodes(sweep(failed), failed, NOW)
