"""The launcher of packs keeps the contract, and no trial is lost or trained twice when packs come and go."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lora_tune.base.errors import InputError, LauncherError
from lora_tune.base.files import write_json
from lora_tune.base.paths import AttemptPaths
from lora_tune.config.study import Study
from lora_tune.config.tables import Site
from lora_tune.launchers import make_launcher
from lora_tune.launchers.base import JobState, JobStatus, Launcher, SharedJob, Ticket
from lora_tune.launchers.job_records import describe
from lora_tune.launchers.local import LocalLauncher
from lora_tune.launchers.pack_folder import PackFolder
from lora_tune.launchers.packed import SILENCE_SECONDS, PackedLauncher
from lora_tune.launchers.slurm.launcher import SlurmLauncher
from lora_tune.logs.failures import FailureKind, diagnose
from lora_tune.workloads.base import Job, Resources, SlotTerms
from lora_tune_recipes.packed.job import devices_of
from tests.cluster import Cluster
from tests.contracts.launcher import SAY, WAIT, LauncherContract, job_of, log_until, poll_until, ticket_of
from tests.waiting import wait_for

PACK = (sys.executable, str(Path(__file__).with_name("pack_program.py")))


def shareable(job: Job) -> Job:
    """The job as one that a pack of :mod:`pack_program` can run."""
    knobs = {"argv": json.dumps(job.argv), "environment": json.dumps(dict(job.environment))}
    return replace(job, slot=SlotTerms(argv=PACK, knobs=knobs))


class Shared(PackedLauncher):
    """The contract's jobs know nothing of packs: here each becomes one that shares."""

    def submit(self, job: Job) -> str:
        return super().submit(shareable(job))


def packs_of(folder: Path) -> list[PackFolder]:
    return [PackFolder(place) for place in sorted((folder / "packs").glob("[0-9]*"))]


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Shared(LocalLauncher(), slots=3, folder=tmp_path / "packs")


class TestPackedLauncher(LauncherContract):
    @pytest.fixture
    def launcher(self, tmp_path: Path) -> Launcher:
        return Shared(LocalLauncher(), slots=3, folder=tmp_path / "packs")


def test_trials_share_a_job_up_to_the_number_of_slots(launcher: Launcher, tmp_path: Path) -> None:
    jobs = [job_of(tmp_path / f"{i}", WAIT, name=f"study-{i:04d}-0") for i in range(5)]
    ids = [launcher.submit(job) for job in jobs]
    assert len(set(ids[:3])) == 1
    assert len(set(ids)) == 2
    for job in jobs:
        poll_until(launcher, ticket_of(job), JobState.RUNNING)
        launcher.cancel(ticket_of(job))


def test_a_slot_that_falls_free_takes_the_next_trial(launcher: Launcher, tmp_path: Path) -> None:
    stays, goes = (job_of(tmp_path / n, WAIT, name=f"study-{n}-0") for n in ("stays", "goes"))
    third, fourth = (job_of(tmp_path / n, WAIT, name=f"study-{n}-0") for n in ("third", "fourth"))
    first_id, *_ = [launcher.submit(job) for job in (stays, goes, third)]
    poll_until(launcher, ticket_of(goes), JobState.RUNNING)
    log_until(goes, "waiting")
    launcher.cancel(ticket_of(goes))
    poll_until(launcher, ticket_of(goes), JobState.ENDED)
    assert launcher.submit(fourth) == first_id
    poll_until(launcher, ticket_of(fourth), JobState.RUNNING)
    assert launcher.poll([ticket_of(stays)])[stays.name].state is JobState.RUNNING
    for job in (stays, third, fourth):
        launcher.cancel(ticket_of(job))


def test_a_killed_pack_interrupts_its_trials_and_they_run_again(launcher: Launcher, tmp_path: Path) -> None:
    done, running = (job_of(tmp_path / n, p, name=f"study-{n}-0") for n, p in (("done", SAY), ("runs", WAIT)))
    for job in (done, running):
        launcher.submit(job)
    poll_until(launcher, ticket_of(done), JobState.ENDED)
    log_until(running, "waiting")
    claim = json.loads(AttemptPaths(running.folder).claim.read_text())
    os.kill(claim["pid"], signal.SIGKILL)
    status = poll_until(launcher, ticket_of(running), JobState.PREEMPTED)
    assert "study-pack-0000 ended before it" in status.reason
    assert launcher.poll([ticket_of(done)])[done.name].state is JobState.ENDED
    again = replace(running, name="study-runs-1", folder=tmp_path / "again", log=tmp_path / "again" / "job.log")
    again.folder.mkdir()
    launcher.submit(again)
    poll_until(launcher, ticket_of(again), JobState.RUNNING)
    assert len(packs_of(tmp_path)) == 2
    launcher.cancel(ticket_of(again))


