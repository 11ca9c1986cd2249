"""A job that stands still: stopped by a signal, or with its runner as Slurm and a freezer stop all of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_tune.base.files import write_json
from lora_tune.base.paths import AttemptPaths
from lora_tune.launchers import job_runner
from lora_tune.launchers.base import JobState
from lora_tune.launchers.job_records import read_pauses
from lora_tune.launchers.job_runner import Pause, PauseWatch
from lora_tune.launchers.local import LocalLauncher
from tests.contracts.launcher import job_of, log_until, poll_until, ticket_of
from tests.waiting import wait_for

IDLE = "import time\nprint('ready', flush=True)\ntime.sleep(600)"
BUSY = "print('ready', flush=True)\nwhile True: pass"


def started(program: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child


def stopped_for(seconds: float, watch: PauseWatch, child: subprocess.Popen[bytes]) -> Pause:
    """The pause that is noted of a child that is stopped until so many seconds of it were seen."""
    os.kill(child.pid, signal.SIGSTOP)
    wait_for(lambda: watch._stopped is not None and watch._stopped.end - watch._stopped.begin >= seconds)
    os.kill(child.pid, signal.SIGCONT)
    wait_for(lambda: watch.pauses)
    return watch.pauses[-1]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_runner, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(job_runner, "LEAST_SECONDS", 0.2)
    monkeypatch.setattr(job_runner, "_waited", lambda: 0.0)


@pytest.mark.flaky(reruns=2)  # a watch that gets no processor for 0.2 s takes that for a pause of its own
@pytest.mark.usefixtures("short")
def test_a_process_that_is_stopped_and_continued_has_paused() -> None:
    with started(IDLE) as child:
        with PauseWatch(child.pid, None, lambda _: None) as watch:
            begin, end, certain = stopped_for(0.3, watch, child)
        child.kill()
    assert end - begin >= 0.3
    assert certain


@pytest.mark.flaky(reruns=2)
@pytest.mark.usefixtures("short")
def test_where_others_of_the_job_computed_meanwhile_it_is_not_certain() -> None:
    """A helper that is stopped is no pause of the training; one rank that is stopped is, and the others spin."""
    with started(IDLE) as child, started(BUSY) as other:
        with PauseWatch(child.pid, None, lambda _: None) as watch:
            pause = stopped_for(0.6, watch, child)
        for process in (child, other):
            process.kill()
    assert not pause.certain


@pytest.mark.parametrize(
    ("late", "waited", "paused"),
    [(0.4, 0.0, 0.0), (0.6, 0.0, 0.6), (30.0, 0.0, 30.0), (30.0, 29.6, 0.0), (30.0, 5.0, 25.0)],
    ids=["soon enough", "all of it shortly", "all of it stopped", "no processor was free", "both"],
)
def test_a_watch_that_wakes_late_stood_still_itself(late: float, waited: float, paused: float) -> None:
    told: list[Pause] = []
    watch = PauseWatch(os.getpid(), None, told.extend)
    watch._woke(late, waited)
    assert sum(end - begin for begin, end, _ in told) == pytest.approx(paused)
    assert all(certain for *_, certain in told)


def test_a_cgroup_that_is_frozen_stops_all_of_the_job(tmp_path: Path, short: None) -> None:
    (tmp_path / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    with started(IDLE) as child:
        watch = PauseWatch(child.pid, tmp_path, lambda _: None)
        watch._look()
        assert watch._stopped is not None
        assert child.pid in watch._stopped.pids
        child.kill()


TRAINS = "import time\nprint('begun', flush=True)\nwhile not open('go').read(): time.sleep(0.02)\nprint('over')"


def _whole_job(job_id: str, child: int) -> list[int]:
    return [int(job_id), child]


def _child_alone(_: str, child: int) -> list[int]:
    return [child]


@pytest.mark.long
@pytest.mark.parametrize("seconds", [1.0, 2.5])
@pytest.mark.parametrize("stopped", [_whole_job, _child_alone])
def test_the_runner_of_a_job_notes_when_it_stood_still(
    stopped: Callable[[str, int], list[int]], seconds: float, tmp_path: Path
) -> None:
    """Slurm stops the runner as well; a person stops the trainer, here below a shell."""
    job = job_of(tmp_path / "x", f"import os; os.chdir({str(tmp_path)!r})\n{TRAINS}")
    (tmp_path / "go").touch()
    launcher = LocalLauncher()
    ticket = ticket_of(job, launcher.submit(job))
    log_until(job, "begun")
    child = int(pid_of(AttemptPaths(job.folder).started))
    pids = stopped(ticket.job_id, child)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    began = job_runner.steady()
    wait_for(lambda: job_runner.steady() - began > seconds)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    known = wait_for(lambda: launcher.poll([ticket])[job.name].pauses)
    (tmp_path / "go").write_text("on")
    status = poll_until(launcher, ticket, JobState.ENDED)
    assert status.pauses == known
    assert seconds - 0.5 <= sum(end - begin for begin, end in status.pauses) <= job_runner.steady() - began
    assert status.paused_seconds == 0.0, "all of it is known"


def pid_of(record: Path) -> str:
    return record.read_text().split('"pid": ')[1].split(",")[0]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[10.0, 20.0, True]], {"pauses": ((10.0, 20.0),), "paused_seconds": 0.0}),
        ([[30, 40, True], [10, 20, False]], {"pauses": ((30.0, 40.0),), "paused_seconds": 20.0}),
        ([[20, 10, True], ["a", 1, True], [1, 2]], {"pauses": (), "paused_seconds": 0.0}),
        ("nonsense", {"pauses": (), "paused_seconds": 0.0}),
    ],
)
def test_what_a_record_of_pauses_says(rows: object, expected: dict[str, object], tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path)
    assert read_pauses(attempt, "t") == {}
    write_json(attempt.pauses, {"token": "t", "pauses": rows})
    assert read_pauses(attempt, "t") == expected
    assert read_pauses(attempt, "another") == {"pauses": (), "paused_seconds": 0.0}
