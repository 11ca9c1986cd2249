"""What jobs write down of themselves: damaged, swapped or another attempt's, it ends no sweep and is not believed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_tune.base.files import parse
from lora_tune.base.host import Process, boot, steady
from lora_tune.base.paths import AttemptPaths
from lora_tune.launchers import job_records, local
from lora_tune.launchers.base import JobState
from lora_tune.launchers.job_records import describe, read_records
from lora_tune.launchers.job_runner import NOT_CLAIMED, read_command, run_job, run_job_once
from lora_tune.launchers.local import LocalLauncher
from lora_tune.logs.failures import FailureKind, diagnose
from lora_tune.store import LEASE_SECONDS
from lora_tune.workloads.base import Job
from tests.conftest import REPOSITORY
from tests.contracts.launcher import WAIT, job_of, log_until, poll_until, ticket_of, write_command
from tests.waiting import wait_for

DAMAGE = {
    "empty": b"",
    "zeros": b"\0" * 512,
    "cut": b'{"pid": 12, "start_ti',
    "no object": b"[]",
    "fields missing": b"{}",
    "wrong types": b'{"pid": "x", "start_ticks": [], "at": null, "exit_code": {}, "host": 3}',
    "absurd numbers": b'{"pid": 1e999, "start_ticks": -1, "at": NaN, "exit_code": 99999999999999999999999}',
}
MINE, OTHER = "a" * 32, "b" * 32


def mine(job: Job) -> Job:
    return replace(job, token=MINE)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["claim.json", "started.json", "ended.json"])
def test_a_damaged_record_is_a_fact_about_its_attempt_also_for_the_next_driver(
    name: str, damage: str, tmp_path: Path
) -> None:
    """After a power cut the newest files of a job may be empty."""
    job = job_of(tmp_path / "x", "")
    files = AttemptPaths(job.folder)
    gone = {**describe(2**22, ""), "start_ticks": 1}
    files.claim.write_text(json.dumps(gone))
    files.started.write_text(json.dumps(gone))
    (job.folder / name).write_bytes(DAMAGE[damage])
    for launcher in (LocalLauncher(), LocalLauncher(gpus=("0",))):
        status = launcher.poll([ticket_of(job)])[job.name]
        assert status.state is JobState.LOST
        assert name in status.reason
        launcher.cancel(ticket_of(job))
        launcher.cancel(ticket_of(job), force=True)


def test_a_running_job_whose_started_record_is_damaged_is_still_running(tmp_path: Path) -> None:
    launcher, job = LocalLauncher(), job_of(tmp_path / "x", WAIT)
    ticket = ticket_of(job, launcher.submit(job))
    log_until(job, "waiting")
    whole = AttemptPaths(job.folder).started.read_bytes()
    AttemptPaths(job.folder).started.write_bytes(b"")
    assert launcher.poll([ticket])[job.name].state is JobState.RUNNING
    AttemptPaths(job.folder).started.write_bytes(whole)
    launcher.cancel(ticket, force=True)
    poll_until(launcher, ticket, JobState.ENDED)


def test_records_of_another_attempt_are_not_believed(tmp_path: Path) -> None:
    """Somebody copied a folder, or put a backup back: the files tell of a job that ended well, and not of this one."""
    launcher, other = LocalLauncher(), replace(job_of(tmp_path / "other", ""), token=OTHER)
    poll_until(launcher, replace(ticket_of(other, launcher.submit(other)), token=OTHER), JobState.ENDED)
    shutil.copytree(other.folder, tmp_path / "mine")
    status = launcher.poll([replace(ticket_of(mine(job_of(tmp_path / "mine", ""))), token=MINE)])[other.name]
    assert status.state is JobState.LOST
    assert f"claim.json is of another attempt (token {OTHER}), not of this one (token {MINE})" in status.reason
    assert status.exit_code is None


def test_every_record_of_a_job_carries_its_token(tmp_path: Path) -> None:
    launcher, job = LocalLauncher(), mine(job_of(tmp_path / "x", "import os"))
    poll_until(launcher, replace(ticket_of(job, launcher.submit(job)), token=MINE), JobState.ENDED)
    files = AttemptPaths(job.folder)
    for path in (files.job, files.claim, files.started, files.ended):
        assert json.loads(path.read_text())["token"] == MINE


def test_a_runner_leaves_the_folder_of_another_attempt_alone(tmp_path: Path) -> None:
    job = replace(job_of(tmp_path / "x", f"open({str(tmp_path / 'ran')!r}, 'w')"), token=OTHER)
    write_command(job)
    assert run_job(str(job.folder), MINE) == NOT_CLAIMED
    assert not AttemptPaths(job.folder).claim.exists()
    assert not (tmp_path / "ran").exists()


def test_a_run_that_ended_well_is_no_failure_when_its_scheduler_starts_it_again(tmp_path: Path) -> None:
    """A controller that was killed just then has not heard of the end: a whole result was run a second time."""
    launcher, job = LocalLauncher(), mine(job_of(tmp_path / "x", "import os"))
    poll_until(launcher, replace(ticket_of(job, launcher.submit(job)), token=MINE), JobState.ENDED)
    assert run_job_once(str(job.folder), MINE) == NOT_CLAIMED


@pytest.mark.parametrize("code", [None, 143, -15], ids=["killed", "told to end", "ended by a signal"])
def test_a_run_that_was_cut_short_fails_when_its_scheduler_starts_it_again(tmp_path: Path, code: int | None) -> None:
    job = mine(job_of(tmp_path / "x", "import os"))
    attempt = AttemptPaths(job.folder)
    write_command(job)
    attempt.claim.write_text(json.dumps(describe(os.getpid(), MINE)))
    if code is not None:
        attempt.ended.write_text(json.dumps({"token": MINE, "exit_code": code, "at": time.time()}))
    with pytest.raises(SystemExit, match="a second time"):
        run_job_once(str(job.folder), MINE)


@pytest.mark.parametrize("damage", [*DAMAGE, "absent"])
def test_a_runner_without_a_readable_command_runs_nothing(
    damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if damage != "absent":
        (tmp_path / "command.json").write_bytes(DAMAGE[damage])
    assert run_job(str(tmp_path)) == NOT_CLAIMED
    assert "command.json" in capfd.readouterr().err
    assert not (tmp_path / "claim.json").exists()


def test_a_runner_that_cannot_write_its_files_says_nothing_of_the_command(tmp_path: Path) -> None:
    """The disk was full for a moment: "command not found" failed the trial for good."""
    job = mine(job_of(tmp_path / "x", "import os"))
    write_command(job)
    job.log.mkdir()
    with pytest.raises(OSError, match=r"job\.log"):
        run_job(str(job.folder), MINE)
    ended = read_records(AttemptPaths(job.folder), MINE).ended
    assert ended is not None
    assert diagnose("", exit_code=ended.exit_code).kind is FailureKind.UNKNOWN, "the trial is run again"


def test_how_long_a_job_ran_is_told_by_the_clock_that_nobody_sets(tmp_path: Path) -> None:
    """The wall clock is set back by an hour while the job runs."""
    job = mine(job_of(tmp_path / "x", WAIT))
    files = AttemptPaths(job.folder)
    before = {**describe(os.getpid(), MINE)}
    files.claim.write_text(json.dumps(before))
    ended = {"token": MINE, "exit_code": 0, "at": before["at"] - 3590.0, "seconds": 10.0, "clock_steps": [-3600.0]}
    files.ended.write_text(json.dumps(ended))
    status = LocalLauncher().poll([replace(ticket_of(job), token=MINE)])[job.name]
    assert status.seconds == 10.0
    assert status.clock_steps == (-3600.0,)
    assert status.ended_at == pytest.approx(before["at"] + 10.0)


def test_a_step_of_the_wall_clock_is_written_down_with_the_end(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time\n"
        "true, started = time.time, pathlib.Path(sys.argv[1], 'started.json')\n"
        "time.time = lambda: true() - 7200 * started.exists()\n"
        "from lora_tune.launchers.job_runner import run_job\n"
        "sys.exit(run_job(sys.argv[1]))\n"
    )
    job = job_of(tmp_path / "x", "import time; time.sleep(1.5)")
    write_command(job)
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", program, str(job.folder)])
    os.waitpid(pid, 0)
    ended = read_records(AttemptPaths(job.folder), "").ended
    assert ended is not None
    assert ended.clock_steps == (pytest.approx(-7200, abs=0.1),)
    assert ended.seconds is not None
    assert ended.seconds > 1.4


def test_a_process_is_known_by_its_start_and_its_place() -> None:
    this = Process.of(os.getpid())
    assert (this.alive, this.gone, this.elsewhere) == (True, False, False)
    ended = replace(this, start_ticks=1)
    assert (ended.alive, ended.gone) == (False, True), "its number is another's now"
    for place in ("yesterday", "yesterday/pid:[1]", f"{boot()}/pid:[1]"):
        assert replace(this, place=place).elsewhere
        assert not replace(ended, place=place).gone, "nobody can say so from here"
    for place in (boot(), ""):
        assert replace(this, place=place).alive, "a record of an earlier release"


NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
START = """
import sys, time
from pathlib import Path
from lora_tune.launchers.local import LocalLauncher
from tests.contracts.launcher import WAIT, job_of
LocalLauncher().submit(job_of(Path(sys.argv[1]), WAIT))
time.sleep(600)
"""


BOOTED = ["sh", "-c", 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"']
"""A machine of this one's name that booted another time: ``$0`` is a file with its boot id."""


