"""A machine that is short of memory: a cgroup with a limit, in which the kernel kills as it does everywhere."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_tune.launchers.processes import process_cgroup

LIMIT_BYTES = 300 << 20
GREEDY = "held = []\nwhile True: held.append(b'1' * (8 << 20))"
"""A program that takes memory until there is none."""
_LIMITS = {"memory": "memory.limit_in_bytes", "": "memory.max"}


@contextlib.contextmanager
def little_memory(limit: int = LIMIT_BYTES) -> Iterator[Path]:
    """A cgroup of ``limit`` bytes; the test is skipped where this user may not make one.

    Who is still in it at the end goes back to where this process is.
    """
    for controller, name in _LIMITS.items():
        own = process_cgroup(controller)
        if own is None:
            continue
        group = own / f"little-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(limit))
            yield group
            return
        except OSError as error:
            if not isinstance(error, (PermissionError, FileNotFoundError)):
                raise
        finally:
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    enter(own, int(pid))
            group.rmdir()
    pytest.skip("this user may make no cgroup with a limit of memory")


def enter(group: Path, pid: int = 0) -> None:
    """Move a process, this one for 0, into the cgroup; what it starts from then on is in it, too."""
    (group / "cgroup.procs").write_text(str(pid or os.getpid()))
