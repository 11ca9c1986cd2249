"""Parameters that exist only under a choice of another: ``when = { OPTIMIZER = ["adam", "lamb"] }``.

The trial is not given a parameter that does not exist for it, and its record does not hold one. Optuna's space is flat:
there an absent parameter is drawn like the others, and whatever was drawn means the same. So models look at it in one
place, its middle, and two configurations that differ only in what is absent are one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_tune.config.layout import parse_layout
from lora_tune.config.parameters import (
    CategoricalParameter,
    Conditional,
    FixedParameter,
    FloatParameter,
    IntParameter,
    LayoutParameter,
    Parameter,
    Value,
    choices_of,
    middle_of,
)

_TUNED = FloatParameter | IntParameter | CategoricalParameter

Allowed = Mapping[str, tuple[Value, ...]]
"""The values of each parent under which a parameter exists: all of them must hold."""


class ConditionError(ValueError):
    """A condition that cannot be used; ``key`` is the parameter to blame."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Which parameters exist only under others' values.

    of: what each needs, parents before their children. rest: where an absent one is looked at, of those that are
    tuned. known: values that every trial has alike. layout: the space's layout parameter and its name, if any.
    """

    of: Mapping[str, Allowed] = field(default_factory=dict)
    rest: Mapping[str, Value] = field(default_factory=dict)
    known: Mapping[str, Value] = field(default_factory=dict)
    layout: tuple[str, LayoutParameter] | None = None

    def absent(self, values: Mapping[str, Any]) -> frozenset[str]:
        """The parameters that do not exist at ``values``, tuned or resolved ones.

        What ``values`` leave open may be anything, so that nothing is absent for it.
        """
        if not self.of:
            return frozenset()
        seen = {**self.known, **values, **self._degrees(values)}
        absent: set[str] = set()
        for name, allowed in self.of.items():
            if any(p in absent or (p in seen and not is_one_of(seen[p], a)) for p, a in allowed.items()):
                absent.add(name)
        return frozenset(absent)

    def present(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """``values`` without what does not exist at them."""
        gone = self.absent(values)
        return {name: value for name, value in values.items() if name not in gone}

    def rested(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """``values`` with what does not exist at them in its middle: equal for configurations that are one."""
        gone = self.absent(values)
        return {**values, **{n: v for n, v in self.rest.items() if n in gone}} if gone else values

    def complete(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """A point of the flat space: as :meth:`rested`, and whatever else is conditional and not said in its middle.

        Nothing stays nothing: a configuration that is no point of the space has no values.
        """
        return {**self.rest, **self.rested(values)} if values and self.of else dict(values)

    def agrees(self, values: Mapping[str, Any], point: Mapping[str, Value]) -> bool:
        """Whether a configuration has all values of a point, but for those that do not exist at it."""
        gone = self.absent(values)
        return all(values.get(name) == value if name in values else name in gone for name, value in point.items())

    def words(self, name: str) -> str:
        """Under which values a parameter exists, for people: "OPTIMIZER = 'adam' or 'lamb' and TP = 2"."""
        return " and ".join(f"{p} = {' or '.join(map(repr, allowed))}" for p, allowed in self.of[name].items())

    def _degrees(self, values: Mapping[str, Any]) -> Mapping[str, Value]:
        if self.layout is None or self.layout[0] not in values:
            return {}
        return self.layout[1].values(parse_layout(str(values[self.layout[0]])))


def conditions_of(parameters: Mapping[str, Parameter]) -> Conditions:
    """The conditions of a space. Those that need each other are left for :func:`check_conditions` to find."""
    of = {n: p.when for n, p in parameters.items() if isinstance(p, Conditional) and p.when}
    if not of:
        return Conditions()
    layouts = ((n, p) for n, p in parameters.items() if isinstance(p, LayoutParameter))
    return Conditions(
        of={name: of[name] for name in _parents_first(of)},
        rest={n: middle_of(p) for n in of if isinstance(p := parameters[n], _TUNED)},
        known={n: p.value for n, p in parameters.items() if isinstance(p, FixedParameter) and n not in of},
        layout=next(layouts, None),
    )


def _parents_first(of: Mapping[str, Allowed]) -> list[str]:
    """Names in an order in which each parent stands before its children; those of a circle last."""
    order: list[str] = []
    waiting = list(of)
    while ready := [n for n in waiting if not any(p in waiting for p in of[n])]:
        order += ready
        waiting = [n for n in waiting if n not in ready]
    return [*order, *waiting]


def is_one_of(value: object, allowed: Iterable[object]) -> bool:
    """Whether ``value`` is among ``allowed``; true is not 1."""
    if isinstance(allowed, range):  # which may be long
        return type(value) is int and value in allowed
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)


def check_conditions(parameters: Mapping[str, Parameter], layouts: Iterable[Mapping[str, Value]]) -> None:
    """Raise ConditionError for conditions that name no parent, cannot hold, or need each other.

    layouts: the variables of every layout that the space offers.
    """
    conditions = conditions_of(parameters)
    offered: dict[str, list[Value]] = {}
    for variables in layouts:
        for name, value in variables.items():
            offered.setdefault(name, []).append(value)
    for name, allowed in conditions.of.items():
        if name == "NODES":
            raise ConditionError(name, "every trial has a node count; remove when")
        for parent, values in allowed.items():
            _check_parent(name, parent, values, parameters, offered)
    for name in conditions.of:
        _check_chain(name, conditions.of)


def _check_parent(
    name: str, parent: str, values: tuple[Value, ...], parameters: Mapping[str, Parameter],
    offered: Mapping[str, list[Value]],
) -> None:  # fmt: skip
    parameter = parameters.get(parent)
    if parent in offered:
        possible: Iterable[Value] = dict.fromkeys(offered[parent])
    elif isinstance(parameter, CategoricalParameter | IntParameter | FixedParameter):
        possible = choices_of(parameter)
    else:
        what = f"is {parameter.type}" if parameter is not None else "is not a parameter of this space"
        raise ConditionError(
            name, f"when names {parent}, which {what}; it may name categorical, int and fixed ones and layouts' degrees"
        )
    if bad := [v for v in values if not is_one_of(v, possible)]:
        some = list(itertools.islice(possible, 9))
        shown = ", ".join(map(repr, some[:8])) + (", ..." if len(some) > 8 else "")
        raise ConditionError(name, f"when needs {parent} = {bad[0]!r}, which never occurs: it is one of {shown}")


def _check_chain(name: str, of: Mapping[str, Allowed]) -> None:
    """A parameter and all above it: no circle, and values of each parent that satisfy them all."""
    every: dict[str, tuple[Value, ...]] = {}
    path, todo = {name}, [name]
    while todo:
        for parent, values in of[todo.pop()].items():
            both = [v for v in every.get(parent, values) if is_one_of(v, values)]
            if not both:
                raise ConditionError(name, f"never exists: it and what it needs want different values of {parent}")
            every[parent] = tuple(both)
            if parent == name:
                raise ConditionError(name, f"the conditions of {', '.join(sorted(path))} need each other")
            if parent in of and parent not in path:
                path.add(parent)
                todo.append(parent)


def needed(name: str, of: Mapping[str, Allowed]) -> dict[str, tuple[Value, ...]]:
    """All that must hold for a parameter to exist, its parents' conditions included. The conditions were checked."""
    allowed: dict[str, tuple[Value, ...]] = {}
    for parent, values in of.get(name, {}).items():
        for other, more in (*needed(parent, of).items(), (parent, values)):
            allowed[other] = tuple(v for v in allowed.get(other, more) if is_one_of(v, more))
    return allowed
