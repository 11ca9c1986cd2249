"""The search space: tuned parameters, derived values, and valid layouts.

A study's ``[space]`` table maps each variable of the trial to a parameter of type ``float``, ``int``, ``categorical``,
``layout``, ``derived`` or ``fixed`` (a bare value is fixed). Optuna sees a flat set of distributions; the trial gets
the resolved values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_tune.config.layout import LAYOUT_VALUES, LayoutTable, parse_layout
from lora_tune.config.parameters import (
    SWITCHES,
    CategoricalParameter,
    ConditionError,
    Conditions,
    DerivedParameter,
    FixedParameter,
    FloatParameter,
    Formula,
    FormulaError,
    IntParameter,
    LayoutParameter,
    Parameter,
    Role,
    TunedParameter,
    Value,
    check_conditions,
    conditions_of,
    needed,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


class SpaceError(ValueError):
    """The space as a whole is invalid; ``key`` is the parameter at fault."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


@dataclass(frozen=True, slots=True)
class Space:
    """All parameters of a study, in file order, for trials of ``nodes`` x ``gpus_per_node`` GPUs."""

    parameters: Mapping[str, Parameter]
    nodes: int
    gpus_per_node: int

    @property
    def conditions(self) -> Conditions:
        """Conditions under which parameters exist."""
        return conditions_of(self.parameters)

    @property
    def fixed(self) -> dict[str, Value]:
        """Values that all trials share, by name."""
        fixed = ((n, p) for n, p in self.parameters.items() if isinstance(p, FixedParameter))
        return {name: p.value for name, p in fixed if not p.when}

    @property
    def gpus(self) -> int:
        """GPUs of one trial; a CPU trial counts as one."""
        return max(1, self.nodes * self.gpus_per_node)

    def layouts(self, name: str) -> LayoutTable:
        """The valid layouts of a layout parameter, with counts of excluded ones by rule."""
        parameter = self.parameters[name]
        assert isinstance(parameter, LayoutParameter)
        return parameter.enumerate(self.gpus, self.gpus_per_node)

    def node_count(self, values: Mapping[str, Value]) -> int:
        """Nodes of a trial with these resolved values: its NODES, else the site's."""
        return int(values.get("NODES", self.nodes))

    def gpu_count(self, values: Mapping[str, Value]) -> int:
        """GPUs of a trial with these resolved values; a CPU node counts as one."""
        return max(1, self.node_count(values) * max(1, self.gpus_per_node)) if "NODES" in values else self.gpus

    @property
    def most_nodes(self) -> int:
        """The nodes of the largest trial."""
        counts = [self.nodes]
        parameter = self.parameters.get("NODES")
        if isinstance(parameter, IntParameter):
            counts = [parameter.high]
        elif isinstance(parameter, CategoricalParameter):
            counts = [int(choice) for choice in parameter.choices]
        elif isinstance(parameter, FixedParameter):
            counts = [int(parameter.value)]
        for other in self.parameters.values():
            if isinstance(other, LayoutParameter) and other.nodes:
                counts = [*other.nodes]
        return max(counts)

    @property
    def varies_nodes(self) -> bool:
        """Whether the number of nodes varies between trials."""
        layouts = (p for p in self.parameters.values() if isinstance(p, LayoutParameter))
        return "NODES" in self.parameters or any(p.nodes for p in layouts)

    def batch_sizes(self) -> set[int]:
        """Every global batch size that the layouts can produce; empty without a layout."""
        layouts = ((p, x) for n, p in self.parameters.items() if isinstance(p, LayoutParameter)
                 for x in self.layouts(n).layouts)  # fmt: skip
        return {x.gbs(self.gpu_count(p.values(x))) for p, x in layouts}

    def each_layout(self) -> list[dict[str, Value]]:
        """Resolved values for every layout (one entry without any), other parameters at their lower ends.

        Includes conditional parameters.
        """
        name = next((n for n, p in self.parameters.items() if isinstance(p, LayoutParameter)), None)
        if name is None:
            return [self.lowest()]
        corner = self.corner()
        return [self._resolve({**corner, name: str(x)}, frozenset()) for x in self.layouts(name).layouts]

    def lowest(self) -> dict[str, Value]:
        """Resolved values with every parameter at its lower end, including conditional ones."""
        return self._resolve(self.corner(), frozenset())

    def each_end(self, ends: Mapping[str, Sequence[Value]]) -> list[dict[str, Value]]:
        """Resolved values with each tuned variable at each of its ``ends`` in turn, the others at their lower ends."""
        return [self._resolved_where_it_can({**self.corner(), n: end}) for n, both in ends.items() for end in both]

    def _resolved_where_it_can(self, tuned: Mapping[str, Value]) -> dict[str, Value]:
        """Resolved values; without the inactive ones if one of these cannot be computed."""
        try:
            return self._resolve(tuned, frozenset())
        except FormulaError as error:
            if error.name not in (absent := self.conditions.absent(tuned)):
                raise
            return self._resolve(tuned, absent)

    def following(self, tuned: Collection[str]) -> frozenset[str]:
        """The derived values that depend on ``tuned`` variables through their formulas."""
        formulas = {n: Formula(p.formula).names for n, p in self.parameters.items() if isinstance(p, DerivedParameter)}
        following: frozenset[str] = frozenset()
        while (
            grown := frozenset(n for n, used in formulas.items() if not used.isdisjoint({*tuned, *following}))
        ) != following:
            following = grown
        return following

    def corner(self) -> dict[str, Value]:
        """The tuned values at their lower ends: a valid point for checks and previews."""
        values: dict[str, Value] = {}
        for name, parameter in self.parameters.items():
            if isinstance(parameter, FloatParameter | IntParameter):
                values[name] = parameter.low
            elif isinstance(parameter, CategoricalParameter):
                values[name] = parameter.choices[0]
            elif isinstance(parameter, LayoutParameter):
                values[name] = str(self.layouts(name).layouts[0])
        return values

    def distributions(self) -> dict[str, BaseDistribution]:
        """The tuned parameters as Optuna distributions, by name."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        distributions: dict[str, BaseDistribution] = {}
        for name, parameter in self.parameters.items():
            if isinstance(parameter, FloatParameter):
                distributions[name] = FloatDistribution(parameter.low, parameter.high, log=parameter.log)
            elif isinstance(parameter, IntParameter):
                high = parameter.high - (parameter.high - parameter.low) % parameter.step
                distributions[name] = IntDistribution(parameter.low, high, log=parameter.log, step=parameter.step)
            elif isinstance(parameter, CategoricalParameter):
                distributions[name] = CategoricalDistribution(parameter.choices)
            elif isinstance(parameter, LayoutParameter):
                distributions[name] = CategoricalDistribution([str(layout) for layout in self.layouts(name).layouts])
        return distributions

    def roles(self) -> dict[str, Role]:
        """Stated roles of parameters, by name."""
        return {n: p.role for n, p in self.parameters.items() if isinstance(p, TunedParameter) and p.role is not None}

    def switches(self) -> dict[str, bool]:
        """Switch parameters by name; True if they change arithmetic."""
        return {name: SWITCHES[role] for name, role in self.roles().items() if role in SWITCHES}

    def resolve(self, tuned: Mapping[str, Value]) -> dict[str, Value]:
        """All values that the trial reads, from tuned ones: layout expanded, fixed and derived values added.

        Inactive parameters (:mod:`lora_tune.config.parameters`) are omitted. Floats are rounded by
        ``FloatParameter.written`` and the trial uses the rounded values. With a layout, the result also has ``GBS``
        (global batch size, samples per step). Raises FormulaError if a derived value cannot be computed.
        """
        return self._resolve(tuned, self.conditions.absent(tuned))

    def _resolve(self, tuned: Mapping[str, Value], absent: frozenset[str]) -> dict[str, Value]:
        values: dict[str, Value] = {}
        context: dict[str, Value] = {}
        formulas: dict[str, Formula] = {}
        for name, parameter in self.parameters.items():
            if name in absent:
                continue
            if isinstance(parameter, LayoutParameter):
                layout = parse_layout(str(tuned[name]))
                values |= parameter.values(layout)
                gpus = self.gpu_count(values)
                context |= {"DP": layout.dp(gpus), "GBS": layout.gbs(gpus)}
                values["GBS"] = layout.gbs(gpus)
            elif isinstance(parameter, DerivedParameter):
                formulas[name] = Formula(parameter.formula)
            elif isinstance(parameter, FixedParameter):
                values[name] = parameter.value
            elif isinstance(parameter, FloatParameter):
                values[name] = parameter.written(float(tuned[name]))
            else:
                values[name] = tuned[name]
        context |= {"GPUS": self.gpu_count(values), "NODES": self.node_count(values)}
        return _derive(formulas, values, context)

    def tuned(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """The inverse of :meth:`resolve`: tuned values from resolved ones, e.g. of an exported config.

        Raises SpaceError if a value is missing.
        """
        tuned: dict[str, Value] = {}
        absent = self.conditions.absent(values)
        for name, parameter in self.parameters.items():
            if name in absent:
                continue
            if isinstance(parameter, LayoutParameter):
                matches = [x for x in self.layouts(name).layouts if parameter.values(x).items() <= values.items()]
                if not matches:
                    raise SpaceError(name, "the values name no layout of this space")
                tuned[name] = str(matches[0])
            elif not isinstance(parameter, DerivedParameter | FixedParameter):
                if name not in values:
                    raise SpaceError(name, f"{name} has no value")
                tuned[name] = values[name]
        return tuned


def _derive(
    formulas: Mapping[str, Formula], values: dict[str, Value], context: Mapping[str, Value]
) -> dict[str, Value]:
    waiting = dict(formulas)
    while waiting:
        ready = [n for n, f in waiting.items() if not (f.names & waiting.keys())]
        if not ready:
            raise FormulaError(min(waiting), f"the formulas of {', '.join(sorted(waiting))} need each other")
        for name in ready:
            # Not rounded: MLPerf's checker compares some rates exactly, which 12 digits fail.
            values[name] = waiting.pop(name).value(name, {**context, **values})
    return values


# Validity of a space: names, layouts, node counts, conditions and formulas.


def check_space(space: Space) -> None:
    """Raise SpaceError if no trial is possible in this space."""
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
    """Check that each condition can hold, and that no active formula uses an inactive parameter."""
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
                where = conditions.describe(used)
                raise SpaceError(name, f"its formula needs {used}, which exists only where {where}; give it that when")


def _check_nodes(parameter: Parameter | None) -> None:
    """Check that NODES, which the job requests, is a positive integer and no formula."""
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


# What a distribution can propose.


def range_text(distribution: BaseDistribution) -> str:
    """The range or choices of a distribution, as text."""
    if choices := getattr(distribution, "choices", None):
        return f"one of {', '.join(map(repr, choices))}"
    low, high = getattr(distribution, "low", -math.inf), getattr(distribution, "high", math.inf)
    step = getattr(distribution, "step", None)
    return f"within {low:g} to {high:g}" + (f" in steps of {step:g}" if step not in (None, 1) else "")


def within(distribution: BaseDistribution, value: Value) -> bool:
    """Whether a distribution can propose ``value``."""
    from optuna.trial import create_trial

    try:
        create_trial(value=0.0, params={"x": value}, distributions={"x": distribution})
    except (ValueError, OverflowError):  # OverflowError: an integer too large for a float
        return False
    return True
