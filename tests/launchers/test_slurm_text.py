"""Slurm's printed words as job statuses; nothing here needs Slurm."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.errors import LauncherError
from lora_tune.base.host import hostnames
from lora_tune.launchers.base import JobState, Ticket, Waits
from lora_tune.launchers.slurm import parse
from lora_tune.launchers.slurm.client import ask
from lora_tune.launchers.slurm.parse import beyond_reservation

WIDTHS = [int(field.split(":")[1]) for field in parse.SQUEUE_FORMAT.split(",")]


def squeue_line(**values: str) -> str:
    """A line as squeue prints it: every field padded to its width."""
    shown = {
        "JobID": "17",
        "Name": "study-0001-0",
        "State": "RUNNING",
        "RestartCnt": "0",
        "exit_code": "0",
        "SubmitTime": "1000",
        "StartTime": "1010",
        "EndTime": "2000",
        "TimeUsed": "16:30",
        "NodeList": "n[1-2]",
        "Comment": "token",
        "STDOUT": "/sweeps/x/job.log",
        "Reason": "None",
    } | values
    names = [field.split(":")[0] for field in parse.SQUEUE_FORMAT.split(",")]
    return "".join(shown[name].ljust(width) for name, width in zip(names, WIDTHS, strict=True))


def status_of(submitted_at: float = 1000.0, **values: str) -> parse.JobStatus:
    (row,) = parse.squeue_rows(squeue_line(**values))
    return parse.status(row, submitted_at)


def test_a_running_job() -> None:
    status = status_of()
    assert status.state is JobState.RUNNING
    assert (status.started_at, status.ended_at, status.exit_code) == (1010.0, None, None)
    assert status.nodes == ("n1", "n2")


def test_a_waiting_job_has_no_start_although_slurm_shows_an_estimate() -> None:
    status = status_of(State="PENDING", NodeList="", Reason="ReqNodeNotAvail, UnavailableNodes:n[1-4]")
    assert status.state is JobState.QUEUED
    assert (status.started_at, status.ended_at, status.nodes) == (None, None, ())
    assert "UnavailableNodes:n[1-4]" in status.reason


@pytest.mark.parametrize(
    ("reason", "waits"),
    [
        ("Priority", Waits.NORMAL),
        ("Resources", Waits.NORMAL),
        ("QOSMaxJobsPerUserLimit", Waits.NORMAL),
        ("AssocGrpCpuLimit", Waits.NORMAL),
        ("JobHeldUser", Waits.HELD),
        ("JobHeldAdmin", Waits.HELD),
        ("launch_failed_requeued_held", Waits.HELD),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-4]", Waits.DRAINED),
        (
            "(Nodes required for job are DOWN, DRAINED or reserved for other jobs)",
            Waits.DRAINED,
        ),
        ("PartitionDown", Waits.DRAINED),
        ("PartitionNodeLimit", Waits.UNSATISFIABLE),
        ("PartitionTimeLimit", Waits.UNSATISFIABLE),
        ("BadConstraints", Waits.UNSATISFIABLE),
        ("AssocMaxNodePerJobLimit", Waits.UNSATISFIABLE),
        ("QOSMaxWallDurationPerJobLimit", Waits.UNSATISFIABLE),
        ("DependencyNeverSatisfied", Waits.UNSATISFIABLE),
    ],
)
def test_why_a_pending_job_waits(reason: str, waits: Waits) -> None:
    assert status_of(State="PENDING", NodeList="", Reason=reason).waits is waits
    assert status_of(State="RUNNING", Reason=reason).waits is Waits.NORMAL


def test_where_jobs_write_to() -> None:
    widths = [int(field.split(":")[1]) for field in parse.OUTPUT_FORMAT.split(",")]
    fields = ("17", "study-0001-0", "/sweeps/a b/trials/0001/attempt-0/job.log")
    line = "".join(field.ljust(width) for field, width in zip(fields, widths, strict=True))
    assert parse.output_rows(f"a banner\n{line}\n") == [(fields[0], fields[1], Path(fields[2]))]


def test_a_completing_job_still_holds_its_nodes() -> None:
    assert status_of(State="COMPLETING").state.alive


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("COMPLETED", JobState.ENDED),
        ("FAILED", JobState.ENDED),
        ("CANCELLED", JobState.CANCELLED),
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("TIMEOUT", JobState.TIME_LIMIT),
        ("NODE_FAIL", JobState.NODE_FAILED),
        ("PREEMPTED", JobState.PREEMPTED),
        ("OUT_OF_MEMORY", JobState.HOST_MEMORY),
        ("A_STATE_OF_TOMORROW", JobState.RUNNING),
    ],
)
def test_states(word: str, state: JobState) -> None:
    assert status_of(State=word).state is state


def test_a_job_that_took_more_memory_than_slurm_gave_it() -> None:
    """As squeue and sacct of Slurm 22.05 say it where ``ConstrainRAMSpace`` is on: a signal that is none, 125."""
    shown = status_of(State="OUT_OF_MEMORY", exit_code="253", Reason="OutOfMemory")
    assert (shown.state, shown.reason) == (JobState.HOST_MEMORY, "OUT_OF_MEMORY OutOfMemory")
    (row,) = parse.sacct_rows("1|OUT_OF_MEMORY|0:125|0:0|1000|1001|1003|00:00:00|n1|token|study-0000-0\n")
    accounted = parse.status(row, 1000.0)
    assert (accounted.state, accounted.exit_code) == (JobState.HOST_MEMORY, shown.exit_code)


def test_a_job_that_was_requeued_is_preempted_at_the_time_of_the_requeue() -> None:
    status = status_of(State="CANCELLED", RestartCnt="1", SubmitTime="1500", NodeList="")
    assert status.state is JobState.PREEMPTED
    assert status.ended_at == 1500.0


def test_a_requeued_job_that_is_cancelled_while_completing_ends_then() -> None:
    """Slurm renews SubmitTime only when the job is pending again; until then it is the first submission's."""
    status = status_of(State="CANCELLED", RestartCnt="1", SubmitTime="1000", EndTime="1234")
    assert status.state is JobState.PREEMPTED
    assert status.ended_at == 1234.0


