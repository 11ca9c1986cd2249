"""Processes, boots and clocks of this machine, told apart for certain."""

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
    """Signal a process, or the process group that it leads; one that has ended or is another user's is left alone.

    Nothing is sent to 1 or below: there stand init, our own group, and every process of this user.
    """
    if pid <= 1:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, number)


def ancestor_pids() -> set[int]:
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

    Containers on the network of their host have its name, and other hosts may have it, too; it counts only where the
    kernel names no boot.
    """
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - a link to no path
    except OSError:
        namespace = ""
    return f"{boot() or host()}/{namespace}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process, so that no other one with its number is mistaken for it, here or on another host.

    start_ticks: when it started, in clock ticks since boot; None where unknown. place: see :func:`place`; records of
    earlier releases name the boot alone, or nothing.
    """

    pid: int
    start_ticks: int | None
    host: str
    place: str = ""

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has the number ``pid`` here and now."""
        return cls(pid=pid, start_ticks=start_ticks(pid), host=host(), place=place())

    @property
    def elsewhere(self) -> bool:
        """Whether nothing of it can be seen from here: of another host, boot or PID namespace."""
        return self.place not in (place(), boot()) if self.place else self.host != host()

    @property
    def alive(self) -> bool:
        """Whether it runs, and can be seen from here."""
        return self._is_known and start_ticks(self.pid) == self.start_ticks

    @property
    def gone(self) -> bool:
        """Whether it was a process of this place and has ended."""
        return self._is_known and not self.alive

    @property
    def _is_known(self) -> bool:
        return not self.elsewhere and self.pid > 0 and self.start_ticks is not None


def steady() -> float:
    """Seconds, sleep of the machine included, by a monotonic clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


_OFFSET = time.time() - steady()


def steady_epoch() -> float:
    """Epoch seconds as this process would count them had nobody set the wall clock since it began."""
    return _OFFSET + steady()


# Whether an address is for this machine only.


def is_loopback(host: str) -> bool:
    """Whether a server bound to ``host`` can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# Slurm's short form of node lists: ``n[1-3,07],m2``.


def hostnames(text: str) -> Iterator[str]:
    """``n[1-3,07],m2`` -> n1, n2, n3, n07, m2. Several brackets multiply, as in Slurm.

    What is no range of numbers stays as it is; of more than ``MOST`` names the first ones are given.
    """
    parts = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", "" if text in NOTHING else text)
    names = (name for part in parts for name in _expand(re.split(r"\[([^\]]*)\]", part)))
    yield from itertools.islice(names, MOST)


MOST = 65_536
"""Slurm allows no more nodes in a cluster; damaged text may name billions."""


NOTHING = ("(null)", "None", "N/A", "Unknown", "NONE")
"""What Slurm prints for an empty field."""


_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")


def _expand(pieces: Sequence[str]) -> Iterator[str]:
    """``pieces`` alternate between literal text and the inside of a bracket."""
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


# Releases of installed packages, and commits of source trees.


def installed(name: str) -> str:
    """The release of the distribution ``name``; "" where this environment does not have it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def commit_of(folder: Path) -> str:
    """The commit of the git tree that a folder lies in, with "+changes" where files of it differ; "" where there is
    none, or no git."""
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


# The GPUs of this machine that a driver may hand out: by what CUDA and HIP are told, else by what the machine has.


VISIBLE = "CUDA_VISIBLE_DEVICES"
_HIP_VISIBLE = "HIP_VISIBLE_DEVICES"
_NO_DEVICES = ("", "-1", "NoDevFiles")
_SECONDS = 10.0
"""What a driver that hangs may cost: without an answer the machine counts as one whose GPUs nobody knows."""

_PROCESSES = re.compile(r"--?(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus|gpus[-_]per[-_]node|gpus|devices)")
"""Options by which launchers and Lightning are told how many GPUs a run has."""


def visible_in(environment: Mapping[str, str]) -> str | None:
    """What CUDA_VISIBLE_DEVICES says, or HIP's variable where that is not set; None where neither is."""
    return environment.get(VISIBLE, environment.get(_HIP_VISIBLE))


def gpus_of_machine(visible: str | None) -> tuple[str, ...]:
    """The ids of the GPUs that may be used: those that ``visible`` names, else all of the machine; () for none.

    visible: CUDA_VISIBLE_DEVICES, None where it is not set. The machine is asked by nvidia-smi, of a GPU that is
    divided (MIG) its parts, or by rocm-smi. () also where nobody knows.
    """
    if visible is not None:
        return device_ids(len(visible), visible)
    return _of_nvidia(_printed("nvidia-smi", "-L")) or _of_amd(_printed("rocm-smi", "--showid")) or _of_driver()


def device_ids(number: int, visible: str | None) -> tuple[str, ...]:
    """The first ``number`` GPUs, or fewer, that CUDA would use: by index, or as CUDA_VISIBLE_DEVICES names them.

    visible: that variable, None where it is not set. CUDA ignores what stands behind an id that is none.
    """
    if visible is None:
        return tuple(str(index) for index in range(number))
    ids = itertools.takewhile(lambda device: device not in _NO_DEVICES, map(str.strip, visible.split(",")))
    return tuple(dict.fromkeys(ids))[:number]


def restricted_to(devices: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a process sees these GPUs alone; HIP reads CUDA's, too, where its own is not set."""
    names = (VISIBLE, *((_HIP_VISIBLE,) if _HIP_VISIBLE in environment else ()))
    return dict.fromkeys(names, ",".join(devices))


def gpus_of_command(argv: Sequence[str]) -> int:
    """How many GPUs a command line says that it uses: those of its launcher's option, else 1."""
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
    """What a program prints; "" where it is not there, fails or hangs."""
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
    """By the folders that NVIDIA's driver keeps, where nvidia-smi is not installed, as in many containers."""
    folder = Path("/proc/driver/nvidia/gpus")
    return tuple(str(index) for index, _ in enumerate(folder.iterdir())) if folder.is_dir() else ()
