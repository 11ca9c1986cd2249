"""What makes a time another one: restarts within the job, resumes, pauses, a throttled processor, a slewed clock.

Each is a function of (room, chance), as in :mod:`tests.chaos.faults`. The first ones strike trials wherever they run;
those of the cluster are for sweeps on Slurm.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.chaos.local_room import LocalRoom
from tests.chaos.timed_room import TimedRoom

QUOTAS = Path("/sys/fs/cgroup/cpu")
"""Where version 1 of the control groups keeps processor time."""


def restart_trial(room: LocalRoom, chance: random.Random) -> str:
    """A trial's program starts again from the beginning, within its job: a retry loop."""
    return _signal(room, chance, signal.SIGUSR1)


def resume_trial(room: LocalRoom, chance: random.Random) -> str:
    """A trial's program starts again within its job, and goes on from its last eval: torchrun's restarts."""
    return _signal(room, chance, signal.SIGUSR2)


def stop_trial(room: LocalRoom, chance: random.Random) -> str:
    """A trial's program is stopped by a signal, and goes on."""
    if not (pids := _training(room)):
        return ""
    pid, seconds = chance.choice(pids), chance.uniform(0.2, 5)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
    return f"pid {pid}, {seconds:.1f} s"


def throttle_job(room: LocalRoom, chance: random.Random) -> str:
    """A trial's program, or all of a job with its runner, gets a hundredth of a processor for a while."""
    if not (pids := _training(room)):
        return ""
    pid, seconds = chance.choice(pids), chance.uniform(1, 5)
    whole = [pid, *_above(pid, room.processes())] if chance.random() < 0.5 else [pid]
    with _share(whole):
        time.sleep(seconds)
    return f"pids {whole}, {seconds:.1f} s"


def slew_clock(room: TimedRoom, chance: random.Random) -> str:
    """The hosts' wall clock is slewed from now on, as time services do, or faster; every second time no more."""
    return f"{room.slew(chance.choice((-0.3, -0.08, 0.08, 0.3))):+g} s a second"


def hide_partition(room: TimedRoom, chance: random.Random) -> str:
    """The partition becomes hidden, or is shown again."""
    how = chance.choice(("YES", "NO"))
    return how if room.cluster.succeeds("scontrol", "update", "PartitionName=gpu", f"Hidden={how}") else ""


def recluster(room: TimedRoom, chance: random.Random) -> str:
    """The cluster gets another name, as at a federation; its jobs live on."""
    name = f"cluster{chance.randrange(1000)}"
    room.cluster.rename(name)
    return name


def _signal(room: LocalRoom, chance: random.Random, number: signal.Signals) -> str:
    if not (pids := _training(room)):
        return ""
    pid = chance.choice(pids)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return f"pid {pid}"


def _training(room: LocalRoom) -> list[int]:
    """The programs of trials that train just now: their signals are set up, so that none dies of one."""
    found = []
    for run in room.runs():
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{run['pid']}/status").read_text()
            caught = int(status.partition("SigCgt:\t")[2].split()[0], 16)
            if run["seconds"] is None and caught & 1 << (signal.SIGUSR1 - 1):
                found.append(int(run["pid"]))
    return sorted(found)


def _above(pid: int, among: Sequence[int]) -> list[int]:
    """The processes above ``pid`` that belong to its job, the runner among them."""
    found = []
    with contextlib.suppress(OSError):
        while (pid := int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])) in among:
            found.append(pid)
    return found


@contextlib.contextmanager
def _share(pids: Sequence[int]) -> Iterator[None]:
    """These processes share a hundredth of a processor within the block: by a quota, else by stopping them in turns."""
    group = QUOTAS / f"chaos-{pids[0]}"
    try:
        before = _group_of(pids[0])
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("1000")
        (group / "cpu.cfs_period_us").write_text("100000")
    except OSError as error:
        raise AssertionError(f"no quota of processor time can be set here: {error}") from error
    try:
        _move(pids, group)
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            _move([int(pid)], before)
        _gone(group)


def _group_of(pid: int) -> Path:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return QUOTAS / path.lstrip("/")
    return QUOTAS


def _move(pids: Sequence[int], group: Path) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended meanwhile
            (group / "cgroup.procs").write_text(str(pid))


def _gone(group: Path) -> None:
    end = time.monotonic() + 10
    while True:
        try:
            group.rmdir()
            return
        except OSError:  # a process is just leaving
            assert time.monotonic() < end, f"{group} does not go"
            time.sleep(0.05)


TRIAL_FAULTS: dict[str, Callable[[LocalRoom, random.Random], str]] = {
    f.__name__: f for f in (restart_trial, resume_trial, stop_trial, throttle_job)
}
CLUSTER_FAULTS: dict[str, Callable[[TimedRoom, random.Random], str]] = {
    f.__name__: f for f in (slew_clock, hide_partition, recluster)
}
