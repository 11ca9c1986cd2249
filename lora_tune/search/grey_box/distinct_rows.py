"""Features of many configurations: thousands of trials share some dozens of layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lora_tune.search.grey_box.features import Coordinates


def alike_once(
    coordinates: Coordinates, features: Callable[[Mapping[str, Any]], list[float]], points: Sequence[Mapping[str, Any]]
) -> list[list[float]]:
    """``features`` of each point, worked out once for all that are alike in what decides speed.

    features: of what decides speed only. Under conditions other values count too, so that each is worked out there.
    """
    if coordinates.conditions.of:
        return [features(values) for values in points]
    known: dict[tuple[Any, ...], list[float]] = {}
    names, rows = coordinates.speed_names, []
    for values in points:
        key = tuple([values[name] for name in names])
        if key not in known:
            known[key] = features(values)
        rows.append(known[key])
    return rows
