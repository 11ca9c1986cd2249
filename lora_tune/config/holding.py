"""A study whose space is extended to contain an existing configuration: ranges widen, steps shrink.

Parameters that trials do not read keep a single value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from pydantic import PrivateAttr

from lora_tune.config.layout import parse_layout
from lora_tune.config.parameters import (
    SWITCHES,
    CategoricalParameter,
    FloatParameter,
    IntParameter,
    LayoutParameter,
    Parameter,
    Value,
)
from lora_tune.config.space import Space
from lora_tune.config.study import Study


def holding(space: Space, tuned: Mapping[str, Value], unread: Collection[str] = ()) -> Space:
    """The space, extended so that the point ``tuned`` is in it.

    Ranges widen to its numbers; steps become the largest that reach them; choices and layouts gain its values. unread:
    parameters that are reduced to one value.
    """
    parameters = {n: _holding(p, tuned[n]) if n in tuned else p for n, p in space.parameters.items()}
    for name, parameter in parameters.items():
        if isinstance(parameter, LayoutParameter) and name in tuned:
            layout = parse_layout(str(tuned[name]))
            if layout not in space.layouts(name).layouts:
                parameters[name] = parameter.with_layout(layout)
    return replace(space, parameters={n: _alone(p) if n in unread else p for n, p in parameters.items()})


def _alone(parameter: Parameter) -> Parameter:
    """The parameter reduced to its first or lowest value."""
    if isinstance(parameter, FloatParameter | IntParameter):
        return parameter.model_copy(update={"high": parameter.low})
    if isinstance(parameter, CategoricalParameter):
        return parameter.model_copy(update={"choices": parameter.choices[:1]})
    return parameter


def _holding(parameter: Parameter, value: Value) -> Parameter:
    if isinstance(parameter, IntParameter):
        number = int(value)
        step = math.gcd(parameter.step, number - parameter.low)
        ends = {"low": min(parameter.low, number), "high": max(parameter.high, number)}
        return parameter.model_copy(update={**ends, "step": step})
    if isinstance(parameter, FloatParameter):
        real = float(value)
        return parameter.model_copy(update={"low": min(parameter.low, real), "high": max(parameter.high, real)})
    if isinstance(parameter, CategoricalParameter) and parameter.role in SWITCHES:
        return parameter.model_copy(update={"choices": (value, *(c for c in parameter.choices if c != value))})
    if isinstance(parameter, CategoricalParameter) and value not in parameter.choices:
        return parameter.model_copy(update={"choices": (*parameter.choices, value)})
    return parameter


class _Holding(Study):
    """A study with the same content and hash, but an extended space."""

    _point: Mapping[str, Value] = PrivateAttr(default_factory=dict)
    _unread: Collection[str] = PrivateAttr(default=())

    @property
    def search_space(self) -> Space:
        """The study's space, extended to contain the point."""
        return holding(super().search_space, self._point, self._unread)

    def with_options(self, options: Mapping[str, Mapping[str, Any]]) -> Study:
        """See Study.with_options; the copy's space contains the point, too."""
        return with_extended_space(super().with_options(options), self._point, self._unread)


def with_extended_space(study: Study, tuned: Mapping[str, Value] | None, unread: Collection[str] = ()) -> Study:
    """The study, with the same hash, whose space contains the point ``tuned``; None: the study itself.

    unread: parameters that are reduced to one value.
    """
    point = tuned or {}
    if holding(study.search_space, point, unread) == study.search_space:
        return study
    fields = {name: getattr(study, name) for name in Study.model_fields}
    held = _Holding.model_construct(study.model_fields_set, **fields)
    held._point, held._unread = dict(point), tuple(unread)
    return held
