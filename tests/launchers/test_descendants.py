"""The local launcher owns every process of a trial: whatever a trial starts, nothing of it outlives the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_tune.base.paths import AttemptPaths
from lora_tune.launchers.base import JobState
from lora_tune.launchers.local import LocalLauncher
from lora_tune.launchers.processes import _cgroup_name, _members, kill_strays
from lora_tune.workloads.base import Job
from tests.contracts.launcher import job_of, log_until, poll_until, ticket_of, write_command
from tests.waiting import wait_for

HELPERS = """
import os, signal, subprocess, sys, time

def helper(kind, **options):
    wait = "print(flush=True); time.sleep(600)"
    program = "import signal, sys, time; sys.argv[1] == 'deaf' and signal.signal(15, 1); "
    command = [sys.executable, "-c", program + wait, kind]
    subprocess.Popen(command, stdout=subprocess.PIPE, **options).stdout.readline()

helper("background")
helper("deaf", start_new_session=True)
if os.fork() == 0:
    os.setsid()
    helper("orphan of a daemon", env={})
    os._exit(0)
os.wait()
print("all there", flush=True)
"""
"""A trial with a helper in its own group, one in a session of its own that ignores SIGTERM, and one with nothing in its
environment whose parent has ended: reader processes, servers and daemons that real trainings start."""

COUNT = 3


@pytest.fixture(params=["cgroup", "subreaper"])
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By what the job owns its processes; a cgroup is used where this user may make one."""
    if request.param == "subreaper":
        monkeypatch.setenv("SLURM_JOB_ID", "1")  # as inside an allocation: Slurm's own cgroup holds the job
    return str(request.param)


@pytest.fixture
def helpers(tmp_path: Path) -> Iterator[list[int]]:
    """Living helpers of this test's jobs, told by their working folder; what a failed test leaves is killed."""
    found = _Helpers(tmp_path)
    yield found
    for pid in found.living():
        os.kill(pid, signal.SIGKILL)


class _Helpers(list[int]):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def living(self) -> list[int]:
        return [pid for pid in (int(p.name) for p in Path("/proc").glob("[0-9]*")) if self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        try:
            there = Path(f"/proc/{pid}/cwd").readlink().is_relative_to(self._folder)
            return there and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False


def job_with_helpers(folder: Path, then: str) -> Job:
    """A trial that starts its helpers in ``folder`` and then runs ``then``."""
    return job_of(folder, f"import os; os.chdir({str(folder)!r})\n{HELPERS}\n{then}")


def test_a_trial_that_ends_leaves_no_process(means: str, tmp_path: Path, helpers: _Helpers) -> None:
    launcher, job = LocalLauncher(), job_with_helpers(tmp_path / "x", "sys.exit(5)")
    status = poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)
    assert status.exit_code == 5
    assert "all there" in job.log.read_text()
    assert helpers.living() == []


def test_a_trial_that_is_killed_leaves_no_process(means: str, tmp_path: Path, helpers: _Helpers) -> None:
    launcher, job = LocalLauncher(), job_with_helpers(tmp_path / "x", "time.sleep(600)")
    ticket = ticket_of(job, launcher.submit(job))
    log_until(job, "all there")
    assert len(helpers.living()) == COUNT + 1
    launcher.cancel(ticket, force=True)
    assert poll_until(launcher, ticket, JobState.ENDED).exit_code == -signal.SIGKILL
    assert helpers.living() == []


def test_what_outlives_a_killed_job_is_killed_before_the_job_counts_as_lost(tmp_path: Path, helpers: _Helpers) -> None:
    """Its devices would be handed to the next trial while the survivors still compute on them."""
    launcher, job = LocalLauncher(), job_with_helpers(tmp_path / "x", "time.sleep(600)")
    ticket = ticket_of(job, launcher.submit(job))
    log_until(job, "all there")
    if not (grouped := AttemptPaths(job.folder).cgroup.exists()):
        pytest.skip("only a cgroup holds a process that has lost its parent and its environment")
    os.kill(json.loads(AttemptPaths(job.folder).claim.read_text())["pid"], signal.SIGKILL)
    poll_until(launcher, ticket, JobState.LOST)
    assert grouped
    assert helpers.living() == []


def test_without_a_cgroup_survivors_are_known_by_their_environment(
    tmp_path: Path, helpers: _Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    program = HELPERS.replace(", env={}", "")
    job = job_of(tmp_path / "x", f"import os; os.chdir({str(tmp_path / 'x')!r})\n{program}\ntime.sleep(600)")
    launcher = LocalLauncher()
    ticket = ticket_of(job, launcher.submit(job))
    log_until(job, "all there")
    os.kill(json.loads(AttemptPaths(job.folder).claim.read_text())["pid"], signal.SIGKILL)
    poll_until(launcher, ticket, JobState.LOST)
    assert helpers.living() == []


def test_another_job_keeps_its_processes(tmp_path: Path, helpers: _Helpers) -> None:
    launcher = LocalLauncher()
    one, other = (job_with_helpers(tmp_path / name, "time.sleep(600)") for name in ("one", "one-more"))
    tickets = [ticket_of(job, launcher.submit(job)) for job in (one, other)]
    for job in (one, other):
        log_until(job, "all there")
    launcher.cancel(tickets[0], force=True)
    poll_until(launcher, tickets[0], JobState.ENDED)
    assert len(helpers.living()) == COUNT + 1
    launcher.cancel(tickets[1], force=True)
    poll_until(launcher, tickets[1], JobState.ENDED)


def test_the_cgroup_of_a_job_is_removed(tmp_path: Path) -> None:
    launcher, job = LocalLauncher(), job_of(tmp_path / "x", "")
    poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)
    noted = AttemptPaths(job.folder).cgroup
    if not noted.exists():
        pytest.skip("this user may not make cgroups here")
    wait_for(lambda: not Path(noted.read_text()).exists(), what="the cgroup's end")


def test_a_process_that_runs_a_job_keeps_the_children_that_it_had_before(tmp_path: Path) -> None:
    """A caller of ours with a server of its own lost it with the first job that it ran."""
    program = (
        "import subprocess, sys\n"
        "from lora_tune.launchers.job_runner import run_job\n"
        "server = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "code = run_job(sys.argv[1])\n"
        "print(code, server.poll())\n"
        "server.kill()\n"
    )
    job = job_with_helpers(tmp_path / "x", "sys.exit(5)")
    write_command(job)
    done = subprocess.run([sys.executable, "-c", program, str(job.folder)], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["5", "None"]


def test_a_cgroup_that_is_none_is_not_believed(tmp_path: Path) -> None:
    """A trial can write any path in its folder, and a file of any numbers where that leads."""
    attempt = AttemptPaths(tmp_path / "x")
    attempt.folder.mkdir()
    false = tmp_path / _cgroup_name(attempt)
    false.mkdir()
    attempt.cgroup.write_text(str(false))
    with subprocess.Popen(["sleep", "60"]) as bystander:
        (false / "cgroup.procs").write_text(f"{bystander.pid}\n")
        assert not kill_strays(attempt)
        assert bystander.poll() is None
        bystander.kill()


def test_processes_of_other_namespaces_are_nobody_to_signal(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("0\n12\n0\n")
    assert _members(tmp_path) == {12}


def test_a_pipe_for_a_cgroup_stops_nobody(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path)
    os.mkfifo(attempt.cgroup)
    assert not kill_strays(attempt)
