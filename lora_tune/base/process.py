"""Processes, boots and clocks of this machine, told apart for certain."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def send_signal(pid: int, number: int, *, group: bool = False) -> None:
    """Signal a process, or the process group that it leads; one that has ended or is another user's is left alone.

    Nothing is sent to 1 or below: there stand init, our own group, and every process of this user.
    """
    if pid <= 1:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, number)


def own_line() -> set[int]:
    """This process, those that it descends from, and the leaders of their process groups."""
    line, pid = set[int](), os.getpid()
    while pid > 0 and pid not in line:
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:  # it has ended just now
            break
        _, parent, leader = stat[stat.rindex(b")") + 2 :].split()[:3]
        line |= {pid, int(leader)}
        pid = int(parent)
    return line


def start_ticks(pid: int) -> int | None:
    """When process ``pid`` started, in clock ticks since boot (proc(5), field 22); None when there is none.

    A zombie counts as gone.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def host() -> str:
    """The name of this machine."""
    return socket.gethostname()


@functools.cache
def boot() -> str:
    """The name of this boot of the machine; "" where the kernel gives none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


@functools.cache
def place() -> str:
    """Where numbers of processes mean what they mean here: this boot and this PID namespace, in one word.

    Containers on the network of their host have its name, and other hosts may have it, too.
    """
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - a link to no path
    except OSError:
        namespace = ""
    return f"{boot()}/{namespace}"


def steady() -> float:
    """Seconds, sleep of the machine included, by a monotonic clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


_OFFSET = time.time() - steady()


def steady_epoch() -> float:
    """Epoch seconds as this process would count them had nobody set the wall clock since it began."""
    return _OFFSET + steady()
