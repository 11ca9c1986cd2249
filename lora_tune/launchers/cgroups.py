"""The control groups (cgroups(7)) of this process, and how many processes in them the kernel has killed for memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_COUNTERS = {"": "memory.events", "memory": "memory.oom_control"}
"""By controller, "" being version 2: the file that says how many processes of the group the OOM killer has ended."""
_OF_MACHINE = Path("/proc/vmstat")


def own_cgroup(controller: str = "") -> Path | None:
    """The folder of this process's cgroup: of version 2, or of a controller of version 1; None where there is none."""
    try:
        mounts = _mounts()
        ours = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    paths = [path for _, names, path in (line.split(":", 2) for line in ours) if controller in names.split(",")]
    roots = [(mount, root) for mount, root, held in mounts if controller in held]
    if not paths or not roots:
        return None
    mount, root = roots[0]
    # In a container only the part below ``root`` may be mounted, while the path begins at the machine's own root.
    return Path(mount, paths[0].removeprefix(root.rstrip("/")).lstrip("/"))


def is_cgroup(folder: Path) -> bool:
    """Whether ``folder`` is a cgroup of version 2, and no other folder that looks like one."""
    with contextlib.suppress(OSError):
        device = folder.stat().st_dev
        return any("" in held and Path(mount).stat().st_dev == device for mount, _, held in _mounts())
    return False


def _mounts() -> list[tuple[str, str, list[str]]]:
    """What is mounted, as :func:`_mounted` says of each. Raises OSError."""
    # Where things are mounted may have any bytes in its name, and a job must not fail for that.
    text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    return [_mounted(line) for line in text.split("\n")]


def _mounted(line: str) -> tuple[str, str, list[str]]:
    """Mount point, root within the hierarchy, and controllers of a line of mountinfo; [""] for version 2."""
    place, _, mounted = line.partition(" - ")
    fields, (kind, *rest) = place.split(" "), mounted.split(" ")
    held = {"cgroup2": [""], "cgroup": rest[-1].split(",") if rest else []}.get(kind, [])
    return (fields[4], fields[3], held) if held else ("", "", [])


def oom_kills() -> int:
    """How many processes the kernel's OOM killer has ended so far in this process's cgroup.

    A limit of the group or of one above it may have been reached, or all of the machine's memory. On a machine that
    counts by no group it is those of the whole machine; 0 where nothing counts them.
    """
    for controller, name in _COUNTERS.items():
        group = own_cgroup(controller)
        counted = next(_counts(group / name), None) if group is not None else None
        if counted is not None:
            return counted
    return next(_counts(_OF_MACHINE), 0)


def _counts(file: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in file.read_text(encoding="utf-8").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                yield int(count)
