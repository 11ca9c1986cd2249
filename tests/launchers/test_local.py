"""The launcher of this machine keeps the contract, and what is special about it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr
from submitit import LocalExecutor

from lora_tune.base.errors import LauncherError, SetupError
from lora_tune.base.host import host
from lora_tune.base.paths import AttemptPaths, without_head
from lora_tune.config.secrets import Secret
from lora_tune.config.study import Study
from lora_tune.launchers import make_launcher
from lora_tune.launchers.base import JobState, Launcher
from lora_tune.launchers.local import LocalLauncher
from lora_tune.workloads.base import Job, Resources
from tests.contracts.launcher import (
    STUBBORN,
    WAIT,
    LauncherContract,
    job_of,
    log_until,
    poll_until,
    ticket_of,
    write_command,
)
from tests.waiting import wait_for


class TestLocalLauncher(LauncherContract):
    @pytest.fixture
    def launcher(self) -> Launcher:
        return LocalLauncher()


@pytest.fixture
def launcher() -> Launcher:
    return LocalLauncher()


def test_a_launcher_made_anew_finds_the_running_job(launcher: Launcher, tmp_path: Path) -> None:
    job = job_of(tmp_path / "x", WAIT)
    launcher.submit(job)
    log_until(job, "waiting")
    another = LocalLauncher()
    assert another.poll([ticket_of(job)])[job.name].state is JobState.RUNNING
    another.cancel(ticket_of(job), force=True)
    poll_until(another, ticket_of(job), JobState.ENDED)


def test_a_hostile_environment_arrives_to_the_letter(launcher: Launcher, tmp_path: Path) -> None:
    value = "a 'quoted' $(word); \"and\" more\n\tand another"
    job = job_of(tmp_path / "a b'c", "import os; print(os.environ['GREETED'])", GREETED=value)
    poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)
    assert without_head(job.log.read_bytes()).decode() == value + "\n"


def test_a_job_that_vanished_without_a_word_is_lost(launcher: Launcher, tmp_path: Path) -> None:
    job = job_of(tmp_path / "x", WAIT)
    ticket = ticket_of(job, launcher.submit(job))
    log_until(job, "waiting")
    os.kill(json.loads(AttemptPaths(job.folder).claim.read_text())["pid"], signal.SIGKILL)
    poll_until(launcher, ticket, JobState.LOST)


def test_a_job_whose_claim_is_being_written_is_not_lost(launcher: Launcher, tmp_path: Path) -> None:
    job = job_of(tmp_path / "x", WAIT)
    AttemptPaths(job.folder).claim.touch()
    controller = ["sh", "-c", "sleep 60; :", str(AttemptPaths(job.folder).submitit)]
    with subprocess.Popen(controller, start_new_session=True) as process:
        starts, another = ticket_of(job, job_id=str(process.pid)), ticket_of(job, job_id=str(os.getpid()))
        assert launcher.poll([starts])[job.name].state is JobState.QUEUED
        assert launcher.poll([another])[job.name].state is JobState.LOST, "the number is another process's now"
        os.killpg(process.pid, signal.SIGKILL)
    assert launcher.poll([starts])[job.name].state is JobState.LOST


def test_a_command_that_does_not_exist_says_so_in_the_log(launcher: Launcher, tmp_path: Path) -> None:
    job = replace(job_of(tmp_path / "x", ""), argv=("no-such-command",))
    status = poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)
    assert status.exit_code == 127
    assert "no-such-command: cannot be started" in job.log.read_text()


def test_a_job_cancelled_before_it_starts_never_starts(launcher: Launcher, tmp_path: Path) -> None:
    job = job_of(tmp_path / "x", f"open({str(tmp_path / 'ran')!r}, 'w')")
    launcher.cancel(ticket_of(job))
    ticket = ticket_of(job, launcher.submit(job))
    wait_for(
        lambda: launcher.poll([ticket]) and not Path(f"/proc/{ticket.job_id}").exists(), what="its controller's end"
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("program", "force"), [(WAIT, False), (STUBBORN, True)], ids=["asked", "killed"])
def test_a_job_whose_folder_was_removed_can_be_ended_all_the_same(
    launcher: Launcher, tmp_path: Path, program: str, force: bool
) -> None:
    """Its records are gone with the folder; its processes carry its mark."""
    job = job_of(tmp_path / "x", program)
    ticket = ticket_of(job, launcher.submit(job))
    log_until(job, "waiting" if program == WAIT else "deaf")
    trial = json.loads(AttemptPaths(job.folder).started.read_text())["pid"]
    shutil.rmtree(job.folder)
    launcher.cancel(ticket, force=force)
    poll_until(launcher, ticket, JobState.LOST)
    assert not Path(f"/proc/{trial}").exists()


def test_a_process_that_took_over_the_id_is_not_the_job(launcher: Launcher, tmp_path: Path) -> None:
    job = job_of(tmp_path / "x", "")
    other = {"pid": os.getpid(), "start_ticks": 1, "host": host(), "at": 1.0}
    AttemptPaths(job.folder).claim.write_text(json.dumps(other))
    AttemptPaths(job.folder).started.write_text(json.dumps(other))
    assert launcher.poll([ticket_of(job)])[job.name].state is JobState.LOST


def test_a_trial_that_names_its_driver_as_itself_is_ended_in_the_drivers_place(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Whoever drives, and all that it descends from, is no trial: a trial's word for it ended the driver."""
    job = job_of(tmp_path / "x", WAIT)
    ticket = ticket_of(job, launcher.submit(job))
    log_until(job, "waiting")
    trial = json.loads(AttemptPaths(job.folder).started.read_text())["pid"]
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from lora_tune.base.paths import AttemptPaths\n"
        "from lora_tune.base.files import write_json\n"
        "from lora_tune.launchers.base import Ticket\n"
        "from lora_tune.launchers.job_records import describe\n"
        "from lora_tune.launchers.local import LocalLauncher\n"
        "folder = Path(sys.argv[1])\n"
        "write_json(AttemptPaths(folder).started, describe(os.getpid(), ''))\n"
        "LocalLauncher().cancel(Ticket(name='x', folder=folder, job_id='', submitted_at=0.0))\n"
        "print('alive')\n"
    )
    argv = [sys.executable, "-c", program, str(job.folder)]
    driver = subprocess.run(argv, start_new_session=True, capture_output=True, text=True, timeout=60)
    assert (driver.returncode, driver.stdout) == (0, "alive\n"), driver.stderr
    poll_until(launcher, ticket, JobState.ENDED)
    assert not Path(f"/proc/{trial}").exists()


