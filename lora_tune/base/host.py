"""This machine: processes, boots, clocks, addresses, Slurm node lists, packages and GPUs."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import itertools
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def send_signal(pid: int, number: int, *, group: bool = False) -> None:
    """Signal a process, or the process group that it leads; ignores ended processes and those of other users.

    Ignores pids of 1 and below: init, our own group, and all processes of this user.
    """
    if pid <= 1:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, number)


def ancestor_pids() -> set[int]:
    """Pids of this process, its ancestors, and the leaders of their process groups."""
    line, pid = set[int](), os.getpid()
    while pid > 0 and pid not in line:
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:  # the process has just ended
            break
        _, parent, leader = stat[stat.rindex(b")") + 2 :].split()[:3]
        line |= {pid, int(leader)}
        pid = int(parent)
    return line


def start_ticks(pid: int) -> int | None:
    """Start of process ``pid`` in clock ticks since boot (proc(5), field 22); None if missing or a zombie."""
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
    """The id of this boot; "" if the kernel provides none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


@functools.cache
def place() -> str:
    """Scope in which pids are unique: this boot and PID namespace, as one word.

    The host name is used only if the kernel provides no boot id: containers on their host's network share it, and other
    hosts may have the same.
    """
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - the link is no path
    except OSError:
        namespace = ""
    return f"{boot() or host()}/{namespace}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process, identified so that neither a reused pid nor another host's process is mistaken for it.

    start_ticks: start in clock ticks since boot; None if unknown. place: see :func:`place`; records of earlier releases
    have only the boot, or nothing.
    """

    pid: int
    start_ticks: int | None
    host: str
    place: str = ""

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has ``pid`` here now."""
        return cls(pid=pid, start_ticks=start_ticks(pid), host=host(), place=place())

    @property
    def elsewhere(self) -> bool:
        """Whether it is invisible here: of another host, boot or PID namespace."""
        return self.place not in (place(), boot()) if self.place else self.host != host()

    @property
    def alive(self) -> bool:
        """Whether it is running and visible here."""
        return self._is_known and start_ticks(self.pid) == self.start_ticks

    @property
    def gone(self) -> bool:
        """Whether it was a process of this place and has ended."""
        return self._is_known and not self.alive

    @property
    def _is_known(self) -> bool:
        return not self.elsewhere and self.pid > 0 and self.start_ticks is not None


def steady() -> float:
    """Seconds of a monotonic clock that includes suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


_OFFSET = time.time() - steady()


def steady_epoch() -> float:
    """Epoch seconds, unaffected by changes of the wall clock since this process started."""
    return _OFFSET + steady()


# Loopback addresses.


def is_loopback(host: str) -> bool:
    """Whether a server bound to ``host`` is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# Slurm node lists: ``n[1-3,07],m2``.


def hostnames(text: str) -> Iterator[str]:
    """``n[1-3,07],m2`` -> n1, n2, n3, n07, m2. Several brackets multiply, as in Slurm.

    Other bracket contents are kept as text; at most ``MOST`` names.
    """
    parts = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", "" if text in NOTHING else text)
    names = (name for part in parts for name in _expand(re.split(r"\[([^\]]*)\]", part)))
    yield from itertools.islice(names, MOST)


MOST = 65_536
"""Maximum nodes of a Slurm cluster; damaged text may name billions."""


NOTHING = ("(null)", "None", "N/A", "Unknown", "NONE")
"""Slurm's texts for an empty field."""


_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")


def _expand(pieces: Sequence[str]) -> Iterator[str]:
    """``pieces`` alternate between literal text and bracket contents."""
    if len(pieces) == 1:
        yield pieces[0]
        return
    head, inside, *rest = pieces
    for choice in inside.split(","):
        bounds = _RANGE.fullmatch(choice)
        numbers: Iterable[str] = [choice]
        if bounds:
            numbers = (f"{i:0{len(bounds[1])}}" for i in range(int(bounds[1]), int(bounds[2]) + 1))
        for number in numbers:
            for tail in _expand(rest):
                yield head + number + tail


# Versions of installed packages, and commits of source trees.