def test_a_launcher_made_anew_finds_packs_and_trials(launcher: Launcher, tmp_path: Path) -> None:
    job, other = (job_of(tmp_path / n, WAIT, name=f"study-{n}-0") for n in ("one", "two"))
    first_id = launcher.submit(job)
    log_until(job, "waiting")
    another = Shared(LocalLauncher(), slots=3, folder=tmp_path / "packs")
    assert another.poll([ticket_of(job)])[job.name].state is JobState.RUNNING
    assert [ticket.name for ticket in another.jobs_below(tmp_path)] == [job.name]
    assert another.jobs_below(tmp_path / "elsewhere") == []
    assert another.submit(other) == first_id
    for one in (job, other):
        another.cancel(ticket_of(one))


def test_a_job_that_can_share_nothing_goes_to_the_launcher_below(tmp_path: Path) -> None:
    launcher = PackedLauncher(LocalLauncher(), slots=3, folder=tmp_path / "packs")
    job = job_of(tmp_path / "a", SAY)
    poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)
    assert not packs_of(tmp_path)


def test_what_a_pack_held_is_told_with_its_trials_and_its_end_once(launcher: PackedLauncher, tmp_path: Path) -> None:
    jobs = [job_of(tmp_path / n, WAIT, name=f"study-{n}-0") for n in ("one", "two")]
    for job in jobs:
        launcher.submit(job)
        poll_until(launcher, ticket_of(job), JobState.RUNNING)
        log_until(job, "waiting")
    told = launcher.shared_jobs()
    assert [(pack.first, pack.trials) for pack in told] == [("study-one-0", ["study-one-0", "study-two-0"])]
    assert told[0].ended_at is None
    assert launcher.let_go(), "it has trials, and is left alone"
    for job in jobs:
        launcher.cancel(ticket_of(job))
        poll_until(launcher, ticket_of(job), JobState.ENDED)
    anew = Shared(LocalLauncher(), slots=3, folder=tmp_path / "packs")
    wait_for(lambda: not anew.let_go())
    (over,) = anew.shared_jobs()
    assert (over.first, over.trials, over.started_at) == (told[0].first, told[0].trials, told[0].started_at)
    seconds = json.loads(AttemptPaths(packs_of(tmp_path)[0].paths.folder).ended.read_text())["seconds"]
    assert over.ended_at == pytest.approx(over.started_at + seconds, abs=0.01)
    assert not anew.shared_jobs()


@pytest.mark.parametrize("packs", [(), ("--packs", "2", "--slots", "1")], ids=["one pack", "two packs"])
def test_a_pack_that_is_let_go_ends_without_waiting_for_more(tmp_path: Path, packs: tuple[str, ...]) -> None:
    folder = PackFolder(tmp_path / "0000")
    folder.make()
    folder.let_go()
    done = subprocess.run([*PACK, str(tmp_path / "0000"), *packs, "--idle", "1e9"], timeout=120, check=False)
    assert done.returncode == 0


def test_a_job_of_several_packs_that_is_asked_to_end_asks_them_and_says_so(tmp_path: Path) -> None:
    folder = PackFolder(tmp_path / "0000")
    folder.make()
    command = [*PACK, str(tmp_path / "0000"), "--packs", "2", "--slots", "1", "--idle", "1e9"]
    job = subprocess.Popen(command)
    wait_for(lambda: all(state.at for state in folder.states(2)), seconds=60)
    job.terminate()
    assert job.wait(60) == 143


class SeveralPacks:
    """Four trials that wait, in one job of two packs with two slots each."""

    def __init__(self, below: Launcher, folder: Path) -> None:
        self.launcher = Shared(below, slots=2, folder=folder / "packs", packs=2)
        self.jobs = [job_of(folder / f"{i}", WAIT, name=f"study-{i:04d}-0") for i in range(4)]
        self.ids = {self.launcher.submit(job) for job in self.jobs}

    def packs(self) -> dict[int, list[Job]]:
        """The trials by the process that took them, once all have begun."""
        found: dict[int, list[Job]] = {}
        for job in self.jobs:
            poll_until(self.launcher, ticket_of(job), JobState.RUNNING, seconds=90)
            log_until(job, "waiting")
            claim = json.loads(AttemptPaths(job.folder).claim.read_text())
            found.setdefault(claim["pid"], []).append(job)
        return found

    def poll(self, job: Job, state: JobState) -> JobStatus:
        return poll_until(self.launcher, ticket_of(job), state, seconds=90)


def test_the_packs_of_a_job_share_its_trials_and_it_ends_when_all_are_idle(tmp_path: Path) -> None:
    several = SeveralPacks(LocalLauncher(), tmp_path)
    assert len(several.ids) == 1
    assert sorted(len(jobs) for jobs in several.packs().values()) == [2, 2]
    first, *others = several.jobs
    several.launcher.cancel(ticket_of(first))
    several.poll(first, JobState.ENDED)
    further = job_of(tmp_path / "4", WAIT, name="study-0004-0")
    assert several.launcher.submit(further) in several.ids, "its slot is free"
    several.poll(further, JobState.RUNNING)
    for job in (*others, further):
        several.launcher.cancel(ticket_of(job))
        several.poll(job, JobState.ENDED)
    (pack,) = packs_of(tmp_path)
    ended = AttemptPaths(pack.paths.folder).ended
    wait_for(ended.exists)
    assert json.loads(ended.read_text())["exit_code"] == 0


