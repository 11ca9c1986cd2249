"""Control groups (cgroups(7)) of this process, their OOM kill counts, and the processes of a trial."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import time
from collections.abc import Iterator, Set
from pathlib import Path

from lora_tune.base.files import open_regular
from lora_tune.base.host import ancestor_pids, send_signal
from lora_tune.base.paths import AttemptPaths

_COUNTERS = {"": "memory.events", "memory": "memory.oom_control"}
"""Cgroup controller ("": version 2) -> file with the number of processes that the OOM killer ended."""
_OF_MACHINE = Path("/proc/vmstat")


def process_cgroup(controller: str = "") -> Path | None:
    """Folder of this process's cgroup: version 2 (""), or a controller of version 1; None if there is none."""
    try:
        mounts = _mounts()
        cgroup_lines = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    paths = [path for _, names, path in (line.split(":", 2) for line in cgroup_lines) if controller in names.split(",")]
    roots = [(mount, root) for mount, root, held in mounts if controller in held]
    if not paths or not roots:
        return None
    mount, root = roots[0]
    # In a container only the part below ``root`` may be mounted, while the path begins at the host's root.
    return Path(mount, paths[0].removeprefix(root.rstrip("/")).lstrip("/"))


def is_cgroup(folder: Path) -> bool:
    """Whether ``folder`` is a version 2 cgroup, not an ordinary folder."""
    with contextlib.suppress(OSError):
        device = folder.stat().st_dev
        return any("" in held and Path(mount).stat().st_dev == device for mount, _, held in _mounts())
    return False


def _mounts() -> list[tuple[str, str, list[str]]]:
    """All mounts, as of :func:`_mounted`. Raises OSError."""
    # Mount points may have any bytes in their names, which must not fail a job.
    text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    return [_mounted(line) for line in text.split("\n")]


def _mounted(line: str) -> tuple[str, str, list[str]]:
    """Mount point, root in the hierarchy, and controllers of a line of mountinfo; [""] for version 2."""
    place, _, mounted = line.partition(" - ")
    fields, (kind, *rest) = place.split(" "), mounted.split(" ")
    held = {"cgroup2": [""], "cgroup": rest[-1].split(",") if rest else []}.get(kind, [])
    return (fields[4], fields[3], held) if held else ("", "", [])


def oom_kills() -> int:
    """Number of processes that the kernel's OOM killer has ended so far in this process's cgroup.

    The cause may be a limit of the group or of a parent, or exhausted machine memory. If the kernel does not count per
    group, the count of the whole machine is returned; 0 if there is none.
    """
    for controller, name in _COUNTERS.items():
        group = process_cgroup(controller)
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


# Every process that a trial starts, including those in other sessions, is found and ended.
#
# Three means, since a process can leave its group and its session, and its parent can be killed:
#
# - A cgroup (version 2) per trial, where this user may make one: no process leaves it.
# - ``PR_SET_CHILD_SUBREAPER``: orphans become children of the job's first process, which ends them.
# - The variable :data:`MARK` in their environment, by which the launcher finds what a killed first process left.


MARK = "LORA_TUNE_JOB_FOLDER"
"""Environment variable of every process of a job; its value is the attempt's folder."""

GRACE_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL for left-over processes: enough to close files, too few to go on computing."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


