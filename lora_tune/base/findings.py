"""What a look at a machine, a file or a cluster says: what was found, why it matters, how to fix it."""

from __future__ import annotations

import enum
import shutil
from dataclasses import dataclass
from pathlib import Path


class Level(enum.IntEnum):
    """How bad it is."""

    GOOD = 0
    WARNING = 1
    """Trials run, perhaps slower or less safely."""
    PROBLEM = 2
    """Trials will fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    what: what was found. why: why it matters. fix: the command or the change that fixes it. Both empty when good.
    """

    level: Level
    what: str
    why: str = ""
    fix: str = ""


def good(what: str) -> Finding:
    return Finding(Level.GOOD, what)


def warning(what: str, why: str, fix: str) -> Finding:
    return Finding(Level.WARNING, what, why, fix)


def problem(what: str, why: str, fix: str) -> Finding:
    return Finding(Level.PROBLEM, what, why, fix)


def free_space(folder: Path, wanted_gb: float, why: str) -> Finding:
    """Free space where ``folder`` is, or will be."""
    place = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(place).free / 1e9
    if free < wanted_gb:
        return problem(f"{free:.0f} GB free at {place}", why, f"free {wanted_gb - free:.0f} GB, or use another disk")
    return good(f"{free:.0f} GB free at {place}")
