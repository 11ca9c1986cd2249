"""Parameter types of a study's ``[space]``, formulas, and conditions."""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_serializer, model_validator

from lora_tune.config.layout import Layout, LayoutAxes, LayoutTable, parse_layout
from lora_tune.config.problems import numbers_are_numbers

# Arithmetic formulas from a study file, evaluated without executing code.


_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "ceil": math.ceil,
    "floor": math.floor,
    "round": round,
    "sqrt": math.sqrt,
}
_LIMIT = 500  # characters; bounds the parser's recursion


class FormulaError(ValueError):
    """An invalid formula; ``name`` is the parameter that it defines."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(problem)
        self.name = name


class Formula:
    """An arithmetic expression over named values.

    Allowed: numbers, names, ``+ - * / // %``, parentheses, ``min max ceil floor round sqrt``; anything else raises
    FormulaError on construction. There is no power operator, so that the cost of a formula is bounded.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > _LIMIT:
            raise FormulaError("", f"a formula of {len(text)} characters; at most {_LIMIT} are allowed")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise FormulaError("", f"{text!r} is not arithmetic: {error}") from error
        self.names: frozenset[str] = frozenset(self._check(self._tree))

    def _check(self, node: ast.AST) -> set[str]:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return set()
        if isinstance(node, ast.Name):
            return {node.id}
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return self._check(node.left) | self._check(node.right)
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            return self._check(node.operand)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords and node.args:
            if node.func.id not in _FUNCTIONS:
                raise FormulaError("", f"{node.func.id}() is not allowed; use {', '.join(_FUNCTIONS)}")
            return set().union(*(self._check(a) for a in node.args))
        raise FormulaError("", f"{self.text!r} holds something other than arithmetic")

    def value(self, name: str, values: Mapping[str, object]) -> int | float:
        """The result for ``values``. Raises FormulaError (naming ``name``) for a missing or non-numeric value."""
        try:
            result = self._compute(self._tree, name, values)
        except (ZeroDivisionError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, FormulaError):
                raise
            raise FormulaError(name, f"{self.text!r} cannot be computed: {error}") from error
        if not math.isfinite(result):
            raise FormulaError(name, f"{self.text!r} gives {result}")
        return result

    def _compute(self, node: ast.AST, name: str, values: Mapping[str, object]) -> int | float:
        if isinstance(node, ast.Constant):
            return node.value  # type: ignore[return-value]  # _check admits numbers only
        if isinstance(node, ast.Name):
            value = values.get(node.id)
            if isinstance(value, bool) or not isinstance(value, int | float):
                known = ", ".join(sorted(n for n, v in values.items() if isinstance(v, int | float)))
                raise FormulaError(name, f"{self.text!r} needs the number {node.id}; known numbers: {known}")
            return value
        if isinstance(node, ast.BinOp):
            left, right = self._compute(node.left, name, values), self._compute(node.right, name, values)
            return _OPERATORS[type(node.op)](left, right)
        if isinstance(node, ast.UnaryOp):
            return _OPERATORS[type(node.op)](self._compute(node.operand, name, values))
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Name)
        return _FUNCTIONS[node.func.id](*(self._compute(a, name, values) for a in node.args))


Value = str | int | float | bool


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # Not all fields: pydantic selects the union member by ``type`` before any validator.
    _numbers = field_validator("low", "high", "step", "log", mode="before", check_fields=False)(numbers_are_numbers)


Role = Literal["speed", "convergence", "both", "switch", "precision"]
SWITCHES: Mapping[Role, bool] = {"switch": False, "precision": True}
"""Roles of switches, which are probed several at a time -> whether they change arithmetic."""


class Conditional(_Frozen):
    """What may exist only under a choice of another parameter."""

    when: dict[str, tuple[Value, ...]] = Field(
        default_factory=dict,
        description='it exists only under these values of other parameters, as in `{ OPTIMIZER = ["adam", "lamb"] }`; '
        "left out: always",
    )

    @field_validator("when", mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f'{value!r} is not a table of values; write when = {{ OPTIMIZER = "adam" }}')
        if empty := [name for name, allowed in value.items() if isinstance(allowed, list | tuple) and not allowed]:
            raise ValueError(f"{empty[0]} has no values; list those under which the parameter exists")
        listed = {n: allowed if isinstance(allowed, list | tuple) else (allowed,) for n, allowed in value.items()}
        if bad := [v for allowed in listed.values() for v in allowed if not isinstance(v, str | int | float | bool)]:
            raise ValueError(f"{bad[0]!r} cannot be a parameter's value; write texts, numbers, true or false")
        return listed

    @model_serializer(mode="wrap")
    def _without_nothing(self, handler: Any) -> dict[str, Any]:
        """Omit an empty ``when``, so that hashes equal those of releases without conditions."""
        serialized: dict[str, Any] = handler(self)
        if not serialized.get("when"):
            serialized.pop("when", None)
        return serialized