def installed(name: str) -> str:
    """The version of the distribution ``name``; "" if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def commit_of(folder: Path) -> str:
    """The commit of the git tree around a folder, with "+changes" if it is modified; "" without one, or without git."""
    answers = []
    for question in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no")):
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *question], capture_output=True, text=True, timeout=5, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        answers.append(done.stdout.strip())
    return answers[0] + ("+changes" if answers[1] else "")


# GPUs that a driver may assign: those visible to CUDA or HIP, else all of the machine.


VISIBLE = "CUDA_VISIBLE_DEVICES"
_HIP_VISIBLE = "HIP_VISIBLE_DEVICES"
_NO_DEVICES = ("", "-1", "NoDevFiles")
_SECONDS = 10.0
"""Limit for a hanging GPU driver; without an answer, the GPUs are unknown."""

_PROCESSES = re.compile(r"--?(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus|gpus[-_]per[-_]node|gpus|devices)")
"""Options of launchers and Lightning for the number of GPUs of a run."""


def visible_in(environment: Mapping[str, str]) -> str | None:
    """CUDA_VISIBLE_DEVICES, else HIP_VISIBLE_DEVICES, else None."""
    return environment.get(VISIBLE, environment.get(_HIP_VISIBLE))


def gpus_of_machine(visible: str | None) -> tuple[str, ...]:
    """Ids of the usable GPUs: those in ``visible``, else all of the machine; () if there are none, or if unknown.

    visible: CUDA_VISIBLE_DEVICES, None if unset. All GPUs are listed by nvidia-smi (MIG instances of a divided GPU),
    rocm-smi, or NVIDIA's driver folder.
    """
    if visible is not None:
        return device_ids(len(visible), visible)
    return _of_nvidia(_printed("nvidia-smi", "-L")) or _of_amd(_printed("rocm-smi", "--showid")) or _of_driver()


def device_ids(number: int, visible: str | None) -> tuple[str, ...]:
    """The first ``number`` GPUs, or fewer, that CUDA would use: by index, or as named in CUDA_VISIBLE_DEVICES.

    visible: that variable, None if unset. CUDA ignores ids after an invalid one.
    """
    if visible is None:
        return tuple(str(index) for index in range(number))
    ids = itertools.takewhile(lambda device: device not in _NO_DEVICES, map(str.strip, visible.split(",")))
    return tuple(dict.fromkeys(ids))[:number]


def restricted_to(devices: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that restrict a process to these GPUs; HIP also reads CUDA's variable unless its own is set."""
    names = (VISIBLE, *((_HIP_VISIBLE,) if _HIP_VISIBLE in environment else ()))
    return dict.fromkeys(names, ",".join(devices))


def gpus_of_command(argv: Sequence[str]) -> int:
    """GPUs of a command line by its launcher's option, else 1."""
    for token, after in itertools.pairwise((*argv, "")):
        name, equals, value = token.partition("=")
        if _PROCESSES.fullmatch(name):
            option_value = value if equals else after
            if re.fullmatch(r"[1-9]\d{0,3}", option_value):
                return int(option_value)
            if re.fullmatch(r"\d+(?:,\d+)+", option_value):
                return len(option_value.split(","))
    return 1


def _printed(*argv: str) -> str:
    """Output of a program; "" if it is missing, fails or hangs."""
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_SECONDS, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def _of_nvidia(text: str) -> tuple[str, ...]:
    devices: list[list[str]] = []
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            devices.append([match[1]])
        elif devices and (match := re.match(r"\s+MIG .*\(UUID: (MIG-[^)\s]+)\)", line)):
            devices[-1] = [*(d for d in devices[-1] if d.startswith("MIG-")), match[1]]
    return tuple(device for parts in devices for device in parts)


def _of_amd(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.findall(r"^GPU\[(\d+)\]", text, re.MULTILINE)))


def _of_driver() -> tuple[str, ...]:
    """GPUs by the folders of NVIDIA's driver, for containers without nvidia-smi."""
    folder = Path("/proc/driver/nvidia/gpus")
    return tuple(str(index) for index, _ in enumerate(folder.iterdir())) if folder.is_dir() else ()