@pytest.mark.parametrize("killed", ["one pack", "the process that started them"])
def test_where_one_pack_of_a_job_dies_all_its_trials_run_again_in_another_job(tmp_path: Path, killed: str) -> None:
    several = SeveralPacks(LocalLauncher(), tmp_path)
    done, *interrupted = several.jobs
    pids = list(several.packs())
    several.launcher.cancel(ticket_of(done))
    several.poll(done, JobState.ENDED)
    (pack,) = packs_of(tmp_path)
    starter = json.loads(AttemptPaths(pack.paths.folder).started.read_text())["pid"]
    os.kill(pids[0] if killed == "one pack" else starter, signal.SIGKILL)
    for job in interrupted:
        assert "study-pack-0000 ended before it" in several.poll(job, JobState.PREEMPTED).reason
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert several.poll(done, JobState.ENDED)
    again = replace(interrupted[0], name="study-0001-1", folder=tmp_path / "again", log=tmp_path / "again" / "job.log")
    again.folder.mkdir()
    assert several.launcher.submit(again) not in several.ids
    several.poll(again, JobState.RUNNING)
    several.launcher.cancel(ticket_of(again))
    several.poll(again, JobState.ENDED)


@pytest.mark.parametrize(
    ("given", "devices"),
    [(None, ["0", "1"]), ("", ["", ""]), ("3,5", ["3", "5"]), ("GPU-a,GPU-b,GPU-c", ["GPU-a", "GPU-b"])],
)
def test_each_pack_of_a_job_has_a_gpu_of_its_own(given: str | None, devices: list[str]) -> None:
    assert devices_of({} if given is None else {"CUDA_VISIBLE_DEVICES": given}, packs=2) == devices


def test_a_job_with_fewer_gpus_than_packs_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"site\.packs = 2: the job has 1 GPUs \(CUDA_VISIBLE_DEVICES=3\)"):
        devices_of({"CUDA_VISIBLE_DEVICES": "3"}, packs=2)


class Below(Launcher):
    """A launcher that only says what became of its jobs."""

    def __init__(self) -> None:
        self.state, self.cancelled, self.refuses = JobState.QUEUED, [], False
        self.exit_code: int | None = None
        self.started_at: float | None = None
        self.nodes: tuple[str, ...] = ()
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> str:
        self.jobs.append(job)
        if self.refuses:
            raise LauncherError("no GPU is free")
        return "17"

    def poll(self, tickets: Sequence[Ticket]) -> Mapping[str, JobStatus]:
        status = JobStatus(
            state=self.state, job_id="17", reason="as the cluster says", started_at=self.started_at,
            exit_code=self.exit_code, nodes=self.nodes,
        )  # fmt: skip
        return {ticket.name: status for ticket in tickets}

    def cancel(self, ticket: Ticket, *, force: bool = False) -> None:
        self.cancelled.append((ticket.name, force))


@pytest.fixture
def below() -> Below:
    return Below()


@pytest.fixture
def quiet(below: Below, tmp_path: Path) -> Launcher:
    """Packs that never take anything."""
    return Shared(below, slots=2, folder=tmp_path / "packs")


def test_a_trial_waits_with_its_pack_and_says_why(quiet: Launcher, tmp_path: Path) -> None:
    job = job_of(tmp_path / "a", SAY)
    quiet.submit(job)
    status = quiet.poll([ticket_of(job)])[job.name]
    assert (status.state, status.reason, status.job_id) == (JobState.QUEUED, "as the cluster says", "17")


def test_what_a_pack_held_for_a_trial_that_was_taken_back_is_told(
    quiet: PackedLauncher, below: Below, tmp_path: Path
) -> None:
    job = job_of(tmp_path / "a", SAY)
    quiet.submit(job)
    assert quiet.let_go()
    assert not quiet.shared_jobs(), "it waits in the queue, and holds nothing"
    quiet.cancel(ticket_of(job))
    below.state, below.started_at = JobState.RUNNING, 5.0
    assert quiet.let_go()
    assert quiet.shared_jobs() == [
        SharedJob(name="study-pack-0000", first=job.name, trials=[job.name], started_at=5.0, ended_at=None)
    ]


