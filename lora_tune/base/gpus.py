"""The GPUs of this machine that a driver may hand out: by what CUDA and HIP are told, else by what the machine has."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    for word, after in itertools.pairwise((*argv, "")):
        name, equals, value = word.partition("=")
        if _PROCESSES.fullmatch(name):
            told = value if equals else after
            if re.fullmatch(r"[1-9]\d{0,3}", told):
                return int(told)
            if re.fullmatch(r"\d+(?:,\d+)+", told):
                return len(told.split(","))
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