def test_a_requeued_job_that_still_lives_does_not_move_the_start_on_record() -> None:
    """Slurm shows a StartTime that is about now for it; the driver keeps the first one it was told."""
    status = status_of(State="COMPLETING", RestartCnt="1", StartTime="1999")
    assert status.state.alive
    assert status.started_at is None


def test_a_job_cancelled_in_the_queue_used_no_node_hours() -> None:
    status = status_of(State="CANCELLED", NodeList="", StartTime="2000")
    assert (status.started_at, status.nodes) == (None, ())


@pytest.mark.parametrize(("raw", "code"), [("0", 0), ("256", 1), ("768", 3), ("9", 137), ("15", 143), ("139", 139)])
def test_exit_codes_come_as_the_status_of_wait(raw: str, code: int) -> None:
    assert status_of(State="FAILED", exit_code=raw).exit_code == code


def job_id_of(
    text: str, *, token: str = "mine", submitted_at: float = 1000.0, job_id: str = "17", log: str = ""
) -> str:
    """The id of the row that is the job ``study-0001-0``, "" where none is."""
    folder = Path(log or "/sweeps/mine/job.log").parent
    sought = Ticket(name="study-0001-0", folder=folder, token=token, job_id=job_id, submitted_at=submitted_at)
    row = parse.find(parse.squeue_rows(text), sought)
    return row.job_id if row else ""


def test_a_job_that_was_given_the_id_of_a_forgotten_one_is_not_that_one() -> None:
    lines = [
        squeue_line(JobID="17", Name="study-0001-0", Comment="other"),
        squeue_line(JobID="18", Name="study-0001-0", Comment="mine"),
        squeue_line(JobID="19", Name="study-0002-0", Comment="mine"),
    ]
    assert job_id_of("\n".join(lines)) == "18"
    assert job_id_of("\n".join([lines[0], lines[2]])) == ""


@pytest.mark.parametrize(
    ("changed", "known", "ours"),
    [
        ({"Name": "site-renamed-it"}, {}, True),
        ({"Name": "site-renamed-it"}, {"job_id": ""}, True),
        ({"Comment": "the operator wrote this"}, {}, True),
        ({"Comment": "billing=x", "Name": "renamed"}, {}, True),
        ({"Comment": "billing=x", "Name": "renamed"}, {"job_id": ""}, True),
        ({"Comment": "(null)", "Name": "renamed"}, {}, True),
        ({"Comment": "earlier", "SubmitTime": "990"}, {"job_id": ""}, False),
        ({"Comment": "earlier", "SubmitTime": "990"}, {"job_id": "", "submitted_at": 0.0}, False),
        ({"Comment": "another", "STDOUT": "/sweeps/other/job.log"}, {}, False),
        ({"Comment": "another", "STDOUT": "/sweeps/other/job.log", "Name": "study-0002-0"}, {}, False),
        ({"Comment": "another", "SubmitTime": "900"}, {}, False),
        ({"Comment": "x", "STDOUT": "/sweeps/100%%/job.log"}, {"log": "/sweeps/100%/job.log"}, True),
    ],
)
def test_a_renamed_or_commented_job_is_known_by_its_id_and_its_log(
    changed: dict[str, str], known: dict[str, Any], ours: bool
) -> None:
    line = squeue_line(**{"Comment": "mine", "STDOUT": "/sweeps/mine/job.log", **changed})
    assert job_id_of(line, **known) == ("17" if ours else "")


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("17|COMPLETED|0:0|0:0|1000|1010|2000|00:00:00|n1|billing=x|renamed", True),
        ("17|COMPLETED|0:0|0:0|1000|1010|2000|00:00:00|n1||renamed", True),
        ("18|COMPLETED|0:0|0:0|1000|1010|2000|00:00:00|n1|billing=x|renamed", False),
        ("17|COMPLETED|0:0|0:0|9000|9010|9900|00:00:00|n1|billing=x|renamed", False),
        (f"17|COMPLETED|0:0|0:0|1000|1010|2000|00:00:00|n1|{'a' * 32}|study-0002-0", False),
    ],
    ids=["renamed and commented", "without its comment", "another id", "its id given out again", "another's token"],
)
def test_the_accounting_knows_a_renamed_and_commented_job_by_its_id_and_time(line: str, ours: bool) -> None:
    sought = Ticket(name="study-0001-0", folder=Path("/sweeps/mine"), token="mine", job_id="17", submitted_at=1001.0)
    assert (parse.find(parse.sacct_rows(line + "\n"), sought) is not None) == ours


