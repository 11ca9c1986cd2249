"""The Slurm launcher, against real Slurm."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lora_tune.base.errors import LauncherError, SetupError
from lora_tune.base.files import create_json, read_json
from lora_tune.base.paths import AttemptPaths, without_head
from lora_tune.config.secrets import Secret
from lora_tune.config.tables import Site
from lora_tune.launchers.base import JobState, Launcher, Waits
from lora_tune.launchers.job_records import describe
from lora_tune.launchers.slurm import submission
from lora_tune.launchers.slurm.launcher import SlurmLauncher
from lora_tune.launchers.slurm.submission import submission_command
from lora_tune.logs.failures import FailureKind, diagnose
from lora_tune.workloads.base import Job, Resources
from tests.cluster import Cluster, ask_for_a_second, wait_until
from tests.contracts.launcher import SAY, WAIT, LauncherContract, job_of, log_until, poll_until, ticket_of

pytestmark = pytest.mark.slurm


def site(**fields: object) -> Site:
    return Site.model_validate({"launcher": "slurm", "gpus_per_node": 8, "gres": "gpu:8", **fields})


CPU = site(gpus_per_node=0, gres=None)


def script_job(folder: Path, script: str, *, name: str = "study-0000-0", nodes: int = 1, **environment: str) -> Job:
    """A batch script as a job that takes whole nodes, as run.sub does."""
    folder.mkdir(parents=True, exist_ok=True)
    implementation = folder.parent / "implementation"
    implementation.mkdir(exist_ok=True)
    (implementation / "run.sub").write_text(f"#!/bin/bash\n#SBATCH --exclusive\n{script}\n")
    return Job(
        name=name,
        folder=folder,
        argv=("run.sub",),
        environment=environment,
        cwd=implementation,
        log=AttemptPaths(folder).log,
        resources=Resources(nodes=nodes, gpus_per_node=8, minutes=10),
        script=True,
    )


class TestContract(LauncherContract):
    """With accounting; what differs without it is in TestMemory, and all other tests here run without."""

    @pytest.fixture
    def launcher(self, slurm_accounting: Cluster) -> Launcher:
        return SlurmLauncher(CPU)


class TestScripts:
    """Existing batch scripts: submitted unchanged, with exactly the job's environment."""

    def test_every_task_of_every_node_runs_with_the_gpus_of_the_site(self, slurm: Cluster, tmp_path: Path) -> None:
        step = "srun -l --ntasks-per-node=8 bash -c 'echo task on $SLURMD_NODENAME gpus $CUDA_VISIBLE_DEVICES'"
        job = script_job(tmp_path / "a", step, nodes=2)
        launcher = SlurmLauncher(site())
        status = poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)
        lines = [line for line in job.log.read_text().splitlines() if "task on" in line]
        assert len(lines) == 16
        assert all(line.endswith("gpus 0,1,2,3,4,5,6,7") for line in lines)
        assert len(status.nodes) == 2
        assert {line.split()[3] for line in lines} == set(status.nodes)

    def test_a_secret_arrives_by_the_environment_and_stands_in_no_file_of_ours(
        self, slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        value = 'it\'s "secret" $HOME'
        monkeypatch.setenv("MY_TOKEN", value)
        job = replace(
            script_job(tmp_path / "a", 'printf %s "$HF_TOKEN" | md5sum'), secrets={"HF_TOKEN": Secret(env="MY_TOKEN")}
        )
        launcher = SlurmLauncher(site())
        poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)
        assert hashlib.md5(value.encode()).hexdigest() in job.log.read_text()
        files = [file for file in job.folder.rglob("*") if file.is_file()]
        assert [file.name for file in files if value in file.read_text(errors="replace")] == []

    def test_the_script_is_submitted_from_its_own_folder(self, slurm: Cluster, tmp_path: Path) -> None:
        job = script_job(tmp_path / "a", 'pwd; echo "command: $(scontrol show job $SLURM_JOB_ID | grep Command=)"')
        launcher = SlurmLauncher(site())
        poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)
        assert str(job.cwd) in job.log.read_text().splitlines()
        assert f"Command={job.cwd}/run.sub" in job.log.read_text()

    def test_the_site_reaches_every_step_through_sruns_own_variables(self, slurm: Cluster, tmp_path: Path) -> None:
        job = script_job(tmp_path / "a", "env | grep -E '^SLURM_(GRES|MPI_TYPE|CPU_BIND)=' | sort")
        launcher = SlurmLauncher(site(mpi="none", cpu_bind="none"))
        poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)
        said = without_head(job.log.read_bytes()).decode().split()
        assert said == ["SLURM_CPU_BIND=none", "SLURM_GRES=gpu:8", "SLURM_MPI_TYPE=none"]

    def test_nothing_of_the_submitting_shell_leaks(
        self, slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A config that was sourced there, and the variables of an enclosing job, must not reach a trial."""
        for name in ("LR", "FP8_ACT", "NCCL_DEBUG", "SLURM_NTASKS", "SLURM_JOB_ID", "SBATCH_PARTITION"):
            monkeypatch.setenv(name, "12345")
        job = script_job(tmp_path / "a", "env", TP="4")
        launcher = SlurmLauncher(site())
        poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)
        lines = job.log.read_text().splitlines()
        assert "TP=4" in lines
        assert not [line for line in lines if line.endswith("=12345")]
        assert [line for line in lines if line.startswith("HOME=")]

    def test_values_and_paths_of_any_kind_arrive_unharmed(self, slurm: Cluster, tmp_path: Path) -> None:
        hostile = "a b'c\"d$e`f\\g;h|i&j*k?l~m#n!o(p)\tq\nr%j é"
        job = script_job(tmp_path / "sweeps $x 'y' %j" / "a", 'printf "<%s>" "$VALUE"', VALUE=hostile)
        launcher = SlurmLauncher(site())
        with pytest.raises(LauncherError, match="holds a %"):
            launcher.submit(job)
        job = script_job(tmp_path / "sweeps $x 'y' é" / "a", 'printf "<%s>" "$VALUE"', VALUE=hostile)
        poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)
        assert f"<{hostile}>" in job.log.read_text()

    def test_two_trials_never_share_a_node_and_excluded_nodes_stay_free(self, slurm: Cluster, tmp_path: Path) -> None:
        launcher = SlurmLauncher(site(exclude=slurm.nodes[0]))
        jobs = [
            replace(script_job(tmp_path / f"{i}", "sleep 60", name=f"study-{i}-0"), exclude_nodes=(slurm.nodes[1],))
            for i in range(3)
        ]
        tickets = [ticket_of(job, launcher.submit(job)) for job in jobs]
        first, second = (poll_until(launcher, t, JobState.RUNNING).nodes for t in tickets[:2])
        assert {*first, *second} == set(slurm.nodes[2:])
        third = launcher.poll(tickets)[tickets[2].name]
        assert third.state is JobState.QUEUED
        assert third.reason

    def test_when_every_node_is_suspect_none_is_excluded(self, slurm: Cluster, tmp_path: Path) -> None:
        launcher = SlurmLauncher(site())
        job = replace(script_job(tmp_path / "a", "true"), exclude_nodes=slurm.nodes)
        poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)

    def test_a_job_that_slurm_starts_a_second_time_is_no_success(self, slurm: Cluster, tmp_path: Path) -> None:
        """A controller that was killed did so; the log of the first run, cut short, counted as its whole result."""
        job = job_of(tmp_path / "a", "print('trained')")
        create_json(AttemptPaths(job.folder).claim, describe(os.getpid(), job.token))
        launcher = SlurmLauncher(CPU)
        ended = poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)
        assert ended.exit_code != 0
        assert "trained" not in job.log.read_text()
        found = diagnose(job.log.read_bytes(), state=ended.state.value, exit_code=ended.exit_code)
        assert found.kind is FailureKind.INFRASTRUCTURE
        assert found.line == "lora-tune: its job was started a second time; the first run did not end by itself"

    def test_a_suspect_node_is_taken_where_the_others_lack_what_the_job_asks_for(
        self, slurm: Cluster, tmp_path: Path
    ) -> None:
        """One node of four has the feature: to leave it out was refused for good, and ended the sweep."""
        slurm.run("scontrol", "update", f"NodeName={slurm.nodes[0]}", "AvailableFeatures=ib", "ActiveFeatures=ib")
        launcher = SlurmLauncher(site(sbatch_args=("--constraint=ib",)))
        job = replace(script_job(tmp_path / "a", "sleep 60"), exclude_nodes=slurm.nodes[:1])
        running = poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.RUNNING)
        assert running.nodes == slurm.nodes[:1]

    def test_a_list_of_nodes_is_where_trials_go_not_what_each_of_them_needs(
        self, slurm: Cluster, tmp_path: Path
    ) -> None:
        launcher = SlurmLauncher(site(nodelist=",".join(slurm.nodes[1:3])))
        jobs = [script_job(tmp_path / f"{i}", "sleep 60", name=f"study-{i}-0") for i in range(3)]
        tickets = [ticket_of(job, launcher.submit(job)) for job in jobs]
        used = [poll_until(launcher, ticket, JobState.RUNNING).nodes for ticket in tickets[:2]]
        assert sorted(used) == [(slurm.nodes[1],), (slurm.nodes[2],)]
        assert launcher.poll(tickets)[tickets[2].name].state is JobState.QUEUED

    def test_a_training_that_fails_inside_the_script_shows_although_the_job_completed(
        self, slurm: Cluster, tmp_path: Path
    ) -> None:
        job = script_job(tmp_path / "a", "set +e; srun -N1 -n1 bash -c 'exit 3' |& tee log; exit 0")
        launcher = SlurmLauncher(site())
        status = poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)
        assert slurm.job_state(status.job_id) == "COMPLETED"
        assert status.exit_code == 3

    def test_the_recorded_command_is_the_one_that_is_previewed(self, slurm: Cluster, tmp_path: Path) -> None:
        job = script_job(tmp_path / "a", "true", TP="4")
        launcher = SlurmLauncher(site(sbatch_args=["--nice=1"], partition="gpu"))
        launcher.submit(job)
        record = read_json(AttemptPaths(job.folder).slurm).content
        assert record is not None
        seen = submission_command(job, site(sbatch_args=["--nice=1"], partition="gpu"), record["token"])
        assert record["command"] == seen
        assert seen[-2:] == ["--nice=1", "run.sub"]


class TestFaults:
    """What clusters do to jobs."""

    def test_a_restarted_controller_still_knows_the_job(self, slurm: Cluster, tmp_path: Path) -> None:
        job, launcher = job_of(tmp_path / "a", WAIT), SlurmLauncher(CPU)
        ticket = ticket_of(job, launcher.submit(job))
        poll_until(launcher, ticket, JobState.RUNNING)
        slurm.restart_controller()
        assert launcher.poll([ticket])[job.name].state is JobState.RUNNING

    def test_an_absent_controller_is_an_error_and_says_nothing_of_the_job(self, slurm: Cluster, tmp_path: Path) -> None:
        job, launcher = job_of(tmp_path / "a", WAIT), SlurmLauncher(CPU)
        ticket = ticket_of(job, launcher.submit(job))
        poll_until(launcher, ticket, JobState.RUNNING)
        slurm.stop_controller()
        try:
            with pytest.raises(LauncherError, match="squeue failed"):
                launcher.poll([ticket])
        finally:
            slurm.start_controller()
        assert launcher.poll([ticket])[job.name].state is JobState.RUNNING

    def test_a_crash_that_forgets_a_job_and_reuses_its_id_does_not_confuse_them(
        self, slurm: Cluster, tmp_path: Path
    ) -> None:
        launcher = SlurmLauncher(CPU)
        for turn in range(5):  # now and then the controller has saved the first job before it is killed
            slurm.restart_controller()  # its state is saved now: the next submission is not
            forgotten = job_of(tmp_path / f"a{turn}", WAIT, name="study-0000-0")
            first = ticket_of(forgotten, launcher.submit(forgotten))
            slurm.stop_controller(kill=True)
            slurm.start_controller()
            other = job_of(tmp_path / f"b{turn}", WAIT, name="study-0001-0")
            second = ticket_of(other, launcher.submit(other))
            if first.job_id == second.job_id:
                break
        assert first.job_id == second.job_id, "Slurm gives the id of a job that it forgot to the next one"
        states = launcher.poll([first, second])
        assert states[first.name].state is JobState.LOST
        assert states[second.name].state.alive
        launcher.cancel(first)
        assert launcher.poll([second])[second.name].state.alive

    def test_a_dead_node(self, slurm: Cluster, tmp_path: Path) -> None:
        job, launcher = job_of(tmp_path / "a", WAIT), SlurmLauncher(CPU)
        ticket = ticket_of(job, launcher.submit(job))
        nodes = poll_until(launcher, ticket, JobState.RUNNING).nodes
        log_until(job, "waiting")  # before its log is there it has not begun
        slurm.kill_node(nodes[0])
        status = poll_until(launcher, ticket, JobState.NODE_FAILED)
        assert status.nodes == nodes

    def test_a_killed_slurmd_leaves_the_job_running(self, slurm: Cluster, tmp_path: Path) -> None:
        job, launcher = job_of(tmp_path / "a", WAIT), SlurmLauncher(CPU)
        ticket = ticket_of(job, launcher.submit(job))
        node = poll_until(launcher, ticket, JobState.RUNNING).nodes[0]
        slurm.kill_slurmd(node)
        assert launcher.poll([ticket])[job.name].state is JobState.RUNNING
        slurm.start_slurmd(node)
        assert launcher.poll([ticket])[job.name].state is JobState.RUNNING

    def test_preemption(self, slurm: Cluster, tmp_path: Path) -> None:
        launcher = SlurmLauncher(site())
        job = script_job(tmp_path / "a", "sleep 600", nodes=4)
        ticket = ticket_of(job, launcher.submit(job))
        poll_until(launcher, ticket, JobState.RUNNING)
        urgent = slurm.run("sbatch", "--parsable", "-p", "urgent", "-N4", "-o", os.devnull, "--wrap", "sleep 1")
        status = poll_until(launcher, ticket, JobState.PREEMPTED)
        assert status.ended_at is not None
        wait_until(lambda: slurm.job_state(urgent.strip()) == "COMPLETED", 30, "the urgent job runs")

    def test_a_job_that_is_cancelled_by_hand(self, slurm: Cluster, tmp_path: Path) -> None:
        job, launcher = job_of(tmp_path / "a", WAIT), SlurmLauncher(CPU)
        ticket = ticket_of(job, launcher.submit(job))
        poll_until(launcher, ticket, JobState.RUNNING)
        slurm.run("scancel", ticket.job_id)
        status = poll_until(launcher, ticket, JobState.CANCELLED)
        assert status.started_at is not None
        assert status.ended_at is not None
        assert not status.by_cluster

    def test_a_running_job_that_a_crashed_controller_takes_for_one_that_waits_is_cancelled_by_slurm(
        self, slurm: Cluster, tmp_path: Path
    ) -> None:
        """slurmctld starts it a second time, and the slurmd that refuses the copy cancels both."""
        slurm.run("scontrol", "update", "PartitionName=gpu", "State=DOWN")
        one_node = site(gpus_per_node=0, gres=None, nodelist=slurm.nodes[0])  # where it runs, it is started again
        job, launcher = job_of(tmp_path / "a", WAIT), SlurmLauncher(one_node)
        ticket = ticket_of(job, launcher.submit(job))
        slurm.stop_controller()
        shutil.copytree(slurm.folder / "state", tmp_path / "before")
        slurm.start_controller()
        slurm.run("scontrol", "update", "PartitionName=gpu", "State=UP")
        log_until(job, "waiting")
        slurm.stop_controller(kill=True)
        shutil.copytree(tmp_path / "before", slurm.folder / "state", dirs_exist_ok=True)
        slurm.start_controller()
        slurm.run("scontrol", "update", "PartitionName=gpu", "State=UP")
        status = poll_until(launcher, ticket, JobState.CANCELLED, seconds=120)
        assert status.by_cluster
        assert "slurmctld was started anew" in status.reason

    def test_a_job_that_the_administrator_requeues_is_cancelled_and_counts_as_preempted(
        self, slurm: Cluster, tmp_path: Path
    ) -> None:
        job, launcher = job_of(tmp_path / "a", WAIT), SlurmLauncher(CPU)
        ticket = ticket_of(job, launcher.submit(job))
        log_until(job, "waiting")
        slurm.run("scontrol", "update", f"JobId={ticket.job_id}", "Requeue=1")
        slurm.run("scontrol", "requeue", ticket.job_id)
        status = poll_until(launcher, ticket, JobState.PREEMPTED)
        assert "requeued" in status.reason
        assert slurm.job_state(ticket.job_id) == "CANCELLED"
        assert job.log.read_text().count("waiting") == 1

    def test_drained_nodes_leave_a_job_waiting_with_the_reason(self, slurm: Cluster, tmp_path: Path) -> None:
        launcher = SlurmLauncher(site())
        for node in slurm.nodes:
            slurm.drain(node)
        job = script_job(tmp_path / "a", "true")
        ticket = ticket_of(job, launcher.submit(job))
        try:
            wait_until(lambda: "ReqNodeNotAvail" in launcher.poll([ticket])[job.name].reason, 20, "Slurm says why")
        finally:
            for node in slurm.nodes:
                slurm.resume(node)
        poll_until(launcher, ticket, JobState.ENDED)

    def test_what_sbatch_refuses_is_an_error_with_its_words(self, slurm: Cluster, tmp_path: Path) -> None:
        launcher = SlurmLauncher(site(gres="fpga:3"))
        with pytest.raises(LauncherError, match="not submitted: Invalid generic resource"):
            launcher.submit(script_job(tmp_path / "a", "true"))

    def test_a_partition_that_does_not_exist_is_said_before_anything_is_submitted(self, slurm: Cluster) -> None:
        with pytest.raises(SetupError, match="no partition nowhere; it has gpu, urgent"):
            SlurmLauncher(site(partition="nowhere"))

    def test_a_controller_that_does_not_answer_at_the_start(self, slurm: Cluster) -> None:
        slurm.stop_controller()
        try:
            with pytest.raises(SetupError, match=r"no cluster answers: sinfo failed.*--study tiny"):
                SlurmLauncher(CPU)
        finally:
            slurm.start_controller()

    def test_the_time_limit(self, slurm: Cluster, tmp_path: Path) -> None:
        job, launcher = job_of(tmp_path / "a", WAIT), SlurmLauncher(CPU)
        ticket = ticket_of(job, launcher.submit(job))
        log_until(job, "waiting")
        ask_for_a_second(job.folder)
        slurm.run("scontrol", "update", f"JobId={ticket.job_id}", f"EndTime={time.strftime('%Y-%m-%dT%H:%M:%S')}")
        status = poll_until(launcher, ticket, JobState.TIME_LIMIT, seconds=60)
        assert status.started_at is not None
        assert status.ended_at is not None
        assert "DUE TO TIME LIMIT" in job.log.read_text()


class TestMemory:
    """What Slurm itself forgets."""

    def test_a_job_that_squeue_forgot_is_found_in_the_accounting(
        self, slurm_accounting: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job, launcher = job_of(tmp_path / "a", SAY, CODE="3"), SlurmLauncher(CPU)
        ticket = ticket_of(job, launcher.submit(job))
        seen = poll_until(launcher, ticket, JobState.ENDED)
        forget(slurm_accounting, tmp_path, monkeypatch)
        wait_until(lambda: launcher.poll([ticket])[job.name].state is JobState.ENDED, 30, "sacct has it")
        status = launcher.poll([ticket])[job.name]
        assert status.exit_code == seen.exit_code
        assert (status.started_at, status.ended_at) == (seen.started_at, seen.ended_at)
        assert status.nodes == seen.nodes

    def test_one_that_was_renamed_and_commented_is_found_there_by_its_id(
        self, slurm_accounting: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job, launcher = job_of(tmp_path / "a", WAITS_FOR_GO.format(go=str(tmp_path / "go"))), SlurmLauncher(CPU)
        ticket = ticket_of(job, launcher.submit(job))
        log_until(job, "begun")
        slurm_accounting.run("scontrol", "update", f"JobId={ticket.job_id}", "JobName=renamed", "Comment=team-7")
        (tmp_path / "go").touch()
        poll_until(launcher, ticket, JobState.ENDED)
        forget(slurm_accounting, tmp_path, monkeypatch)
        wait_until(lambda: launcher.poll([ticket])[job.name].state is JobState.ENDED, 30, "sacct has it")

    def test_without_accounting_its_own_record_says_how_it_ended(
        self, slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = replace(job_of(tmp_path / "a", SAY, CODE="3"), token="a" * 32)
        launcher = SlurmLauncher(CPU)
        ticket = replace(ticket_of(job, launcher.submit(job)), token="a" * 32)
        poll_until(launcher, ticket, JobState.ENDED)
        forget(slurm, tmp_path, monkeypatch)
        status = launcher.poll([ticket])[job.name]
        assert (status.state, status.exit_code) == (JobState.ENDED, 3)

    def test_without_accounting_it_is_lost_and_the_reason_says_so(
        self, slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job, launcher = job_of(tmp_path / "a", SAY), SlurmLauncher(CPU)
        ticket = ticket_of(job, launcher.submit(job))
        poll_until(launcher, ticket, JobState.ENDED)
        forget(slurm, tmp_path, monkeypatch)
        status = launcher.poll([ticket])[job.name]
        assert status.state is JobState.LOST
        assert "no accounting" in status.reason


def forget(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let squeue show no ended job, as after MinJobAge; the rest of Slurm stays as it is."""
    folder = tmp_path / "bin"
    folder.mkdir()
    real = subprocess.run(["which", "squeue"], capture_output=True, text=True, check=True).stdout.strip()
    wrapper = folder / "squeue"
    wrapper.write_text(f'#!/bin/bash\nexec {real} "${{@/--states=all/--states=PENDING,RUNNING}}"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_one_squeue_serves_any_number_of_jobs(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = SlurmLauncher(CPU)
    jobs = [job_of(tmp_path / f"{i}", WAIT, name=f"study-{i:04d}-0") for i in range(8)]
    tickets = [ticket_of(job, launcher.submit(job)) for job in jobs]
    record(tmp_path, monkeypatch, "squeue", "sacct", "scontrol")
    assert all(status.state.alive for status in launcher.poll(tickets).values())
    assert [line.split()[0] for line in (tmp_path / "asked").read_text().splitlines()] == ["squeue"]


def test_without_slurm_the_message_says_what_is_missing_and_what_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SetupError, match=r"sbatch, squeue.*--study tiny runs on this machine"):
        SlurmLauncher(CPU)


class TestNames:
    """A site renames jobs, a person writes a comment: a job is known by its id and its log all the same."""

    def test_a_job_that_was_renamed_and_commented_is_found_counted_as_the_sweeps_and_ended(
        self, slurm: Cluster, tmp_path: Path
    ) -> None:
        launcher = SlurmLauncher(CPU)
        job = job_of(tmp_path / "trials" / "a", WAIT)
        ticket = ticket_of(job, launcher.submit(job))
        poll_until(launcher, ticket, JobState.RUNNING)
        slurm.run("scontrol", "update", f"JobId={ticket.job_id}", "JobName=renamed", "Comment=team-7")
        for each in (launcher, SlurmLauncher(CPU)):  # a driver that was started anew as well
            status = each.poll([ticket])[job.name]
            assert (status.state, status.job_id) == (JobState.RUNNING, ticket.job_id)
            assert each.poll([replace(ticket, job_id="")])[job.name].job_id == ticket.job_id
            assert [(t.name, t.job_id) for t in each.jobs_below(tmp_path / "trials")] == [(job.name, ticket.job_id)]
        launcher.cancel(ticket)
        poll_until(launcher, ticket, JobState.CANCELLED)

    def test_a_site_that_wants_a_name_and_a_comment_of_its_own_gets_them(self, slurm: Cluster, tmp_path: Path) -> None:
        """They were refused: a sweep knew its jobs by them."""
        launcher = SlurmLauncher(site(gpus_per_node=0, gres=None, sbatch_args=("--comment=team-7", "--job-name=ours")))
        jobs = [job_of(tmp_path / "trials" / name, WAIT, name=f"study-{name}-0") for name in ("a", "b")]
        tickets = [ticket_of(job, launcher.submit(job)) for job in jobs]
        for each in (launcher, SlurmLauncher(CPU)):
            for ticket in tickets:
                assert each.poll([ticket])[ticket.name].job_id == ticket.job_id
                assert each.poll([replace(ticket, job_id="")])[ticket.name].job_id == ticket.job_id
            assert {(t.name, t.job_id) for t in each.jobs_below(tmp_path)} == {(t.name, t.job_id) for t in tickets}
        SlurmLauncher(CPU).cancel(tickets[0])
        poll_until(launcher, tickets[0], JobState.CANCELLED)
        assert launcher.poll(tickets)[tickets[1].name].state.alive

    def test_every_question_sees_hidden_partitions(
        self, slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        record(tmp_path, monkeypatch, "squeue", "sinfo")
        launcher, job = SlurmLauncher(CPU), job_of(tmp_path / "a", SAY)
        ticket = ticket_of(job, launcher.submit(job))
        launcher.poll([ticket])
        launcher.poll([replace(ticket, job_id="99999")])
        launcher.jobs_below(tmp_path)
        questions = (tmp_path / "asked").read_text().splitlines()
        assert len(questions) >= 5
        assert [question for question in questions if " --all " not in question] == []


def record(folder: Path, monkeypatch: pytest.MonkeyPatch, *commands: str) -> None:
    """Write the lines of these Slurm commands to ``folder/asked`` from now on."""
    (folder / "bin").mkdir()
    for command in commands:
        real = subprocess.run(["which", command], capture_output=True, text=True, check=True).stdout.strip()
        (folder / "bin" / command).write_text(f'#!/bin/bash\necho {command} "$@" >> {folder}/asked\nexec {real} "$@"\n')
        (folder / "bin" / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


def test_polling_costs_no_time_while_jobs_wait(slurm: Cluster, tmp_path: Path) -> None:
    """A job in the queue has neither a start nor nodes: node-hours begin when it runs."""
    launcher = SlurmLauncher(site())
    blocker = script_job(tmp_path / "a", "sleep 600", nodes=4)
    launcher.submit(blocker)
    waiting = script_job(tmp_path / "b", "true", name="study-0001-0")
    ticket = ticket_of(waiting, launcher.submit(waiting))
    status = launcher.poll([ticket])[ticket.name]
    assert status.state is JobState.QUEUED
    assert (status.started_at, status.ended_at, status.nodes) == (None, None, ())
    assert time.time() - ticket.submitted_at < 30


def test_what_a_waiting_job_waits_for_and_where_jobs_write(slurm: Cluster, tmp_path: Path) -> None:
    """A job that its user holds, and one that wants more nodes than there are, which sbatch takes all the same."""
    launcher = SlurmLauncher(site())
    held, too_large = (
        script_job(tmp_path / "trials" / name, "sleep 60", name=f"waits-{name}-0", nodes=nodes)
        for name, nodes in (("held", 4), ("large", 5))
    )
    blocker = script_job(tmp_path / "elsewhere", "sleep 60", name="waits-blocker-0", nodes=4)
    launcher.submit(blocker)
    tickets = [ticket_of(job, launcher.submit(job)) for job in (held, too_large)]
    slurm.run("scontrol", "uhold", tickets[0].job_id)
    waits = lambda: [launcher.poll(tickets)[t.name].waits for t in tickets]  # noqa: E731
    wait_until(lambda: waits() == [Waits.HELD, Waits.UNSATISFIABLE], 20, "Slurm says why", slurm.state_lines)
    found = launcher.jobs_below(tmp_path / "trials")
    assert {(t.name, t.job_id) for t in found} == {(t.name, t.job_id) for t in tickets}


WAITS_FOR_GO = """
import os, pathlib, time
print(f"begun by {{os.getpid()}}.", flush=True)
while not pathlib.Path({go!r}).exists(): time.sleep(0.05)
print("over", flush=True)
"""


@pytest.mark.parametrize("by_script", [False, True], ids=["a command with our runner", "a script"])
def test_a_suspended_job_says_so_and_for_how_long(slurm: Cluster, tmp_path: Path, by_script: bool) -> None:
    """``scontrol suspend`` stops the runner of a command, which notes it; of a script Slurm itself counts."""
    program, go = WAITS_FOR_GO.format(go=str(tmp_path / "go")), tmp_path / "go"
    job = job_of(tmp_path / "a", program)
    if by_script:
        job = script_job(tmp_path / "a", f"python3 -c {shlex.quote(program)}")
    launcher = SlurmLauncher(site() if by_script else CPU)
    ticket = ticket_of(job, launcher.submit(job))
    log_until(job, "begun")
    job_id = launcher.poll([ticket])[job.name].job_id
    slurm.run("scontrol", "suspend", job_id)
    began = time.monotonic()
    paused = poll_until(launcher, ticket, JobState.RUNNING)
    assert paused.paused
    trainer = Path("/proc", job.log.read_text().split("begun by ")[1].split(".")[0], "stat")
    # Stopped, or frozen with its cgroup, as the cluster tracks its processes.
    wait_until(lambda: trainer.read_text().split(") ")[1][0] in "TD", 20, "slurmstepd stops the job")
    go.touch()
    wait_until(lambda: time.monotonic() - began > 6, 20, "a pause that whole seconds show")
    assert "over" not in job.log.read_text()
    slurm.run("scontrol", "resume", job_id)
    length = time.monotonic() - began
    status = poll_until(launcher, ticket, JobState.ENDED)
    assert status.paused_seconds == pytest.approx(length, abs=2.5)
    assert not status.paused
    if by_script:
        assert status.pauses == (), "the driver's looks place it"
    else:
        assert sum(end - begin for begin, end in status.pauses) == pytest.approx(length, abs=1.0)


class TestSlowSbatch:
    """sbatch may take minutes (a busy controller, a wrapper, ``--wait``): nobody waits for it."""

    def test_a_slow_sbatch_is_left_to_itself_and_its_job_found(
        self, slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow_sbatch(tmp_path, monkeypatch)
        monkeypatch.setattr(submission, "PATIENCE_SECONDS", 0.2)
        launcher, job, other = SlurmLauncher(CPU), job_of(tmp_path / "a", SAY), job_of(tmp_path / "b", SAY, name="b-0")
        for each in (job, job, other):
            with pytest.raises(LauncherError, match="sbatch has not answered"):
                launcher.submit(each)
        ticket = ticket_of(job, "")
        assert launcher.poll([ticket])[job.name].state is JobState.LOST, "asked while sbatch still runs"
        (tmp_path / "go").touch()
        wait_until(lambda: launcher.poll([ticket])[job.name].state is JobState.ENDED, 30, "its job runs")
        asked = [line for line in (tmp_path / "asked").read_text().splitlines() if line.startswith("sbatch ")]
        assert len(asked) == 1, "it was asked once, and no other job beside it"
        job_id = launcher.submit(other)
        assert poll_until(launcher, ticket_of(other, job_id), JobState.ENDED).exit_code == 0

    def test_an_sbatch_that_never_answers_is_ended(
        self, slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow_sbatch(tmp_path, monkeypatch)
        monkeypatch.setattr(submission, "ANSWER_SECONDS", 0.5)
        with pytest.raises(LauncherError, match=r"sbatch did not answer in 0.5 s"):
            SlurmLauncher(CPU).submit(job_of(tmp_path / "a", SAY))


def slow_sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An sbatch that begins once the file ``go`` is in ``folder``."""
    record(folder, monkeypatch, "sbatch")
    wrapper = folder / "bin" / "sbatch"
    begin = f"while ! [ -e {folder}/go ]; do sleep 0.05; done\nexec"
    wrapper.write_text(wrapper.read_text().replace("exec", begin, 1))
