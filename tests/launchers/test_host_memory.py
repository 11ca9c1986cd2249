"""A job that the kernel killed for want of memory says so: alone, in a pack, on this machine and under Slurm."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from lora_tune.config.tables import Site
from lora_tune.launchers.base import JobState, JobStatus, Launcher
from lora_tune.launchers.local import LocalLauncher
from lora_tune.launchers.processes import _mounted, oom_kills, process_cgroup
from lora_tune.launchers.slurm.launcher import SlurmLauncher
from lora_tune.logs.failures import FailureKind, diagnose
from lora_tune.workloads.base import Job
from tests.cluster import Cluster
from tests.contracts.launcher import job_of, poll_until, ticket_of, write_command
from tests.memory_limit import GREEDY, enter, little_memory

KILLED = "import os; os.kill(os.getpid(), 9)"
SURVIVES = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {GREEDY!r}]); sys.exit(7)"


def run_in(group: Path | None, job: Job) -> JobStatus:
    """The status of the job after it has run on a machine with the memory of ``group``; with all of it for None."""
    write_command(job)
    runner = [sys.executable, "-m", "lora_tune.launchers.job_runner", str(job.folder), job.token]
    subprocess.run(runner, preexec_fn=group and functools.partial(enter, group), timeout=60, check=False)
    return LocalLauncher().poll([ticket_of(job)])[job.name]


def test_a_job_that_takes_too_much_memory_is_not_told_as_one_that_somebody_killed(tmp_path: Path) -> None:
    with little_memory() as group:
        status = run_in(group, job_of(tmp_path / "a", GREEDY))
    assert (status.state, status.exit_code) == (JobState.HOST_MEMORY, -9)
    found = diagnose("step 1\n", state=status.state.value, exit_code=status.exit_code, reason=status.reason)
    assert found.kind is FailureKind.HOST_MEMORY
    assert "OOM killer" in found.line
    assert "--mem=0" in found.remedy
    assert "site.slots" in found.remedy


def test_a_job_of_which_a_part_was_killed_for_memory_and_that_went_on_ended_as_it_says(tmp_path: Path) -> None:
    with little_memory() as group:
        status = run_in(group, job_of(tmp_path / "a", SURVIVES))
    assert (status.state, status.exit_code) == (JobState.ENDED, 7)


def test_a_job_that_somebody_killed_is_not_told_as_short_of_memory(tmp_path: Path) -> None:
    status = run_in(None, job_of(tmp_path / "a", KILLED))
    assert (status.state, status.exit_code) == (JobState.ENDED, -9)


@pytest.mark.slurm
def test_slurm_that_confines_no_memory_says_nothing_of_it_and_the_jobs_own_runner_does(
    slurm: Cluster, tmp_path: Path
) -> None:
    node, *_ = slurm.nodes
    launcher: Launcher = SlurmLauncher(Site(launcher="slurm", gpus_per_node=8, nodelist=node))
    greedy, killed = job_of(tmp_path / "a", GREEDY, name="greedy"), job_of(tmp_path / "b", KILLED, name="killed")
    with little_memory() as group:
        enter(group, slurm.pid_of(node))
        poll_until(launcher, ticket_of(greedy, launcher.submit(greedy)), JobState.HOST_MEMORY)
    status = poll_until(launcher, ticket_of(killed, launcher.submit(killed)), JobState.ENDED)
    assert status.exit_code in (-9, 137)


@pytest.mark.parametrize(
    ("line", "mounted"),
    [
        ("41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", ("/sys/fs/cgroup", "/", [""])),
        ("35 31 0:32 /a /cg/memory rw - cgroup cgroup rw,memory", ("/cg/memory", "/a", ["rw", "memory"])),
        ("22 20 0:21 / /mnt/\udcff\u2028 rw,relatime shared:7 - nfs4 server:/a\\040b rw,addr=1", ("", "", [])),
        ("22 20 0:21 / /mnt rw - overlay", ("", "", [])),
        ("", ("", "", [])),
    ],
)
def test_a_line_of_mountinfo_of_any_form_is_read(line: str, mounted: tuple[str, str, list[str]]) -> None:
    assert _mounted(line) == mounted


def test_the_kernels_kills_are_counted_for_the_cgroup_of_this_process(tmp_path: Path) -> None:
    """A count that never grows would call every such death somebody's SIGKILL."""
    assert process_cgroup() is not None or process_cgroup("memory") is not None
    count = [sys.executable, "-c", "from lora_tune.launchers.processes import oom_kills; print(oom_kills())"]
    with little_memory() as group:
        within = functools.partial(enter, group)
        before = subprocess.run(count, preexec_fn=within, capture_output=True, text=True, check=True)
        greedy = subprocess.run([sys.executable, "-c", GREEDY], preexec_fn=within, check=False)
        assert greedy.returncode == -9
        after = subprocess.run(count, preexec_fn=within, capture_output=True, text=True, check=True)
    assert (int(before.stdout), int(after.stdout)) == (0, 1)
    assert oom_kills() >= 0
