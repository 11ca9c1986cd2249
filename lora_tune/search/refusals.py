"""Which points a trial's own libraries will refuse: the rule behind a refusal, from what they took and did not take.

A rule is one or two values that do not go (together). Of one refused point every such rule is possible that no
accepted point breaks; each is as likely as the others, so the chance that another point is refused is the share of
them that it breaks. A version space (Mitchell 1982, "Generalization as search") with a vote.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from lora_tune.config.layout import Layout, parse_layout
from lora_tune.search.grey_box.gaussian import Array

Values = Mapping[str, Any]
Literal = tuple[str, Any]
Rule = frozenset[Literal]


def refused_chance(points: Sequence[Values], refused: Sequence[Values], accepted: Sequence[Values]) -> Array:
    """Chance (n) that each of ``points`` is refused, given points that were refused and points that were not."""
    taken = [_literals(values) for values in accepted]
    chance = np.zeros(len(points))
    if not refused:
        return chance
    asked = [_literals(values) for values in points]
    for values in refused:
        own = _literals(values)
        rules = [rule for rule in _rules(own) if not any(rule <= known for known in taken)]
        for at, point in enumerate(asked):
            broken = sum(rule <= point for rule in rules) / len(rules) if rules else 0.0
            chance[at] = 1 - (1 - chance[at]) * (1 - (1.0 if point == own else broken))
    return chance


def _rules(literals: frozenset[Literal]) -> Iterable[Rule]:
    ordered = sorted(literals, key=str)
    return map(frozenset, itertools.chain(((one,) for one in ordered), itertools.combinations(ordered, 2)))


def _literals(values: Values) -> frozenset[Literal]:
    """A point's values, a layout's degrees each by itself, and of whole numbers whether they are 0."""
    literals: set[Literal] = set()
    for name, value in values.items():
        layout = _layout(value)
        if layout is not None:
            literals |= {(field.name, getattr(layout, field.name)) for field in fields(layout)}
            continue
        literals.add((name, value))
        if isinstance(value, int) and not isinstance(value, bool) and value not in (0, 1):
            literals.add((f"{name} > 0", value > 0))
    return frozenset(literals)


def _layout(value: Any) -> Layout | None:
    try:
        return parse_layout(value) if isinstance(value, str) else None
    except (ValueError, TypeError):
        return None
