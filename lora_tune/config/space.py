"""The search space: what may vary, what follows from it, and which layouts exist.

A study's ``[space]`` table maps the name of a variable that the trial reads to one of
``float``, ``int``, ``categorical``, ``layout``, ``derived`` or ``fixed`` (a bare value is fixed).
Optuna sees a flat set of distributions; the trial sees the resolved values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from lora_tune.config.formula import Formula, FormulaError
from lora_tune.config.layout import LAYOUT_VALUES, LayoutAxes, LayoutTable, parse_layout
from lora_tune.config.section import numbers_are_numbers

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Value = str | int | float | bool


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # Not of every field: pydantic tells the kinds apart by ``type`` before any validator.
    _numbers = field_validator("low", "high", "step", "log", mode="before", check_fields=False)(numbers_are_numbers)


Role = Literal["speed", "convergence", "both"]


class _Tuned(_Frozen):
    """What every number or category that is tuned may say."""

    role: Role | None = Field(
        None,
        description="what it decides: speed (and memory), convergence (samples to the target), or both; left out: "
        "guessed from its name and tested by the trials",
    )


class FloatParameter(_Tuned):
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
        """``value`` as a person would write it: three significant digits, more where the range is narrow.

        A step of the last digit is at most a hundredth of the range.
        """
        if value == 0 or not math.isfinite(value):
            return value
        digit = math.floor(math.log10(abs(value))) - 2
        if self.high > self.low:
            digit = min(digit, math.floor(math.log10((self.high - self.low) / 100)))
        return min(max(round(value, -digit), self.low), self.high)


class IntParameter(_Tuned):
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


class CategoricalParameter(_Tuned):
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


class DerivedParameter(_Frozen):
    """A value computed from others by plain arithmetic, e.g. ``formula = "ceil(0.1 * MAX_STEPS)"``."""

    type: Literal["derived"]
    formula: str = Field(
        description="numbers, names, + - * / // %, min, max, ceil, floor, round; also GBS, DP, GPUS, NODES"
    )

    @model_validator(mode="after")
    def _parses(self) -> DerivedParameter:
        try:
            Formula(self.formula)
        except FormulaError as error:
            raise ValueError(str(error)) from error
        return self


class FixedParameter(_Frozen):
    """A value that does not vary."""

    type: Literal["fixed"]
    value: Value = Field(description="the value")

    @field_validator("value", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        if not isinstance(value, str | int | float | bool) or not (isinstance(value, str) or math.isfinite(value)):
            raise ValueError(f"{value!r} is not a string, a truth value or a finite number")
        return value


Parameter = Annotated[
    FloatParameter | IntParameter | CategoricalParameter | LayoutParameter | DerivedParameter | FixedParameter,
    Field(discriminator="type"),
]


class SpaceError(ValueError):
    """The space as a whole cannot be used; ``key`` is the parameter to blame."""

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
    def gpus(self) -> int:
        """GPUs of one trial; a CPU trial counts as one."""
        return max(1, self.nodes * self.gpus_per_node)

    def layouts(self, name: str) -> LayoutTable:
        """The valid layouts of a layout parameter, with what was ruled out and by which rule."""
        parameter = self.parameters[name]
        assert isinstance(parameter, LayoutParameter)
        return parameter.enumerate(self.gpus, self.gpus_per_node)

    def node_count(self, values: Mapping[str, Value]) -> int:
        """Nodes of a trial with these resolved values: its NODES where that is a parameter, else the site's."""
        return int(values.get("NODES", self.nodes))

    def gpu_count(self, values: Mapping[str, Value]) -> int:
        """GPUs of a trial with these resolved values; a CPU node counts as one."""
        return max(1, self.node_count(values) * max(1, self.gpus_per_node)) if "NODES" in values else self.gpus

    @property
    def most_nodes(self) -> int:
        """The nodes of the largest trial."""
        found = [self.nodes]
        parameter = self.parameters.get("NODES")
        if isinstance(parameter, IntParameter):
            found = [parameter.high]
        elif isinstance(parameter, CategoricalParameter):
            found = [int(choice) for choice in parameter.choices]
        elif isinstance(parameter, FixedParameter):
            found = [int(parameter.value)]
        for other in self.parameters.values():
            if isinstance(other, LayoutParameter) and other.nodes:
                found = [*other.nodes]
        return max(found)

    @property
    def varies_nodes(self) -> bool:
        """Whether trials differ in their number of nodes."""
        layouts = (p for p in self.parameters.values() if isinstance(p, LayoutParameter))
        return "NODES" in self.parameters or any(p.nodes for p in layouts)

    def batch_sizes(self) -> set[int]:
        """Every global batch size that the layouts can produce; empty without a layout."""
        found = ((p, x) for n, p in self.parameters.items() if isinstance(p, LayoutParameter)
                 for x in self.layouts(n).layouts)  # fmt: skip
        return {x.gbs(self.gpu_count(p.values(x))) for p, x in found}

    def each_layout(self) -> list[dict[str, Value]]:
        """Resolved values for every layout, all else at its lower end; one entry without a layout."""
        corner = self.corner()
        name = next((n for n, p in self.parameters.items() if isinstance(p, LayoutParameter)), None)
        if name is None:
            return [self.resolve(corner)]
        return [self.resolve({**corner, name: str(layout)}) for layout in self.layouts(name).layouts]

    def check(self) -> None:
        """Raise SpaceError when no trial could be made of this space."""
        for name, parameter in self.parameters.items():
            if not name.isidentifier() or not name.isascii():
                raise SpaceError(name, f"{name!r} is not a variable name; use letters, digits and _")
            if isinstance(parameter, LayoutParameter):
                table = self.layouts(name)
                if not table.layouts:
                    raise SpaceError(name, f"no layout of {self.gpus} GPUs satisfies {table.why_empty()}")
                if clash := set(LAYOUT_VALUES) & set(self.parameters):
                    raise SpaceError(min(clash), f"{min(clash)} is set by the layout {name}; remove it here")
        _check_nodes(self.parameters.get("NODES"))
        if sum(isinstance(p, LayoutParameter) for p in self.parameters.values()) > 1:
            raise SpaceError("", "two layout parameters; a trial has one layout, keep one")
        try:
            self.resolve(self.corner())
        except FormulaError as error:
            raise SpaceError(error.name, str(error)) from error

    def corner(self) -> dict[str, Value]:
        """The tuned values at their lower ends: some point of the space, for checks and previews."""
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

        found: dict[str, BaseDistribution] = {}
        for name, parameter in self.parameters.items():
            if isinstance(parameter, FloatParameter):
                found[name] = FloatDistribution(parameter.low, parameter.high, log=parameter.log)
            elif isinstance(parameter, IntParameter):
                high = parameter.high - (parameter.high - parameter.low) % parameter.step
                found[name] = IntDistribution(parameter.low, high, log=parameter.log, step=parameter.step)
            elif isinstance(parameter, CategoricalParameter):
                found[name] = CategoricalDistribution(parameter.choices)
            elif isinstance(parameter, LayoutParameter):
                found[name] = CategoricalDistribution([str(layout) for layout in self.layouts(name).layouts])
        return found

    def roles(self) -> dict[str, Role]:
        """What parameters decide, by name, where the study says it."""
        return {n: p.role for n, p in self.parameters.items() if isinstance(p, _Tuned) and p.role is not None}

    def resolve(self, tuned: Mapping[str, Value]) -> dict[str, Value]:
        """Tuned values in, every value that the trial reads out: layout expanded, fixed and derived added.

        Real numbers come out as a person would write them (``FloatParameter.written``): the trial runs with those.
        The result of a space with a layout also holds ``GBS`` (global batch size, samples per step).
        Raises FormulaError when a derived value cannot be computed.
        """
        values: dict[str, Value] = {}
        context: dict[str, Value] = {}
        formulas: dict[str, Formula] = {}
        for name, parameter in self.parameters.items():
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
        """The inverse of :meth:`resolve`: the tuned values within resolved ones, e.g. of an exported config.

        Raises SpaceError when a value is missing.
        """
        found: dict[str, Value] = {}
        for name, parameter in self.parameters.items():
            if isinstance(parameter, LayoutParameter):
                matches = [x for x in self.layouts(name).layouts if parameter.values(x).items() <= values.items()]
                if not matches:
                    raise SpaceError(name, "the values name no layout of this space")
                found[name] = str(matches[0])
            elif not isinstance(parameter, DerivedParameter | FixedParameter):
                if name not in values:
                    raise SpaceError(name, f"{name} has no value")
                found[name] = values[name]
        return found


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
        raise SpaceError("NODES", f"{bad[0]!r} is no node count; use whole numbers from 1")


def _derive(
    formulas: Mapping[str, Formula], values: dict[str, Value], context: Mapping[str, Value]
) -> dict[str, Value]:
    waiting = dict(formulas)
    while waiting:
        ready = [n for n, f in waiting.items() if not (f.names & waiting.keys())]
        if not ready:
            raise FormulaError(min(waiting), f"the formulas of {', '.join(sorted(waiting))} need each other")
        for name in ready:
            # To the last bit: MLPerf's checker compares some rates exactly, and 12 digits of them fail.
            values[name] = waiting.pop(name).value(name, {**context, **values})
    return values


def _check_range(low: float, high: float, log: bool) -> None:
    if low > high:
        raise ValueError(f"low = {low} is above high = {high}; swap them")
    if log and low <= 0:
        raise ValueError(f"log = true needs low above 0, not {low}")
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("low and high must be finite")


def as_parameter(value: Any) -> Any:
    """A bare TOML value as a fixed parameter; a table unchanged."""
    return value if isinstance(value, dict) else {"type": "fixed", "value": value}
