"""What the tables of a study file have in common."""

from __future__ import annotations

import types
import typing
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from lora_tune.logs.run import as_number

LONGEST = 18
"""Digits of an integer that every database, and a float nearly, can hold."""


def numbers_are_numbers(cls: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    """Refuse ``trials = "6"`` and ``trials = true``, which would pass for 6 and 1; a validator of fields, before.

    Raises ValueError, as pydantic wants it.
    """
    if type(value) is int and abs(value) >= 10**LONGEST:
        raise ValueError(f"must be an integer of at most {LONGEST} digits")
    kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
    if kinds & {int, float} and type(value) not in kinds:
        if isinstance(value, str) and as_number(value) is not None:
            raise ValueError(f"must be a number, not {value!r}; write it without quotes")
        if isinstance(value, bool):
            raise ValueError(f"must be a number, not {value!r}")
    if kinds == {bool} and isinstance(value, str | int) and not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {value!r}")
    return value


class Section(BaseModel):
    """A table: frozen, without unknown keys, and with numbers that stand there as numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    _numbers = field_validator("*", mode="before")(numbers_are_numbers)


def _kinds(annotation: Any) -> set[Any]:
    """The plain types among an annotation's alternatives, None left out; empty for anything else."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set().union(*(_kinds(part) for part in typing.get_args(annotation)))
    if typing.get_origin(annotation) is typing.Literal:
        return {type(value) for value in typing.get_args(annotation)}
    return {annotation} - {type(None)} if isinstance(annotation, type) else set()
