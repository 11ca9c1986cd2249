"""The time limit of a run in a machine's own config, in Slurm's formats."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

LIMITS = ("WALLTIME_RUNANDTIME", "WALLTIME")
"""Variables of the limit: of one run, else of the whole job. ``run_with_docker.sh`` trees have no other."""

_FORM = re.compile(r"(?:([0-9]{1,6})-)?([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?")


def minutes_of(text: str) -> float | None:
    """Minutes of a time limit in a format of sbatch's --time; None for any other text.

    Zero and ``UNLIMITED`` mean no limit: infinity.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    if (match := _FORM.fullmatch(text)) is None:
        return None
    days, first, second, third = match.groups()
    if days is not None:
        seconds = 86400 * int(days) + 3600 * int(first) + 60 * int(second or 0) + int(third or 0)
    elif third is not None:
        seconds = 3600 * int(first) + 60 * int(second) + int(third)
    else:
        seconds = 60 * int(first) + int(second or 0)
    return seconds / 60 or math.inf


def base_walltime(values: Mapping[str, str]) -> tuple[str, float]:
    """The variable that limits a run, and its minutes; ("", 0.0) if there is none in a format that Slurm reads."""
    known = ((name, minutes_of(values.get(name, ""))) for name in LIMITS)
    return next(((name, minutes) for name, minutes in known if minutes is not None), ("", 0.0))