@pytest.mark.parametrize("another_host", [False, True], ids=["a container", "another host of this name"])
def test_a_job_of_another_pid_namespace_runs_while_it_touches_its_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another_host: bool
) -> None:
    """Its driver was killed and its container was not: it was called lost, and its trial ran twice at a time."""
    (tmp_path / "boot").write_text(f"{uuid.uuid4()}\n")
    booted = [*BOOTED, str(tmp_path / "boot")] if another_host else []
    later = [0.0]
    monkeypatch.setattr(local, "steady", lambda: steady() + later[0])
    folder = tmp_path / "x"
    container = subprocess.Popen([*NAMESPACE, *booted, sys.executable, "-c", START, str(folder)], cwd=REPOSITORY)
    try:
        claim = wait_for(lambda: read_records(AttemptPaths(folder), "").claim, 60, "its claim")
        assert (claim.process.place.partition("/")[0] != boot()) == another_host
        job = job_of(folder, "")
        launcher, ticket = LocalLauncher(), ticket_of(job, str(claim.process.pid))
        log_until(job, "waiting")
        assert launcher.poll([ticket])[job.name].state is JobState.RUNNING
        touched = AttemptPaths(folder).claim.stat().st_mtime_ns
        wait_for(lambda: AttemptPaths(folder).claim.stat().st_mtime_ns > touched, what="a sign of life")
        later[0] += 2 * LEASE_SECONDS
        assert launcher.poll([ticket])[job.name].state is JobState.RUNNING
    finally:
        container.kill()
        container.wait()
    launcher.poll([ticket])  # its last touch may be newer than the last look
    later[0] += 2 * LEASE_SECONDS
    assert launcher.poll([ticket])[job.name].state is JobState.LOST, "its namespace ended, with all that was in it"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
NAMES = ("token", "pid", "start_ticks", "host", "boot", "place", "at", "steady", "exit_code", "seconds", "clock_steps")
COMMAND = ("token", "argv", "environment", "cwd", "log")


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(NAMES), JSON))
def test_a_record_of_any_values_is_read_or_refused(content: dict[str, object]) -> None:
    for read in (job_records._process, job_records._end):
        record = read(parse("x", json.dumps(content).encode()).content or {})
        assert record is None or record.at == content["at"]


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(content=st.dictionaries(st.sampled_from(COMMAND), JSON))
def test_a_command_of_any_values_is_read_or_refused(
    content: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("command") / "command.json"
    path.write_text(json.dumps(content))
    found = read_command(path)
    assert isinstance(found, str) or list(found.argv) == content["argv"]
