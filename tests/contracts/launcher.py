"""What every launcher owes the driver. A test module subclasses it and provides the ``launcher`` fixture."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from lora_tune.base.files import write_json
from lora_tune.base.paths import AttemptPaths
from lora_tune.launchers.base import JobState, JobStatus, Launcher, Ticket
from lora_tune.launchers.job_runner import command_record
from lora_tune.workloads.base import Job, Resources
from tests.waiting import wait_for

SAY = "import os, sys; print('hello', os.environ.get('GREETED')); sys.exit(int(os.environ.get('CODE', 0)))"
WAIT = "import time; print('waiting', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)


def job_of(folder: Path, program: str, *, name: str = "study-0000-0", **environment: str) -> Job:
    """A Python program as a job in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    log = AttemptPaths(folder).log
    argv = (sys.executable, "-c", program)
    resources = Resources(nodes=1, gpus_per_node=0, minutes=10)
    return Job(name=name, folder=folder, argv=argv, environment=environment, log=log, resources=resources)


def write_command(job: Job) -> None:
    """What a launcher leaves in the job's folder for its runner, of a job that no launcher submits."""
    write_json(AttemptPaths(job.folder).job, command_record(job, job.environment))


def ticket_of(job: Job, job_id: str = "", submitted_at: float | None = None) -> Ticket:
    """What the driver writes down of a submitted job."""
    at = time.time() if submitted_at is None else submitted_at
    return Ticket(name=job.name, folder=job.folder, job_id=job_id, submitted_at=at)


def poll_until(launcher: Launcher, ticket: Ticket, *states: JobState, seconds: float = 30) -> JobStatus:
    """Poll one job until it is in one of ``states``; fails after ``seconds``."""
    end = time.monotonic() + seconds
    while True:
        status = launcher.poll([ticket])[ticket.name]
        if status.state in states:
            return status
        assert time.monotonic() < end, f"not {states} within {seconds} s: {status}"
        time.sleep(0.05)


def log_until(job: Job, text: str, seconds: float = 30) -> None:
    """Wait until the job's log holds ``text``."""
    end = time.monotonic() + seconds
    while not (job.log.exists() and text in job.log.read_text()):
        assert time.monotonic() < end, f"no {text!r} in {job.log} within {seconds} s"
        time.sleep(0.05)


class LauncherContract:
    """The port's promises."""

    @pytest.fixture
    def launcher(self) -> Launcher:
        raise NotImplementedError

    def test_a_job_runs_to_its_end_and_its_output_is_in_the_log(self, launcher: Launcher, tmp_path: Path) -> None:
        job = job_of(tmp_path / "a", SAY, GREETED="world")
        before = time.time()
        ticket = ticket_of(job, launcher.submit(job), before)
        status = poll_until(launcher, ticket, JobState.ENDED)
        assert "hello world" in job.log.read_text()
        assert status.exit_code == 0
        assert status.job_id == ticket.job_id
        assert status.nodes
        assert status.started_at is not None
        assert status.ended_at is not None
        assert before - 2 <= status.started_at <= status.ended_at <= time.time() + 2

    def test_a_failing_job_ends_with_its_exit_code(self, launcher: Launcher, tmp_path: Path) -> None:
        job = job_of(tmp_path / "a", SAY, CODE="3")
        status = poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)
        assert status.exit_code not in (0, None)

    def test_a_running_job_is_running_and_says_where(self, launcher: Launcher, tmp_path: Path) -> None:
        job = job_of(tmp_path / "a", WAIT)
        ticket = ticket_of(job, launcher.submit(job))
        status = poll_until(launcher, ticket, JobState.RUNNING)
        assert status.nodes
        assert status.ended_at is None
        launcher.cancel(ticket, force=True)

    def test_a_cancelled_job_is_gone(self, launcher: Launcher, tmp_path: Path) -> None:
        job = job_of(tmp_path / "a", WAIT)
        ticket = ticket_of(job, launcher.submit(job))
        log_until(job, "waiting")
        launcher.cancel(ticket)
        poll_until(launcher, ticket, JobState.CANCELLED, JobState.ENDED)

    def test_force_ends_what_ignores_a_polite_request(self, launcher: Launcher, tmp_path: Path) -> None:
        job = job_of(tmp_path / "a", STUBBORN)
        ticket = ticket_of(job, launcher.submit(job))
        log_until(job, "deaf")
        launcher.cancel(ticket)
        launcher.cancel(ticket, force=True)
        poll_until(launcher, ticket, JobState.CANCELLED, JobState.ENDED)

    def test_cancelling_what_is_over_is_no_error(self, launcher: Launcher, tmp_path: Path) -> None:
        job = job_of(tmp_path / "a", SAY)
        ticket = ticket_of(job, launcher.submit(job))
        poll_until(launcher, ticket, JobState.ENDED)
        launcher.cancel(ticket)
        launcher.cancel(ticket, force=True)

    def test_a_job_whose_id_was_never_recorded_is_found_by_name(self, launcher: Launcher, tmp_path: Path) -> None:
        job = job_of(tmp_path / "a", WAIT)
        at = time.time()
        launcher.submit(job)
        ticket = ticket_of(job, "", at)
        poll_until(launcher, ticket, JobState.RUNNING)
        launcher.cancel(ticket, force=True)

    def test_what_was_never_submitted_is_lost(self, launcher: Launcher, tmp_path: Path) -> None:
        ticket = ticket_of(job_of(tmp_path / "a", SAY))
        assert launcher.poll([ticket])[ticket.name].state is JobState.LOST

    def test_submitting_twice_runs_once(self, launcher: Launcher, tmp_path: Path) -> None:
        program = "import pathlib, time; pathlib.Path('count').open('a').write('x'); time.sleep(600)"
        job = job_of(tmp_path / "a", f"import os; os.chdir({str(tmp_path)!r}); " + program)
        launcher.submit(job)
        second = ticket_of(job, launcher.submit(job))
        poll_until(launcher, second, JobState.RUNNING)
        count = tmp_path / "count"
        assert wait_for(lambda: count.exists() and count.read_text(), 120) == "x"
        launcher.cancel(second, force=True)

    def test_no_tickets_need_no_question(self, launcher: Launcher) -> None:
        assert launcher.poll([]) == {}

    def test_many_jobs_are_told_apart(self, launcher: Launcher, tmp_path: Path) -> None:
        jobs = [job_of(tmp_path / f"j{i}", SAY, name=f"study-{i:04d}-0", CODE=str(i % 2)) for i in range(4)]
        tickets = [ticket_of(job, launcher.submit(job)) for job in jobs]
        codes = [poll_until(launcher, ticket, JobState.ENDED).exit_code for ticket in tickets]
        assert [bool(code) for code in codes] == [False, True, False, True]