def test_without_a_token_nothing_was_ever_submitted() -> None:
    """Somebody else's job of the same name, on a cluster that keeps no comments."""
    assert job_id_of(squeue_line(Comment="(null)", SubmitTime="1000"), token="") == ""


def test_what_sbatch_refused_was_not_submitted_although_squeue_shows_it() -> None:
    """Slurm keeps a job whose constraints no node meets as one that failed, under the name and token it was given."""
    refused = {"State": "FAILED", "Reason": "BadConstraints", "NodeList": "", "exit_code": "1", "Comment": "mine"}
    assert job_id_of(squeue_line(**refused)) == ""
    assert job_id_of(squeue_line(**{**refused, "Reason": "NonZeroExitCode", "NodeList": "n1"})) == "17"


def test_a_job_of_no_known_id_is_known_by_its_name_and_time_where_the_cluster_shows_nothing_else() -> None:
    line = squeue_line(Comment="(null)", STDOUT="(null)", SubmitTime="1000")
    assert job_id_of(line, submitted_at=1030.0, job_id="") == "17"
    assert job_id_of(line, submitted_at=5000.0, job_id="") == ""


@pytest.mark.parametrize("job_id", ["", "16"])
def test_the_job_of_the_same_name_of_another_sweep_is_not_ours(job_id: str) -> None:
    """Two sweeps of one study, in two folders, on a cluster that keeps no comments: their jobs have the same names."""
    line = squeue_line(Comment="(null)", STDOUT="/other/job.log", SubmitTime="1000")
    assert job_id_of(line, submitted_at=1000.0, job_id=job_id) == ""
    unmarked = squeue_line(Comment="(null)", STDOUT="(null)", SubmitTime="1000")
    assert job_id_of(unmarked, submitted_at=1000.0, job_id="16") == "", "ours has an id, and it is not this one"


def test_the_row_with_the_known_id_counts_whatever_another_one_says() -> None:
    """A newer job with our name, comment and log would be taken for ours by what people can write."""
    lines = [
        squeue_line(JobID="17", Comment="billing", Name="renamed", STDOUT="/sweeps/mine/job.log"),
        squeue_line(JobID="18", Comment="mine", STDOUT="/sweeps/mine/job.log", SubmitTime="1500"),
    ]
    assert job_id_of("\n".join(lines)) == "17"


@pytest.mark.parametrize(
    ("used", "paused"),
    [("16:30", 0.0), ("15:50", 40.0), ("1-00:16:30", 0.0), ("INVALID", 0.0), ("0:16:29", 0.0)],
)
def test_a_job_that_was_suspended_used_less_time_than_passed(used: str, paused: float) -> None:
    """1010 to 2000 are 16:30; a second more or less is how Slurm rounds."""
    assert status_of(State="COMPLETED", TimeUsed=used).paused_seconds == paused
    (row,) = parse.sacct_rows("1|COMPLETED|0:0|0:0|1000|1010|2000|00:00:40|n1|token|study-0000-0\n")
    assert parse.status(row, 1000.0).paused_seconds == 40.0


def test_a_suspended_job_runs_and_stands_still() -> None:
    status = status_of(State="SUSPENDED")
    assert (status.state, status.paused, status.paused_seconds) == (JobState.RUNNING, True, 0.0)
    assert not status_of().paused


