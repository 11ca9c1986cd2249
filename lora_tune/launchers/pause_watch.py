"""When a job's processes stood still while it ran: suspended by Slurm, stopped by a signal, frozen with a cgroup."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from lora_tune.base.host import steady
from lora_tune.launchers.processes import descendants

LOOK_SECONDS = 0.25
LEAST_SECONDS = 1.0
"""A shorter pause is not noted: a busy machine, or a slow disk, holds a process up for as long."""

SCAN_SHARE = 100.0
"""All processes of the machine are looked through at most once in so many times what that takes."""

BUSY_SHARE = 0.2
"""Where processes of the job that were not stopped took more of a processor than this, training may have gone on."""


class Pause(NamedTuple):
    """Epoch seconds by the wall clock between which a job stood still, never more than it did.

    certain: all of the job did; else some of its processes were stopped while others computed.
    """

    begin: float
    end: float
    certain: bool


class _StoppedProcesses(NamedTuple):
    """Processes that are stopped: since when, until when at least, and seconds of processor of each of the others."""

    pids: frozenset[int]
    begin: float
    end: float
    others: dict[int, float]


class PauseWatch:
    """Notes the pauses of the process ``child`` of this one, and of all that it started, between enter and leave.

    Where this process stands still itself, as Slurm and a freezer stop every process of a job, a look comes late
    although no processor was waited for. Else what is stopped shows it. cgroup: of the child, None where it has none.
    note: is told all pauses whenever there is one more.
    """

    def __init__(self, child: int, cgroup: Path | None, note: Callable[[Sequence[Pause]], None]) -> None:
        self.pauses: list[Pause] = []
        self._child, self._note = child, note
        self._frozen = cgroup / "cgroup.events" if cgroup else None
        self._stopped: _StoppedProcesses | None = None
        self._scan_at = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pause watch", daemon=True)

    def __enter__(self) -> PauseWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look(over=True)

    def _watch(self) -> None:
        over = False
        while not over:
            before, waited = steady(), _waited()
            over = self._ended.wait(LOOK_SECONDS)
            # Only the wait is timed: what a look itself takes, on a slow disk, is no pause.
            self._woke(steady() - before - LOOK_SECONDS, _waited() - waited)
            self._look()

    def _woke(self, late: float, waited: float) -> None:
        """A look comes so many seconds late, of which it ``waited`` for a processor."""
        if late - waited >= LEAST_SECONDS:
            now = time.time()
            self._add(Pause(now - (late - waited), now, certain=True))
            self._stopped = None  # what was seen before is a part of it, or is seen again

    def _look(self, *, over: bool = False) -> None:
        stopped, now = self._stopped, time.time()
        if stopped is not None:
            if not over and any(map(_is_stopped, stopped.pids)):
                self._stopped = stopped._replace(end=now)
                return
            self._stopped = None
            if stopped.end - stopped.begin >= LEAST_SECONDS:
                self._add(Pause(stopped.begin, stopped.end, self._all_stood_still(stopped)))
        elif not over and (steady() >= self._scan_at or _is_stopped(self._child)):
            self._scan(now)

    def _scan(self, now: float) -> None:
        began = steady()
        living = _of_the_job()
        self._scan_at = steady() + SCAN_SHARE * (steady() - began)
        stopped = frozenset(pid for pid, (state, _) in living.items() if state == "T")
        if self._is_frozen():
            stopped = frozenset(living)
        if stopped:
            others = {pid: spent for pid, (_, spent) in living.items() if pid not in stopped}
            self._stopped = _StoppedProcesses(stopped, now, now, others)

    def _is_frozen(self) -> bool:
        with contextlib.suppress(OSError):
            return self._frozen is not None and b"frozen 1" in self._frozen.read_bytes()
        return False

    def _all_stood_still(self, stopped: _StoppedProcesses) -> bool:
        now = _of_the_job()
        spent = sum(now[pid][1] - before for pid, before in stopped.others.items() if pid in now)
        return spent <= BUSY_SHARE * (stopped.end - stopped.begin)

    def _add(self, pause: Pause) -> None:
        if self.pauses and pause.begin < self.pauses[-1].end:
            pause = pause._replace(begin=self.pauses[-1].end)
        if pause.end > pause.begin:
            self.pauses.append(pause)
            self._note(self.pauses)


def _of_the_job() -> dict[int, tuple[str, float]]:
    """State and seconds of processor of all that this process has started or adopted."""
    living = descendants(os.getpid())
    living.pop(os.getpid(), None)
    return living


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return stat[stat.rindex(b")") + 2 :].startswith(b"T")
    return False


def _waited() -> float:
    """Seconds that this thread was ready to run and had no processor (proc(5), schedstat); 0 where nobody counts."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    return 0.0