def test_a_trial_that_no_pack_took_can_be_taken_back(quiet: Launcher, tmp_path: Path) -> None:
    job = job_of(tmp_path / "a", SAY)
    quiet.submit(job)
    quiet.cancel(ticket_of(job))
    assert quiet.poll([ticket_of(job)])[job.name].state is JobState.ENDED
    assert list(packs_of(tmp_path)[0].take()) == []


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (JobState.NODE_FAILED, JobState.NODE_FAILED),
        (JobState.TIME_LIMIT, JobState.PREEMPTED),
        (JobState.HOST_MEMORY, JobState.HOST_MEMORY),
        (JobState.CANCELLED, JobState.PREEMPTED),
        (JobState.ENDED, JobState.PREEMPTED),
    ],
)
def test_the_end_of_a_pack_is_no_fault_of_its_trials(
    quiet: Launcher, below: Below, tmp_path: Path, state: JobState, expected: JobState
) -> None:
    job = job_of(tmp_path / "a", SAY)
    quiet.submit(job)
    below.state = state
    assert quiet.poll([ticket_of(job)])[job.name].state is expected


@pytest.mark.parametrize(
    ("code", "line", "kind"),
    [
        (2, "packed_lora: site.packs = 2: the job has 1 GPUs; allowed are", FailureKind.CONFIGURATION),
        (3, "packed_lora: No module named 'peft'; pip install 'lora-tune[peft]'", FailureKind.CONFIGURATION),
        (127, "/opt/python: cannot be started: No such file or directory", FailureKind.CONFIGURATION),
        (1, "RuntimeError: CUDA error: uncorrectable ECC error encountered", FailureKind.INFRASTRUCTURE),
    ],
)
def test_a_trial_whose_pack_cannot_begin_fails_as_its_pack_did(
    quiet: Launcher, below: Below, tmp_path: Path, code: int, line: str, kind: FailureKind
) -> None:
    job = job_of(tmp_path / "a", SAY)
    quiet.submit(job)
    AttemptPaths(packs_of(tmp_path)[0].paths.folder).log.write_text(f"loading\n{line}\n")
    below.state, below.exit_code = JobState.ENDED, code
    status = quiet.poll([ticket_of(job)])[job.name]
    assert (status.state, status.exit_code) == (JobState.ENDED, code)
    found = diagnose(status.output, state=status.state.value, exit_code=code, reason=status.reason)
    assert (found.kind, line in found.line) == (kind, True)


@pytest.mark.parametrize(
    ("code", "taken", "expected"),
    [
        (1, True, JobState.DISPLACED),
        (-9, True, JobState.DISPLACED),
        (0, False, JobState.PREEMPTED),
        (143, False, JobState.PREEMPTED),
        (-9, False, JobState.PREEMPTED),
    ],
)
def test_a_pack_that_was_ended_or_has_trained_says_nothing_of_a_trial_that_waits(
    quiet: Launcher, below: Below, tmp_path: Path, code: int, taken: bool, expected: JobState
) -> None:
    """Where the pack took another one, it is that one's attempt; of a pack that took none it is everybody's."""
    first, waits = (job_of(tmp_path / n, SAY, name=f"study-{n}-0") for n in ("one", "two"))
    quiet.submit(first)
    if taken:
        assert len(list(packs_of(tmp_path)[0].take())) == 1
    quiet.submit(waits)
    below.state, below.exit_code = JobState.ENDED, code
    assert quiet.poll([ticket_of(waits)])[waits.name].state is expected


def test_a_trial_that_is_to_train_alone_is_asked_for_so_and_taken_when_there_is_room(
    below: Below, tmp_path: Path
) -> None:
    launcher, alone = PackedLauncher(below, slots=3, folder=tmp_path / "packs"), job_of(tmp_path / "a", SAY)
    slot = SlotTerms(argv=PACK, knobs={}, company=1)
    launcher.submit(replace(alone, slot=slot))
    (pack,) = packs_of(tmp_path)
    assert list(pack.take(lambda request: request.company != 1)) == []
    assert pack.asked(alone.name), "it was not touched"
    assert [request.company for request in pack.take()] == [1]


def test_a_pack_whose_folder_was_removed_gets_no_trial_and_its_end_is_seen(
    quiet: Launcher, below: Below, tmp_path: Path
) -> None:
    trains, follows = (job_of(tmp_path / n, SAY, name=f"study-{n}-0") for n in ("one", "two"))
    quiet.submit(trains)
    below.state = JobState.RUNNING
    (pack,) = packs_of(tmp_path)
    (request,) = pack.take()
    write_json(request.attempt.started, describe(os.getpid(), request.token))
    shutil.rmtree(pack.paths.folder)
    assert quiet.poll([ticket_of(trains)])[trains.name].state is JobState.RUNNING
    quiet.cancel(ticket_of(trains))
    quiet.submit(follows)
    (second,) = packs_of(tmp_path)
    assert [request.name for request in second.take()] == [follows.name]
    below.state = JobState.LOST
    assert quiet.poll([ticket_of(trains)])[trains.name].state is JobState.PREEMPTED