def test_ctrl_c_at_the_terminal_does_not_reach_jobs(launcher: Launcher, tmp_path: Path) -> None:
    job = job_of(tmp_path / "x", WAIT)
    ticket = ticket_of(job, launcher.submit(job))
    log_until(job, "waiting")
    for process in (int(ticket.job_id), json.loads(AttemptPaths(job.folder).claim.read_text())["pid"]):
        os.kill(process, signal.SIGINT)  # what a terminal sends to the whole foreground group
    assert launcher.poll([ticket])[job.name].state is JobState.RUNNING
    launcher.cancel(ticket)
    assert poll_until(launcher, ticket, JobState.ENDED).exit_code == -signal.SIGTERM


def test_each_job_gets_gpus_of_its_own(tmp_path: Path) -> None:
    launcher = LocalLauncher(gpus=("0", "1", "2"))
    program = "import os, time; print('gpu', os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(600)"

    def job(i: int) -> Job:
        return replace(job_of(tmp_path / str(i), program, name=f"g-{i}"), resources=Resources(gpus_per_node=1))

    jobs = [job(i) for i in range(3)]
    tickets = [ticket_of(j, launcher.submit(j)) for j in jobs]
    for i, j in enumerate(jobs):
        log_until(j, f"gpu {i}")
    with pytest.raises(LauncherError, match="needs 1 GPUs and 0 are free"):
        launcher.submit(job(3))
    launcher.cancel(tickets[1], force=True)
    poll_until(launcher, tickets[1], JobState.ENDED)
    fourth = job(4)
    tickets.append(ticket_of(fourth, launcher.submit(fourth)))
    log_until(fourth, "gpu 1")
    for ticket in (tickets[0], tickets[2], tickets[3]):
        launcher.cancel(ticket, force=True)
        poll_until(launcher, ticket, JobState.ENDED)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_just_before_a_command_has_its_own_session_does_not_end_it(tmp_path: Path, number: int) -> None:
    """A terminal reaches the child of a runner up to then, and the signal would wait until it is let through."""
    job = job_of(tmp_path, "print('ran')")
    write_command(job)
    program = f"""
import os, signal
from lora_tune.launchers import job_runner
real = job_runner._in_child
job_runner._in_child = lambda cgroup: (os.kill(os.getpid(), {int(number)}), real(cgroup))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGHUP])
print(job_runner.run_job({str(tmp_path)!r}, {job.token!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0"], done.stderr
    assert "ran" in job.log.read_text()


def test_a_job_that_another_thread_starts_meanwhile_has_none_of_a_jobs_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``serve`` drives studies in threads; the variables of this process are everybody's."""
    show = "import os; print(os.environ.get('SITE_TOKEN'))"
    secret = {"SITE_TOKEN": Secret(value=SecretStr("hunter2hunter2"))}
    owner, other = replace(job_of(tmp_path / "owner", show), secrets=secret), job_of(tmp_path / "other", show)
    launchers, submit = {job.folder: LocalLauncher() for job in (owner, other)}, LocalExecutor.submit
    begun, done = threading.Event(), threading.Event()

    def submit_slowly(executor: LocalExecutor, function: Callable[..., int], folder: str, token: str) -> object:
        if folder == str(owner.folder):
            begun.set()
            done.wait(30)
        return submit(executor, function, folder, token)

    monkeypatch.setattr(LocalExecutor, "submit", submit_slowly)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(launchers[owner.folder].submit, owner)
        begun.wait(30)
        ids = {other.folder: launchers[other.folder].submit(other)}
        done.set()
        ids[owner.folder] = first.result(30)
    for job, printed in ((owner, b"hunter2hunter2\n"), (other, b"None\n")):
        poll_until(launchers[job.folder], ticket_of(job, ids[job.folder]), JobState.ENDED)
        assert without_head(job.log.read_bytes()) == printed


