"""What the doctor looks at: small functions that each return findings and change nothing."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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
