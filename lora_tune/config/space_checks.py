"""Whether trials can be made of a search space at all: names, layouts, node counts, conditions and formulas."""

from __future__ import annotations

from lora_tune.config.conditions import ConditionError, check_conditions, needed
from lora_tune.config.formula import Formula, FormulaError
from lora_tune.config.layout import LAYOUT_VALUES
from lora_tune.config.parameters import (
    CategoricalParameter,
    DerivedParameter,
    FixedParameter,
    IntParameter,
    LayoutParameter,
    Parameter,
    Value,
)
from lora_tune.config.space import Space, SpaceError


def check_space(space: Space) -> None:
    """Raise SpaceError when no trial could be made of this space."""
    for name, parameter in space.parameters.items():
        if not name.isidentifier() or not name.isascii():
            raise SpaceError(name, f"{name!r} is not a variable name; use letters, digits and _")
        if isinstance(parameter, LayoutParameter):
            table = space.layouts(name)
            if not table.layouts:
                raise SpaceError(name, f"no layout of {space.gpus} GPUs satisfies {table.why_empty()}")
            if clash := set(LAYOUT_VALUES) & set(space.parameters):
                raise SpaceError(min(clash), f"{min(clash)} is set by the layout {name}; remove it here")
    _check_nodes(space.parameters.get("NODES"))
    if sum(isinstance(p, LayoutParameter) for p in space.parameters.values()) > 1:
        raise SpaceError("", "two layout parameters; a trial has one layout, keep one")
    try:
        _check_conditions(space)
        space.lowest()
    except FormulaError as error:
        raise SpaceError(error.name, str(error)) from error


def _check_conditions(space: Space) -> None:
    """That each may hold, and that no formula needs what is absent where its own result is not."""
    layouts = ([p.values(x) for x in space.layouts(n).layouts]
               for n, p in space.parameters.items() if isinstance(p, LayoutParameter))  # fmt: skip
    try:
        check_conditions(space.parameters, next(layouts, []))
    except ConditionError as error:
        raise SpaceError(error.key, str(error)) from error
    conditions = space.conditions
    for name, parameter in space.parameters.items():
        if not isinstance(parameter, DerivedParameter):
            continue
        own = needed(name, conditions.of)
        for used in sorted(Formula(parameter.formula).names & conditions.of.keys()):
            wanted = needed(used, conditions.of)
            if any(p not in own or not set(own[p]) <= set(values) for p, values in wanted.items()):
                where = conditions.words(used)
                raise SpaceError(name, f"its formula needs {used}, which exists only where {where}; give it that when")


def _check_nodes(parameter: Parameter | None) -> None:
    """NODES is what the job asks the cluster for: whole numbers from 1, known before any formula."""
    offered: tuple[Value, ...]
    if parameter is None:
        return
    if isinstance(parameter, IntParameter):
        offered = (parameter.low,)
    elif isinstance(parameter, CategoricalParameter):
        offered = parameter.choices
    elif isinstance(parameter, FixedParameter):
        offered = (parameter.value,)
    else:
        raise SpaceError("NODES", f"the node count cannot be {parameter.type}; use int, categorical or a fixed value")
    if bad := [n for n in offered if isinstance(n, bool) or not isinstance(n, int) or n < 1]:
        raise SpaceError("NODES", f"{bad[0]!r} is not a node count; use whole numbers from 1")