def study_on_gpus(parallel: int, **site: object) -> Study:
    """A study whose trials need a GPU each on this machine."""
    values = {
        "name": "g",
        "workload": {"kind": "command", "argv": ["true"], "log": {"kind": "jsonl"}},
        "site": {"gpus_per_node": 1, **site},
        "space": {"LR": {"type": "float", "low": 1e-4, "high": 1e-3}},
        "objective": {"target": 0.5},
        "budget": {"trials": 4, "parallel": parallel},
    }
    return Study.model_validate(values)


@pytest.mark.parametrize("ids", ["6,7", "GPU-1b2c, MIG-3d", "7,6,-1,0"])
def test_jobs_get_the_gpus_that_the_driver_may_use_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: str
) -> None:
    """CUDA_VISIBLE_DEVICES=6,7 started trials on 0 and 1, which others use."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ids)
    launcher = make_launcher(study_on_gpus(parallel=1), tmp_path / "packs")
    launcher.widen(4)
    program = "import os, time; print('gpu', os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(600)"
    jobs = [
        replace(job_of(tmp_path / str(i), program, name=f"g-{i}"), resources=Resources(gpus_per_node=1))
        for i in range(3)
    ]
    tickets = [ticket_of(job, launcher.submit(job)) for job in jobs[:2]]
    for job, device in zip(jobs[:2], ids.replace(" ", "").split(","), strict=False):
        log_until(job, f"gpu {device}")
    anew = make_launcher(study_on_gpus(parallel=2), tmp_path / "packs")
    anew.poll(tickets)
    for each in (launcher, anew):
        with pytest.raises(LauncherError, match="needs 1 GPUs and 0 are free"):
            each.submit(jobs[2])
    for ticket in tickets:
        anew.cancel(ticket, force=True)
        poll_until(anew, ticket, JobState.ENDED)


@pytest.mark.parametrize(("ids", "parallel", "need"), [("", 1, "names 0 GPUs"), ("6,7", 3, "lower budget.parallel")])
def test_a_driver_that_may_use_too_few_gpus_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: str, parallel: int, need: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ids)
    with pytest.raises(SetupError, match=need):
        make_launcher(study_on_gpus(parallel), tmp_path)
    make_launcher(study_on_gpus(parallel, environment={"CUDA_VISIBLE_DEVICES": "3,4,5"}), tmp_path)