def test_a_node_is_called_what_the_cluster_calls_it_and_not_by_its_host_name(
    quiet: Launcher, below: Below, tmp_path: Path
) -> None:
    """After a node failure it is excluded by this name, and sbatch refuses a name that it does not know."""
    job = job_of(tmp_path / "a", SAY)
    quiet.submit(job)
    below.state, below.nodes = JobState.RUNNING, ("node007",)
    (request,) = packs_of(tmp_path)[0].take()
    write_json(request.attempt.started, describe(os.getpid(), request.token))
    assert quiet.poll([ticket_of(job)])[job.name].nodes == ("node007",)
    below.state = JobState.NODE_FAILED
    assert quiet.poll([ticket_of(job)])[job.name].nodes == ("node007",)


@pytest.mark.parametrize("restarted", [False, True], ids=["same driver", "another driver"])
def test_the_number_of_a_pack_whose_folder_was_removed_is_given_to_no_other(
    quiet: PackedLauncher, below: Below, tmp_path: Path, *, restarted: bool
) -> None:
    """Two jobs of one name in one folder: the trials of the first were taken for the second's."""
    trains, follows = (job_of(tmp_path / n, SAY, name=f"study-{n}-0") for n in ("one", "two"))
    quiet.submit(trains)
    below.state = JobState.RUNNING
    shutil.rmtree(packs_of(tmp_path)[0].paths.folder)
    launcher = Shared(below, slots=2, folder=tmp_path / "packs") if restarted else quiet
    launcher.poll([ticket_of(trains)])
    launcher.submit(follows)
    assert [place.paths.folder.name for place in packs_of(tmp_path)] == ["0001"]


def test_a_pack_that_hangs_and_whose_folder_was_removed_is_killed_by_the_mark_of_its_processes(
    launcher: Launcher, tmp_path: Path
) -> None:
    job = job_of(tmp_path / "a", WAIT, name="study-a-0")
    launcher.submit(job)
    log_until(job, "waiting")
    pack = json.loads(AttemptPaths(job.folder).claim.read_text())["pid"]
    os.kill(pack, signal.SIGSTOP)
    shutil.rmtree(tmp_path / "packs" / "0000")
    launcher.cancel(ticket_of(job), force=True)
    poll_until(launcher, ticket_of(job), JobState.PREEMPTED)
    assert not Path(f"/proc/{pack}").exists()


def test_a_trial_whose_pack_failed_after_its_folder_was_removed_did_nothing_wrong(
    quiet: Launcher, below: Below, tmp_path: Path
) -> None:
    """Whether the pack had taken a trial nobody can tell any more: the trial was judged by the pack's exit code."""
    job = job_of(tmp_path / "a", SAY)
    quiet.submit(job)
    (pack,) = packs_of(tmp_path)
    assert len(list(pack.take())) == 1
    shutil.rmtree(pack.paths.folder)
    below.state, below.exit_code = JobState.ENDED, 1
    assert quiet.poll([ticket_of(job)])[job.name].state is JobState.PREEMPTED