class TunedParameter(Conditional):
    """What every number or category that is tuned may say."""

    role: Role | None = Field(
        None,
        description="what it decides: speed (and memory), convergence (samples to the target), or both; switch: a "
        "choice that decides speed and is probed with several others at a time, its first value being what counts "
        "where nobody states it; precision: a switch that changes arithmetic, which whole runs must confirm; left "
        "out: guessed from its name (the grey box and the search by throughput ask)",
    )

    @model_validator(mode="after")
    def _switches_are_choices(self) -> TunedParameter:
        if self.role in SWITCHES and (getattr(self, "type", "") != "categorical" or self.when):
            raise ValueError(
                f'role = "{self.role}" is for choices that always exist; write type = "categorical", no when'
            )
        return self


class FloatParameter(TunedParameter):
    """A real number in ``[low, high]``, drawn on a log scale with ``log = true``."""

    type: Literal["float"]
    low: float = Field(description="smallest value")
    high: float = Field(description="largest value")
    log: bool = Field(False, description="draw on a log scale; low must be above 0")

    @model_validator(mode="after")
    def _ordered(self) -> FloatParameter:
        _check_range(self.low, self.high, self.log)
        return self

    def written(self, value: float) -> float:
        """``value`` rounded to three significant digits, more if the range is narrow.

        One unit of the last digit is at most a hundredth of the range.
        """
        if value == 0 or not math.isfinite(value):
            return value
        digit = math.floor(math.log10(abs(value))) - 2
        if self.high > self.low:
            digit = min(digit, math.floor(math.log10((self.high - self.low) / 100)))
        return min(max(round(value, -digit), self.low), self.high)


class IntParameter(TunedParameter):
    """A whole number ``low, low + step, ...`` up to ``high``."""

    type: Literal["int"]
    low: int = Field(description="smallest value")
    high: int = Field(description="largest value")
    step: int = Field(1, ge=1, description="distance between neighbours")
    log: bool = Field(False, description="draw on a log scale; low must be above 0 and step 1")

    @model_validator(mode="after")
    def _ordered(self) -> IntParameter:
        _check_range(self.low, self.high, self.log)
        if self.log and self.step != 1:
            raise ValueError("log = true allows only step = 1; drop one of the two")
        return self


class CategoricalParameter(TunedParameter):
    """One of a list of values."""

    type: Literal["categorical"]
    choices: tuple[Value, ...] = Field(min_length=1, description="the values")

    @model_validator(mode="after")
    def _distinct(self) -> CategoricalParameter:
        if len({(type(c), c) for c in self.choices}) != len(self.choices):
            raise ValueError(f"choices {list(self.choices)} repeat a value; list each once")
        return self


class LayoutParameter(LayoutAxes):
    """One categorical over the valid parallel layouts of the trial's GPUs."""

    type: Literal["layout"]
    _one_more: Layout | None = PrivateAttr(None)

    def with_layout(self, layout: Layout) -> LayoutParameter:
        """A copy that also offers ``layout``, even if it breaks the axes' rules: it is known to run."""
        copy = self.model_copy()
        copy._one_more = layout
        return copy

    def enumerate(self, site_gpus: int, gpus_per_node: int = 0) -> LayoutTable:
        """The layouts of the axes, plus the additional one."""
        table, more = super().enumerate(site_gpus, gpus_per_node), self._one_more
        return table if more is None else LayoutTable(tuple(sorted({*table.layouts, more})), table.removed)


class DerivedParameter(Conditional):
    """A value computed from others by plain arithmetic, e.g. ``formula = "ceil(0.1 * MAX_STEPS)"``."""

    type: Literal["derived"]
    formula: str = Field(
        description="numbers, names, + - * / // %, min, max, ceil, floor, round, sqrt; also GBS, DP, GPUS, NODES"
    )

    @model_validator(mode="after")
    def _parses(self) -> DerivedParameter:
        try:
            Formula(self.formula)
        except FormulaError as error:
            raise ValueError(str(error)) from error
        return self