def test_sacct_rows_take_the_worst_exit_code() -> None:
    text = (
        "17|COMPLETED|0:0|3:0|1000|1010|1200|00:00:00|n[1-2]|token|a|b\n"
        "18|CANCELLED by 0|0:15|0:0|1000|None|1200|00:00:00|None assigned||c\n"
    )
    first, second = parse.sacct_rows(text)
    assert (first.name, first.exit_code, first.nodes) == ("a|b", 3, ("n1", "n2"))
    assert parse.status(first, 1000.0).step_failed, "the job itself says 0"
    status = parse.status(second, 1000.0)
    assert not status.step_failed
    assert (status.state, status.exit_code, status.started_at) == (JobState.CANCELLED, 143, None)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("(null)", []),
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1,3-4],login-2", ["n1", "n3", "n4", "login-2"]),
        ("r[1-2]n[1-2]x", ["r1n1x", "r1n2x", "r2n1x", "r2n2x"]),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert list(hostnames(text)) == names


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=20, unique=True), st.integers(1, 4))
def test_a_compressed_host_list_expands_to_the_same_nodes(numbers: list[int], width: int) -> None:
    inside = ",".join(f"{n:0{width}}" for n in numbers)
    assert list(hostnames(f"dgx-[{inside}]")) == [f"dgx-{n:0{width}}" for n in numbers]


@given(st.text(st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp")), max_size=60))
def test_any_reason_leaves_the_other_fields_alone(reason: str) -> None:
    (row,) = parse.squeue_rows(squeue_line(Reason=reason))
    assert (row.job_id, row.comment, row.nodes) == ("17", "token", ("n1", "n2"))


@given(st.text(max_size=300))
def test_no_text_makes_the_parsers_fail(text: str) -> None:
    """Warnings and banners that a site's wrapper prints are not jobs."""
    for row in [*parse.sacct_rows(text), *parse.squeue_rows(text)]:
        parse.status(row, 0.0)
    parse.detail_exit_code(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[1-2,x-y,07-08]", ["n1", "n2", "nx-y", "n07", "n08"]),
        ("n[1-", ["n", "1-"]),
        ("n[²-³]", ["n²-³"]),
        ("n[5-1]", []),
    ],
)
def test_node_lists_that_are_none_stay_text(text: str, names: list[str]) -> None:
    assert list(hostnames(text)) == names


def test_a_node_list_of_billions_is_cut() -> None:
    assert len(list(hostnames("n[1-999999999999]m[1-999999999999]"))) == 65_536


def test_damaged_rows_are_read_as_far_as_they_make_sense() -> None:
    """A counter that is no number, digits of other scripts, a line separator within a reason."""
    rows = parse.squeue_rows(squeue_line(RestartCnt="x", StartTime="²", Reason="a\u2028b"))
    assert [(r.restarts, r.started, r.reason) for r in rows] == [(0, None, "a\u2028b")]
    assert parse.squeue_rows(squeue_line(JobID="٣")) == []
    assert parse.detail_exit_code(f"ExitCode={'9' * 5000}:0") is None


def test_a_refusal_is_told_in_the_commands_own_words_not_by_its_hint_at_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = tmp_path / "sbatch"
    said = "sbatch: unrecognized option '--segment=2'", 'Try "sbatch --help" for more information'
    sbatch.write_text("\n".join(["#!/bin/bash", *(f"echo {shlex.quote(line)} >&2" for line in said), "exit 255", ""]))
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LauncherError, match=r"^sbatch failed: sbatch: unrecognized option '--segment=2'$"):
        ask("sbatch", "--test-only")


@pytest.mark.parametrize(
    ("shown", "minutes", "words"),
    [
        ("ReservationName=a StartTime=0 EndTime=4000 Flags=", 60, "the reservation a ends in 50"),
        ("ReservationName=a StartTime=0 EndTime=4000 Flags=", 50, ""),
        ("ReservationName=a StartTime=0 EndTime=4000 Flags=", 0, ""),
        ("ReservationName=a StartTime=0 EndTime=4000 Flags=FLEX,IGNORE_JOBS", 60, ""),
        ("ReservationName=a StartTime=3000 EndTime=4000 Flags=", 20, "the reservation a ends in 17"),
        ("ReservationName=a StartTime=0 EndTime=500 Flags=", 20, "the reservation a ends in 0"),
        ("ReservationName=a EndTime=2000 StartTime=0\nReservationName=b EndTime=90000 StartTime=0", 60, ""),
        ("No reservations in the system", 60, ""),
        ("", 60, ""),
    ],
)
def test_a_reservation_ends_too_soon(shown: str, minutes: float, words: str) -> None:
    sentence = beyond_reservation(shown, minutes, now=1000.0)
    assert words in sentence
    assert bool(sentence) == bool(words)
