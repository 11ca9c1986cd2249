"""Processes of this machine, told apart for certain."""

from __future__ import annotations

from pathlib import Path


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