class FixedParameter(Conditional):
    """A value that does not vary."""

    type: Literal["fixed"]
    value: Value = Field(description="the value")

    @field_validator("value", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        if not isinstance(value, str | int | float | bool) or not (isinstance(value, str) or _finite(value)):
            listed = isinstance(value, list)
            remedy = '; for a choice: { type = "categorical", choices = [...] }' if listed else ""
            raise ValueError(f"{value!r} is not a string, a truth value or a finite number{remedy}")
        return value


def choices_of(parameter: IntParameter | CategoricalParameter | FixedParameter) -> Sequence[Value]:
    """All values of a discrete parameter, lowest or first first."""
    if isinstance(parameter, IntParameter):
        return range(parameter.low, parameter.high + 1, parameter.step)
    return parameter.choices if isinstance(parameter, CategoricalParameter) else (parameter.value,)


def middle_of(parameter: FloatParameter | IntParameter | CategoricalParameter) -> Value:
    """The middle of a range, on its search scale; the first of choices."""
    if isinstance(parameter, CategoricalParameter):
        return parameter.choices[0]
    low, high = parameter.low, parameter.high
    between = math.sqrt(low) * math.sqrt(high) if parameter.log else low / 2 + high / 2
    if isinstance(parameter, FloatParameter):
        return parameter.written(between)
    return low + round((between - low) / parameter.step) * parameter.step if high > low else int(low)


Parameter = Annotated[
    FloatParameter | IntParameter | CategoricalParameter | LayoutParameter | DerivedParameter | FixedParameter,
    Field(discriminator="type"),
]


def _check_range(low: float, high: float, log: bool) -> None:
    if low > high:
        raise ValueError(f"low = {low} is above high = {high}; swap them")
    if log and low <= 0:
        raise ValueError(f"log = true needs low above 0, not {low}")
    if not (_finite(low) and _finite(high)):
        raise ValueError("low and high must be finite, and below 1e308")


def _finite(value: float) -> bool:
    """Whether a number is finite and fits into a float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def as_parameter(value: Any) -> Any:
    """A bare TOML value as a fixed parameter; a table unchanged."""
    return value if isinstance(value, dict) else {"type": "fixed", "value": value}


# Conditional parameters: ``when = { OPTIMIZER = ["adam", "lamb"] }``.
#
# A trial neither gets nor records an inactive parameter. Optuna's space is flat: it also draws inactive parameters,
# whose values have no effect. Models therefore see them at the middle of their range, so that configurations which
# differ only in inactive parameters are equal.


_TUNED = FloatParameter | IntParameter | CategoricalParameter

Allowed = Mapping[str, tuple[Value, ...]]
"""Values of each parent under which a parameter exists; all conditions must hold."""


class ConditionError(ValueError):
    """An invalid condition; ``key`` is the parameter at fault."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions of a space's parameters.

    of: conditions of each conditional parameter, parents before their children. rest: the middle of each tuned
    conditional parameter. known: values that all trials share. layout: name and parameter of the space's layout, if
    any.
    """

    of: Mapping[str, Allowed] = field(default_factory=dict)
    rest: Mapping[str, Value] = field(default_factory=dict)
    known: Mapping[str, Value] = field(default_factory=dict)
    layout: tuple[str, LayoutParameter] | None = None

    def absent(self, values: Mapping[str, Any]) -> frozenset[str]:
        """The inactive parameters at ``values``, which may be tuned or resolved.

        Missing values may be anything, so they make no parameter inactive.
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
        """``values`` without inactive parameters."""
        gone = self.absent(values)
        return {name: value for name, value in values.items() if name not in gone}

    def rested(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """``values`` with inactive parameters at their middle, so that equivalent configurations are equal."""
        gone = self.absent(values)
        return {**values, **{n: v for n, v in self.rest.items() if n in gone}} if gone else values

    def complete(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """A point of the flat space: as :meth:`rested`, with missing conditional parameters at their middle.

        Empty values stay empty: they mark a configuration outside the space.
        """
        return {**self.rest, **self.rested(values)} if values and self.of else dict(values)

    def agrees(self, values: Mapping[str, Any], point: Mapping[str, Value]) -> bool:
        """Whether a configuration has all values of a point, except those inactive in it."""
        gone = self.absent(values)
        return all(values.get(name) == value if name in values else name in gone for name, value in point.items())

    def describe(self, name: str) -> str:
        """The conditions of a parameter, as text: "OPTIMIZER = 'adam' or 'lamb' and TP = 2"."""
        return " and ".join(f"{p} = {' or '.join(map(repr, allowed))}" for p, allowed in self.of[name].items())

    def _degrees(self, values: Mapping[str, Any]) -> Mapping[str, Value]:
        if self.layout is None or self.layout[0] not in values:
            return {}
        return self.layout[1].values(parse_layout(str(values[self.layout[0]])))


def conditions_of(parameters: Mapping[str, Parameter]) -> Conditions:
    """The conditions of a space. Circular ones are left for :func:`check_conditions`."""
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
    """Names with parents before children; those in a circle last."""
    order: list[str] = []
    waiting = list(of)
    while ready := [n for n in waiting if not any(p in waiting for p in of[n])]:
        order += ready
        waiting = [n for n in waiting if n not in ready]
    return [*order, *waiting]


def is_one_of(value: object, allowed: Iterable[object]) -> bool:
    """Whether ``value`` is in ``allowed``; True is not 1."""
    if isinstance(allowed, range):  # may be long
        return type(value) is int and value in allowed
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed)


def check_conditions(parameters: Mapping[str, Parameter], layouts: Iterable[Mapping[str, Value]]) -> None:
    """Raise ConditionError for conditions with an invalid parent, that never hold, or that are circular.

    layouts: the variables of every layout of the space.
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
    """Check the conditions of a parameter and of its ancestors for circles and contradictions."""
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
    """All conditions under which a parameter exists, including its ancestors', which must have been checked."""
    allowed: dict[str, tuple[Value, ...]] = {}
    for parent, values in of.get(name, {}).items():
        for other, more in (*needed(parent, of).items(), (parent, values)):
            allowed[other] = tuple(v for v in allowed.get(other, more) if is_one_of(v, more))
    return allowed
