"""Error messages for invalid study files: the line or key, the value, what is allowed."""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from lora_tune.logs.run import as_number


def first_problem(error: ValidationError, model: type[BaseModel]) -> tuple[str, str]:
    """Key path, and problem with remedy in one line, of the most relevant of pydantic's errors on ``model``."""
    # A misspelt key often causes an error about a missing one.
    first = min(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    parts = [str(p) for p in first["loc"] if p not in ("float", "int", "categorical", "layout", "derived", "fixed")]
    key = ".".join(parts)
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown key; see the study-file reference for the allowed ones"
        if near := _allowed_near(parts, model):
            message = f"unknown key; {near}"
    elif first["type"] == "missing":
        message = f"is missing; add it{_meant(parts, model)}"
    elif first["type"] in ("union_tag_not_found", "union_tag_invalid"):
        message = "needs type = one of float, int, categorical, layout, derived, fixed"
        if tag := first.get("ctx", {}).get("tag"):
            message += f", not {tag!r}" + ("; a logarithmic range has log = true" if "log" in str(tag) else "")
    elif template := _PLAIN_WORDS.get(first["type"]):
        message = template.format(**first.get("ctx", {})) + _what_came(first["input"])
        if key == "name" and first["type"] == "string_pattern_mismatch":
            message = f"{_NAME_FORM}{_what_came(first['input'])}; without a name it is that of the file"
        if first["type"] in ("tuple_type", "list_type") and isinstance(first["input"], str):
            message += f"; write {json.dumps(first['input'].split())}"
    return key, message.replace("\n", " ")


_NAME_FORM = "must be made of letters from a to z or A to Z, digits, dots, dashes and underscores, at most 64"

_PLAIN_WORDS = {
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "literal_error": "must be {expected}",
    "finite_number": "must be a finite number",
    "string_pattern_mismatch": "must be of the form {pattern}",
    "too_short": "must have at least {min_length} entry",
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("string_type",), "must be text"),
    **dict.fromkeys(("tuple_type", "list_type"), "must be a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be a table"),
}
"""Pydantic's error type -> what is allowed."""


def _what_came(value: object) -> str:
    """The refused value, if it is short enough."""
    shown = repr(value)
    return f", not {shown}" if isinstance(value, str | int | float) and len(shown) <= 80 else ""


def _meant(parts: list[str], model: type[BaseModel]) -> str:
    """The model's description of a missing key."""
    for part in parts[:-1]:
        inner = model.model_fields.get(part)
        if inner is None or not (isinstance(inner.annotation, type) and issubclass(inner.annotation, BaseModel)):
            return ""
        model = inner.annotation
    field = model.model_fields.get(parts[-1]) if parts else None
    return f": {field.description}" if field is not None and field.description else ""


def _allowed_near(parts: list[str], model: type[BaseModel]) -> str:
    """The section that has the key, else the closest key of its section, else all of these."""
    if parts[0] == "space" and parts[-1] in _PARAMETER_KEYS:
        return f"did you mean {_PARAMETER_KEYS[parts[-1]]}?"
    top = model
    for part in parts[:-1]:
        inner = model.model_fields.get(part)
        if inner is None or not (isinstance(inner.annotation, type) and issubclass(inner.annotation, BaseModel)):
            return ""
        model = inner.annotation
    name = parts[-1]
    sections = {s: f.annotation for s, f in top.model_fields.items() if s in _SECTIONS}
    homes = [s for s, inner in sections.items() if isinstance(inner, type) and name in inner.model_fields]
    if homes:
        return f"{name} belongs in [{homes[0]}]"
    near = difflib.get_close_matches(name, model.model_fields, n=1)
    return f"did you mean {near[0]}?" if near else f"allowed are {', '.join(model.model_fields)}"


_PARAMETER_KEYS = {"min": "low", "max": "high", "lower": "low", "upper": "high", "values": "choices"}
"""Other common names of parameter keys -> their names here."""

_SECTIONS = ("objective", "budget", "search", "site")


def line_shown(problem: str, text: str) -> str:
    """The line of a TOML error, with the most likely cause."""
    match, lines = re.search(r"at line (\d+)", problem), text.splitlines()
    if match is None or not 0 < int(match[1]) <= len(lines):
        return ""
    line = lines[int(match[1]) - 1].strip()[:100]
    remedy = next((remedy for words, remedy in _TOML_REMEDIES.items() if words in problem), "texts go in quotes")
    return f"; the line reads `{line}` ({remedy})"


_TOML_REMEDIES = {
    "Invalid value": "texts go in quotes, numbers begin with a digit, truth is written true or false",
    "Unescaped": "patterns go in single quotes",
    "Expected '=' after": "a key gets its value with =",
    "Cannot overwrite": "each name appears only once in its table",
    "Cannot declare": "each table appears only once",
}
"""Text in Python's TOML errors -> the most likely cause."""


# Common to the tables of a study file.


LONGEST = 18
"""Maximum digits of an integer; all databases can store it, and a float nearly."""


def numbers_are_numbers(cls: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    """Field validator (before) that refuses ``trials = "6"`` and ``trials = true``, which pydantic would convert.

    Raises ValueError, which pydantic expects.
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
    """The plain types in an annotation's union, without None; empty for other annotations."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set().union(*(_kinds(part) for part in typing.get_args(annotation)))
    if typing.get_origin(annotation) is typing.Literal:
        return {type(value) for value in typing.get_args(annotation)}
    return {annotation} - {type(None)} if isinstance(annotation, type) else set()
