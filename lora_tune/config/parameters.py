"""What one entry of a study's ``[space]`` may be: its kinds, and what each of them allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_serializer, model_validator

from lora_tune.config.formula import Formula, FormulaError
from lora_tune.config.layout import LayoutAxes
from lora_tune.config.section import numbers_are_numbers

Value = str | int | float | bool


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # Not of every field: pydantic tells the kinds apart by ``type`` before any validator.
    _numbers = field_validator("low", "high", "step", "log", mode="before", check_fields=False)(numbers_are_numbers)


Role = Literal["speed", "convergence", "both", "switch", "precision"]
SWITCHES: Mapping[Role, bool] = {"switch": False, "precision": True}
"""The roles of switches, which are probed several at a time, and whether they change arithmetic."""


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
        """Studies that have no conditions are the same, by their hash too, as before there were any."""
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
        """``value`` as a person would write it: three significant digits, more where the range is narrow.

        A step of the last digit is at most a hundredth of the range.
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
    """All values that a parameter of separate values can have, the lowest or first first."""
    if isinstance(parameter, IntParameter):
        return range(parameter.low, parameter.high + 1, parameter.step)
    return parameter.choices if isinstance(parameter, CategoricalParameter) else (parameter.value,)


def middle_of(parameter: FloatParameter | IntParameter | CategoricalParameter) -> Value:
    """The middle of a range, on the scale on which it is searched; the first of choices."""
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
    """Whether it is a number that a float can hold, too."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def as_parameter(value: Any) -> Any:
    """A bare TOML value as a fixed parameter; a table unchanged."""
    return value if isinstance(value, dict) else {"type": "fixed", "value": value}