def adopt_orphans() -> None:
    """From now on, orphaned descendants become children of this process instead of init."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Make the kernel send SIGKILL to this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# ---- cgroup


def make_cgroup(attempt: AttemptPaths) -> Path | None:
    """Make a cgroup for the attempt below this process's one and record its path; None if not permitted.

    None is made inside a Slurm job: Slurm tracks the job's processes by their cgroup, and ignores others.
    """
    job_cgroup = process_cgroup() if "SLURM_JOB_ID" not in os.environ else None
    if job_cgroup is None:
        return None
    group = job_cgroup / _cgroup_name(attempt)
    try:
        attempt.cgroup.write_text(str(group), encoding="utf-8")
        group.mkdir(exist_ok=True)
    except OSError:
        return None
    return group


def _cgroup_name(attempt: AttemptPaths) -> str:
    return f"lora-tune-{hashlib.sha256(str(attempt.folder).encode()).hexdigest()[:16]}"


def enter(cgroup: Path) -> None:
    """Move this process into ``cgroup``; if not permitted it stays, and is tracked as an orphan."""
    with contextlib.suppress(OSError):
        (cgroup / "cgroup.procs").write_text("0")


def _members(cgroup: Path) -> set[int]:
    """Processes in the cgroup, except those of other PID namespaces (shown as 0)."""
    with contextlib.suppress(OSError):
        return {int(pid) for pid in (cgroup / "cgroup.procs").read_text().split()} - {0}
    return set()


def _noted_cgroup(attempt: AttemptPaths) -> Path | None:
    """The attempt's cgroup, if it exists. The trial can write any path, so only one made here is accepted."""
    with contextlib.suppress(OSError, ValueError):
        with os.fdopen(open_regular(attempt.cgroup, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as file:
            cgroup = Path(file.read(os.pathconf("/", "PC_PATH_MAX")))
        if cgroup.name == _cgroup_name(attempt) and is_cgroup(cgroup):
            return cgroup
    return None


# ---- inside the job


def wait_for(child: int) -> int:
    """Wait for the process ``child``, reap orphans that end before it, and return its exit code."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def children() -> set[int]:
    """Living children of this process, started or adopted; no grandchildren."""
    return {pid for pid, (state, parent) in _processes() if parent == os.getpid() and state not in "ZX"}


def descendants(root: int) -> dict[int, tuple[str, float]]:
    """State and processor seconds of ``root`` and all its descendants, without zombies."""
    living = {pid: fields for pid, fields in _stats() if fields[0] not in b"ZX"}
    started: dict[int, list[int]] = {}
    for pid, fields in living.items():
        started.setdefault(int(fields[1]), []).append(pid)
    pending_children, waiting = dict[int, tuple[str, float]](), [root]
    while waiting:
        pid = waiting.pop()
        if pid in living and pid not in pending_children:
            fields = living[pid]
            pending_children[pid] = fields[0].decode(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            waiting += started.get(pid, ())
    return pending_children


def end_children(cgroup: Path | None, besides: Set[int]) -> None:
    """End every descendant of this process and member of ``cgroup``, SIGTERM first, and wait until all are gone.

    The process must adopt orphans. The cgroup is removed. besides: children that are not the job's; they and their
    descendants are kept.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    signalled: set[int] = set()
    while living := _descendants(os.getpid(), besides) | (_members(cgroup) if cgroup else set()):
        late = time.monotonic() >= deadline
        # Signal also processes started since the last pass; a fork missed now is found in the next pass.
        _signal(living if late else living - signalled, signal.SIGKILL if late else signal.SIGTERM)
        signalled |= living
        _reap()
        time.sleep(0.02)
    _reap()
    if cgroup is not None:
        _remove(cgroup)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants(root: int, besides: Set[int]) -> set[int]:
    """Living descendants of ``root``, without ``besides`` and their descendants."""
    started: dict[int, list[int]] = {}
    for pid, (state, parent) in _processes():
        if state not in "ZX" and pid not in besides:
            started.setdefault(parent, []).append(pid)
    descendants, waiting = set[int](), [root]
    while waiting:
        new = started.pop(waiting.pop(), [])
        descendants.update(new)
        waiting += new
    return descendants


def _processes() -> Iterator[tuple[int, tuple[str, int]]]:
    """Process id, state and parent of each process of this machine."""
    for pid, fields in _stats():
        yield pid, (fields[0].decode(), int(fields[1]))


def _stats() -> Iterator[tuple[int, list[bytes]]]:
    """Process id of each process of this machine, with its fields of proc(5) stat from the state on."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - thousands of entries, of which only names are needed
        if name.isdigit():
            with contextlib.suppress(OSError):
                stat = Path("/proc", name, "stat").read_bytes()
                yield int(name), stat[stat.rindex(b")") + 2 :].split()


# ---- from outside


def kill_strays(attempt: AttemptPaths, number: int = signal.SIGKILL) -> bool:
    """Send ``number`` to all marked or cgroup processes of a job on this host; return whether there were any.

    For jobs whose first process is gone, ignores signals, or has lost its records.
    """
    cgroup = _noted_cgroup(attempt)
    living = _marked(attempt.folder) | (_members(cgroup) if cgroup else set())
    _signal(living, number)
    if cgroup is not None and not living:
        _remove(cgroup)
    return bool(living)


def _marked(folder: Path) -> set[int]:
    """Living processes with the mark of the job in ``folder``; only this user's environments are readable."""
    marker = os.fsencode(f"{MARK}={folder}")
    return {pid for pid, (state, _) in _processes() if state not in "ZX" and _carries(pid, marker)}


def _carries(pid: int, variable: bytes) -> bool:
    with contextlib.suppress(OSError):
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _signal(pids: set[int], number: int) -> None:
    for pid in pids - ancestor_pids():
        send_signal(pid, number)


def _remove(cgroup: Path) -> None:
    with contextlib.suppress(OSError):  # a process in it cannot be killed yet, or it is already removed
        cgroup.rmdir()
