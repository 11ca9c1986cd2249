"""Units for axes: seconds in the unit in which people would say them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """A unit of time: its name and its length in seconds."""

    name: str
    seconds: float


def time_unit(seconds: Iterable[float]) -> TimeUnit:
    """Seconds, minutes, hours or days: the largest that keeps the largest finite value above about two."""
    largest = max((s for s in seconds if s == s and s < float("inf")), default=0.0)
    for unit in (TimeUnit("days", 86400), TimeUnit("h", 3600), TimeUnit("min", 60)):
        if largest > 2.5 * unit.seconds:
            return unit
    return TimeUnit("s", 1)