def test_a_message_for_which_the_disk_has_no_room_is_an_answer_that_failed_and_is_tried_again(
    quiet: PackedLauncher, below: Below, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    job = job_of(tmp_path / "a", SAY)
    quiet.submit(job)
    (pack,) = packs_of(tmp_path)
    assert len(list(pack.take())) == 1
    with monkeypatch.context() as disk:
        disk.setattr("lora_tune.launchers.pack_folder.write_json", full)
        with pytest.raises(LauncherError, match=r"study-0000-0 is not ended yet: .*No space left"):
            quiet.cancel(ticket_of(job))
        quiet.widen(7)
    quiet.cancel(ticket_of(job))
    assert pack.stopped([job.name]) == {job.name: False}
    write_json(AttemptPaths(job.folder).ended, {"token": "", "exit_code": 143, "at": 1.0})
    monkeypatch.setattr("pathlib.Path.touch", full)
    with pytest.raises(LauncherError, match=r"study-pack-0000 is not let go yet: .*No space left"):
        quiet.let_go()


def test_a_pack_that_waits_in_the_queue_for_nobody_is_taken_out_of_it(
    quiet: PackedLauncher, below: Below, tmp_path: Path
) -> None:
    job = job_of(tmp_path / "a", SAY)
    quiet.submit(job)
    quiet.let_go()
    assert not below.cancelled, "a trial waits for it"
    quiet.cancel(ticket_of(job))
    quiet.let_go()
    assert below.cancelled == [("study-pack-0000", False)]


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_clock_that_was_set_while_a_trial_trained_changes_neither_its_share_nor_its_end(
    quiet: Launcher, below: Below, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    job = job_of(tmp_path / "a", SAY)
    quiet.submit(job)
    below.state = JobState.RUNNING
    (pack,) = packs_of(tmp_path)
    (request,) = pack.take()
    began = describe(os.getpid(), request.token)
    write_json(request.attempt.started, {**began, "steady": began["steady"] - 100})
    monkeypatch.setattr("time.time", lambda: began["at"] + 100 + step)
    pack.tell({job.name: 25.0})
    status = quiet.poll([ticket_of(job)])[job.name]
    assert (status.node_share, status.share_seconds) == (pytest.approx(0.25, rel=0.01), 25.0)
    end = {"token": request.token, "exit_code": 0, "at": began["at"] + 100 + step, "seconds": 100, "node_share": 0.25}
    write_json(request.attempt.ended, end)
    assert quiet.poll([ticket_of(job)])[job.name].ended_at == began["at"] + 100


def test_the_share_of_a_trial_in_a_pack_that_an_earlier_release_started(
    quiet: Launcher, below: Below, tmp_path: Path
) -> None:
    """Its state tells no clock that nobody sets: each of its trials counted as the whole node's, 64 times its cost."""
    job = job_of(tmp_path / "a", SAY)
    quiet.submit(job)
    below.state = JobState.RUNNING
    (pack,) = packs_of(tmp_path)
    (request,) = pack.take()
    began = describe(os.getpid(), request.token)
    write_json(request.attempt.started, began)
    write_json(pack.paths.state(0), {"at": began["at"] + 100, "shares": {job.name: 25.0}})
    assert quiet.poll([ticket_of(job)])[job.name].node_share == pytest.approx(0.25)


def test_a_pack_that_closed_takes_no_trial_and_another_is_started(quiet: Launcher, tmp_path: Path) -> None:
    first, second = (job_of(tmp_path / n, SAY, name=f"study-{n}-0") for n in ("one", "two"))
    quiet.submit(first)
    pack = packs_of(tmp_path)[0]
    assert not pack.close(), "a request waits"
    assert [request.name for request in pack.take()] == [first.name]
    assert pack.close()
    quiet.submit(second)
    assert [request.name for request in packs_of(tmp_path)[1].take()] == [second.name]


def test_a_trial_that_its_pack_takes_while_they_are_counted_counts_once(quiet: Launcher, tmp_path: Path) -> None:
    for i in range(2):
        quiet.submit(job_of(tmp_path / f"{i}", "", name=f"study-{i}-0"))
    (pack,) = packs_of(tmp_path)
    counted = pack.open_requests()
    names = [next(counted).name]
    assert len(list(pack.take())) == 2
    names += [request.name for request in counted]
    assert sorted(names) == ["study-0-0", "study-1-0"]


def test_a_trial_that_was_seen_to_end_is_not_looked_at_again(quiet: Launcher, tmp_path: Path) -> None:
    jobs = [job_of(tmp_path / f"{i}", "", name=f"study-{i}-0") for i in range(2)]
    for job in jobs:
        quiet.submit(job)
    (pack,) = packs_of(tmp_path)
    list(pack.take())
    assert len(list(pack.open_requests())) == 2
    AttemptPaths(jobs[0].folder).ended.write_text("{}")
    assert [request.name for request in pack.open_requests()] == ["study-1-0"]
    shutil.rmtree(jobs[0].folder)  # somebody needs the room on the disk
    assert [request.name for request in pack.open_requests()] == ["study-1-0"]


def test_a_submission_that_died_between_its_two_files_is_made_again(quiet: Launcher, tmp_path: Path) -> None:
    job = job_of(tmp_path / "a", SAY)
    quiet.submit(job)
    pack = packs_of(tmp_path)[0]
    pack.withdraw(job.name)
    assert quiet.poll([ticket_of(job)])[job.name].state is JobState.LOST
    quiet.submit(job)
    assert [request.name for request in pack.take()] == [job.name]


def test_a_pack_that_cannot_be_submitted_takes_no_trial_later(quiet: Launcher, below: Below, tmp_path: Path) -> None:
    job = job_of(tmp_path / "a", SAY)
    below.refuses = True
    with pytest.raises(LauncherError, match="no GPU is free"):
        quiet.submit(job)
    below.refuses = False
    quiet.submit(job)
    assert len(packs_of(tmp_path)) == 2
    assert [request.name for request in packs_of(tmp_path)[1].take()] == [job.name]


def test_a_pack_that_hangs_is_killed_and_one_that_works_is_not(
    quiet: Launcher, below: Below, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path / "a", SAY)
    quiet.submit(job)
    pack = packs_of(tmp_path)[0]
    assert len(list(pack.take())) == 1
    pack.tell({job.name: 1.0})
    quiet.cancel(ticket_of(job), force=True)
    assert not below.cancelled
    assert pack.stopped([job.name]) == {job.name: True}
    late = pack.states(1)[0].at + SILENCE_SECONDS + 1
    monkeypatch.setattr("time.time", lambda: late)
    quiet.cancel(ticket_of(job), force=True)
    assert below.cancelled == [("study-pack-0000", True)]


def test_of_several_packs_the_one_that_has_the_trial_is_judged_and_an_unheard_one_hangs(
    below: Below, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Shared(below, slots=1, folder=tmp_path / "packs", packs=2)
    jobs = [job_of(tmp_path / name, "", name=f"study-{name}-0") for name in "ab"]
    for job in jobs:
        launcher.submit(job)
    (pack,) = packs_of(tmp_path)
    quiet, heard = (PackFolder(pack.paths.folder, number) for number in (0, 1))
    assert len(list(heard.take())) == 2
    quiet.tell({jobs[0].name: 1.0})
    late = pack.states(2)[0].at + SILENCE_SECONDS + 1
    monkeypatch.setattr("time.time", lambda: late)
    heard.tell({jobs[1].name: 1.0})
    launcher.cancel(ticket_of(jobs[1]), force=True)
    assert not below.cancelled
    launcher.cancel(ticket_of(jobs[0]), force=True)
    assert below.cancelled == [("study-pack-0000", True)]


def test_a_job_of_several_packs_has_a_gpu_for_each(below: Below, tmp_path: Path) -> None:
    launcher = Shared(below, slots=4, folder=tmp_path / "packs", packs=2)
    launcher.submit(replace(job_of(tmp_path / "a", ""), resources=Resources(gpus_per_node=1, minutes=9)))
    (job,) = below.jobs
    assert job.resources == Resources(gpus_per_node=2)
    assert job.argv[-4:] == ("--packs", "2", "--slots", "4")


def test_a_job_that_lives_gets_no_more_trials_than_its_packs_were_told_to_take(below: Below, tmp_path: Path) -> None:
    started_first, started_again = (Shared(below, slots=k, folder=tmp_path / "packs", packs=2) for k in (1, 4))
    jobs = [job_of(tmp_path / f"{i}", "", name=f"study-{i:04d}-0") for i in range(11)]
    for job in jobs[:1]:
        started_first.submit(job)
    for job in jobs[1:]:
        started_again.submit(job)
    assert [job.argv[-1] for job in below.jobs] == ["1", "4", "4"]
    assert [len(list(pack.take())) for pack in packs_of(tmp_path)] == [2, 8, 1]


def study_on_this_machine(**site: object) -> Study:
    """A study of trials that share jobs, begun with two at one time."""
    return Study.model_validate(
        {
            "name": "study",
            "workload": {"kind": "peft"},
            "site": {"launcher": "local", "gpus_per_node": 1, "slots": 8, **site},
            "space": {"LR": 1e-3},
            "budget": {"trials": 9, "parallel": 2},
        }
    )


def on_a_gpu(folder: Path) -> Job:
    return replace(job_of(folder, WAIT, name=f"study-{folder.name}-0"), resources=Resources(gpus_per_node=1))


def test_a_job_with_one_pack_has_room_for_more_trials_than_the_sweep_began_with(tmp_path: Path) -> None:
    launcher = make_launcher(study_on_this_machine(), tmp_path / "packs")
    jobs = [shareable(on_a_gpu(tmp_path / f"{i:04d}")) for i in range(8)]
    try:
        assert len({launcher.submit(job) for job in jobs}) == 1
    finally:
        for job in jobs:
            launcher.cancel(ticket_of(job))
    for job in jobs:
        poll_until(launcher, ticket_of(job), JobState.ENDED, seconds=90)


def test_the_trials_that_a_sweep_begins_with_are_shared_out_among_the_packs_of_a_job(tmp_path: Path) -> None:
    launcher = make_launcher(study_on_this_machine(packs=2), tmp_path / "packs")
    job = shareable(on_a_gpu(tmp_path / "0000"))
    launcher.submit(job)
    (pack,) = packs_of(tmp_path)
    assert json.loads(AttemptPaths(pack.paths.folder).job.read_text())["argv"][-4:] == ["--packs", "2", "--slots", "1"]
    launcher.cancel(ticket_of(job))
    poll_until(launcher, ticket_of(job), JobState.ENDED, seconds=90)


def test_more_trials_at_one_time_than_the_sweep_began_with_find_gpus(tmp_path: Path) -> None:
    alone = make_launcher(study_on_this_machine(slots=None), tmp_path)
    packed = make_launcher(study_on_this_machine(), tmp_path / "packs")
    for launcher in (alone, packed):
        launcher.widen(10)
    jobs = [on_a_gpu(tmp_path / f"{i:04d}") for i in range(3)]
    shared = [shareable(on_a_gpu(tmp_path / f"1{i:03d}")) for i in range(10)]
    everyone = [*((job, alone) for job in jobs), *((job, packed) for job in shared)]
    try:
        for job in jobs:
            alone.submit(job)
        assert len({packed.submit(job) for job in shared}) == 2, "eight in the first pack, and one beside it"
    finally:
        for job, launcher in everyone:
            launcher.cancel(ticket_of(job))
    for job, launcher in everyone:
        poll_until(launcher, ticket_of(job), JobState.ENDED, JobState.LOST, seconds=90)


def test_the_packs_of_a_live_job_take_more_when_more_train_at_one_time(tmp_path: Path) -> None:
    launcher = make_launcher(study_on_this_machine(packs=2), tmp_path / "packs")
    jobs = [shareable(on_a_gpu(tmp_path / f"{i:04d}")) for i in range(6)]
    try:
        first = launcher.submit(jobs[0])
        launcher.widen(6)
        assert {launcher.submit(job) for job in jobs[1:]} == {first}, "no other GPUs are asked for"
        for job in jobs:
            poll_until(launcher, ticket_of(job), JobState.RUNNING, seconds=90)
    finally:
        for job in jobs:
            launcher.cancel(ticket_of(job))
    for job in jobs:
        poll_until(launcher, ticket_of(job), JobState.ENDED, seconds=90)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"shares": 3}', '{"at": "x", "shares": {"a": "b"}}', "\0" * 9])
def test_a_broken_file_of_a_pack_says_nothing_and_raises_nothing(quiet: Launcher, tmp_path: Path, text: str) -> None:
    job = job_of(tmp_path / "a", SAY)
    quiet.submit(job)
    pack = packs_of(tmp_path)[0]
    pack.paths.state(0).write_text(text)
    (pack.paths.requests / "broken.json").write_text(text)
    assert quiet.poll([ticket_of(job)])[job.name].state is JobState.QUEUED
    assert [request.name for request in pack.take()] == [job.name]


def test_a_share_of_the_node_is_what_the_pack_says(launcher: Launcher, tmp_path: Path) -> None:
    job = job_of(tmp_path / "a", SAY)
    status = poll_until(launcher, ticket_of(job, launcher.submit(job)), JobState.ENDED)
    assert status.node_share == 0.5
    assert status.seconds is None, "a log on the clock of the trial alone may be longer than its job"
    wait_for(lambda: launcher.poll([ticket_of(job)])[job.name].ended_at)


@pytest.mark.slurm
def test_under_slurm_trials_share_one_job_and_its_end_interrupts_them(slurm: Cluster, tmp_path: Path) -> None:
    below = SlurmLauncher(Site.model_validate({"launcher": "slurm"}))
    launcher = Shared(below, slots=3, folder=tmp_path / "packs")
    done, running = (job_of(tmp_path / n, p, name=f"study-{n}-0") for n, p in (("done", SAY), ("runs", WAIT)))
    ids = [launcher.submit(job) for job in (done, running)]
    assert len(set(ids)) == 1
    poll_until(launcher, ticket_of(done), JobState.ENDED, seconds=90)
    poll_until(launcher, ticket_of(running), JobState.RUNNING)
    subprocess.run(["scancel", ids[0]], check=True)
    status = poll_until(launcher, ticket_of(running), JobState.PREEMPTED, seconds=60)
    assert "cancelled" in status.reason.lower()


@pytest.mark.slurm
def test_under_slurm_several_packs_are_one_job_and_the_death_of_one_ends_it(slurm: Cluster, tmp_path: Path) -> None:
    several = SeveralPacks(SlurmLauncher(Site.model_validate({"launcher": "slurm"})), tmp_path)
    assert len(several.ids) == 1
    pids = list(several.packs())
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGKILL)
    for job in several.jobs:
        assert "ended before it" in several.poll(job, JobState.PREEMPTED).reason
    wait_for(lambda: not Path(f"/proc/{pids[0]}").exists())


@pytest.mark.slurm
def test_under_slurm_a_job_with_packs_that_is_requeued_again_and_again_runs_no_trial_twice(
    slurm: Cluster, tmp_path: Path
) -> None:
    launcher = Shared(SlurmLauncher(Site.model_validate({"launcher": "slurm"})), slots=3, folder=tmp_path / "packs")
    ids = []
    for number in range(3):
        attempts = [
            job_of(tmp_path / f"{trial}-{number}", WAIT, name=f"study-{trial:04d}-{number}") for trial in range(2)
        ]
        ids += [launcher.submit(job) for job in attempts]
        for job in attempts:
            poll_until(launcher, ticket_of(job), JobState.RUNNING, seconds=90)
            log_until(job, "waiting", seconds=60)
        if number == 2:
            break
        slurm.run("scontrol", "update", f"JobId={ids[-1]}", "Requeue=1")
        slurm.run("scontrol", "requeue", ids[-1])
        for job in attempts:
            poll_until(launcher, ticket_of(job), JobState.PREEMPTED, seconds=90)
    assert len(set(ids)) == 3, "the trials of each pack go on together, in another job"
    for job in attempts:
        launcher.cancel(ticket_of(job))
        poll_until(launcher, ticket_of(job), JobState.ENDED, seconds=60)
    launcher.let_go()
    wait_for(lambda: not slurm.run("squeue", "-h").strip(), seconds=90)
    logs = [job_log.read_text().count("waiting") for job_log in sorted(tmp_path.glob("*-*/job.log"))]
    assert logs == [1] * 6
