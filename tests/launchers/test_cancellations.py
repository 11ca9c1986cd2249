"""Whose a cancellation is: a person's scancel, or Slurm's own; from Slurm's printed words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lora_tune.launchers.slurm.parse import Controller, JobRow, by_cluster, canceller, controller

ANNA, BERT, SLURM, ROOT = 1000, 1001, 64030, 0
LONG_AGO, SUBMITTED, SINCE = 500.0, 1000.0, 1500.0
ROW = JobRow(
    job_id="17", name="study-0001-0", state="CANCELLED", submitted=SUBMITTED, started=1010, ended=1600, nodes=("n1",)
)


def whose(
    by: int | None, *, booted_at: float | None = LONG_AGO, user: int = ANNA, row: JobRow = ROW, output: bool = True
) -> str:
    return by_cluster(row, Controller(booted_at, SLURM), by, user=user, output=output)


@pytest.mark.parametrize("by", [ANNA, BERT])
@pytest.mark.parametrize("booted_at", [None, LONG_AGO, SINCE])
def test_a_person_whom_the_accounting_names_is_believed(by: int, booted_at: float | None) -> None:
    assert whose(by, booted_at=booted_at) == ""


@pytest.mark.parametrize("by", [ROOT, SLURM])
def test_daemons_cancel_as_root_or_as_slurms_user(by: int) -> None:
    assert whose(by) == f"CANCELLED by user id {by}: by Slurm itself, or by an administrator"


def test_without_accounting_it_is_a_persons_unless_the_controller_was_started_after_the_submission() -> None:
    assert whose(None) == ""
    assert whose(None, booted_at=None) == ""
    assert "slurmctld was started anew" in whose(None, booted_at=SINCE)


def test_root_who_sweeps_is_no_daemon_by_the_id_alone() -> None:
    assert whose(ROOT, user=ROOT) == ""
    assert "started anew" in whose(ROOT, user=ROOT, booted_at=SINCE)


def test_a_reason_that_only_slurm_gives_a_job_that_had_started() -> None:
    failed = replace(ROW, reason="NodeDown")
    assert whose(None, row=failed) == "CANCELLED NodeDown: by Slurm itself"
    assert whose(None, row=replace(failed, nodes=())) == "", "it waited for that, and a person had enough"


def test_a_job_that_its_node_refused_was_cancelled_by_nobody() -> None:
    """Its id was given out again, and the job that a crashed controller forgot still ran there."""
    refused = replace(ROW, started=1600.0, ended=1600.0)
    assert whose(None, row=refused, output=False).endswith("before its script began: n1 refused it")
    assert whose(ROOT, user=ROOT, row=refused, output=False)
    assert whose(ANNA, row=refused, output=False) == "", "a person whom the accounting names"
    assert whose(None, row=refused, output=True) == "", "its script had begun"
    assert whose(None, row=replace(refused, ended=1700.0), output=False) == "", "a node that boots for it"
    assert whose(None, row=replace(refused, started=None), output=False) == ""


@pytest.mark.parametrize(
    ("state", "uid"),
    [("CANCELLED by 1000", 1000), ("CANCELLED by 0", 0), ("CANCELLED", None), ("CANCELLED by -2", None), ("", None)],
)
def test_the_accountings_words(state: str, uid: int | None) -> None:
    assert canceller(state) == uid


def test_the_controllers_words() -> None:
    text = "Configuration data as of 1700\nBOOT_TIME               = 1500\nSlurmUser               = slurm(64030)\n"
    assert controller(text) == Controller(1500.0, SLURM)
    assert controller("BOOT_TIME = 2026-11-22T10:00:00\nSlurmUser = slurm\n") == Controller()
    assert controller("") == Controller()
