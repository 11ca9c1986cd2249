"""Pydantic's findings on a study file in plain words: the key, what came, what is allowed."""

from __future__ import annotations

import difflib
import json

from pydantic import BaseModel, ValidationError


def first_problem(error: ValidationError, model: type[BaseModel]) -> tuple[str, str]:
    """The key path and a one-line problem with its remedy, of the first of pydantic's findings on ``model``."""
    # A misspelt key is often the cause of the missing one.
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
    elif template := _PLAIN_WORDS.get(first["type"]):
        message = template.format(**first.get("ctx", {})) + _what_came(first["input"])
        if first["type"] in ("tuple_type", "list_type") and isinstance(first["input"], str):
            message += f"; write {json.dumps(first['input'].split())}"
    return key, message.replace("\n", " ")


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
"""Pydantic's type of a finding -> what is allowed."""


def _what_came(value: object) -> str:
    """The refused value, where it is short enough for a line."""
    shown = repr(value)
    return f", not {shown}" if isinstance(value, str | int | float) and len(shown) <= 80 else ""


def _meant(parts: list[str], model: type[BaseModel]) -> str:
    """What a missing key is for, as the model describes it."""
    for part in parts[:-1]:
        inner = model.model_fields.get(part)
        if inner is None or not (isinstance(inner.annotation, type) and issubclass(inner.annotation, BaseModel)):
            return ""
        model = inner.annotation
    field = model.model_fields.get(parts[-1]) if parts else None
    return f": {field.description}" if field is not None and field.description else ""


def _allowed_near(parts: list[str], model: type[BaseModel]) -> str:
    """The allowed keys of the section in which an unknown key stands, the nearest first."""
    for part in parts[:-1]:
        inner = model.model_fields.get(part)
        if inner is None or not (isinstance(inner.annotation, type) and issubclass(inner.annotation, BaseModel)):
            return ""
        model = inner.annotation
    near = difflib.get_close_matches(parts[-1], model.model_fields, n=1)
    return f"did you mean {near[0]}?" if near else f"allowed are {', '.join(model.model_fields)}"
