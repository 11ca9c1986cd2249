"""The study-file reference as Markdown, from its models; ``python -m tests.docs.test_readme`` writes it."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from lora_tune.base.registry import WORKLOADS
from lora_tune.config import parameters, tables
from lora_tune.config.objective import ObjectiveSettings
from lora_tune.config.tables import Site

_SECTIONS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("[objective]", "what is minimised", ObjectiveSettings),
    ("[search]", "how trials are proposed", tables.Search),
    ("[pruning]", "when a trial is stopped", tables.Pruning),
    ("[budget]", "where the sweep ends; one of trials, node_hours and wall_hours is needed", tables.Budget),
    ("[site]", "where trials run", Site),
)
_PARAMETERS = (
    parameters.FloatParameter,
    parameters.IntParameter,
    parameters.CategoricalParameter,
    parameters.LayoutParameter,
    parameters.DerivedParameter,
    parameters.FixedParameter,
)

_HEAD = ("| key | values | default | meaning |", "|---|---|---|---|")


def markdown() -> str:
    """The whole reference."""
    lines = ["Top level: `name` (the file's name when absent), `description`, `division` (`open` or `closed`).", ""]
    for title, meaning, model in _SECTIONS:
        lines += [f"**`{title}`** {meaning}", "", *_table(model), ""]
    lines += ["**`[space]`** one entry a variable that the trial reads; a bare value is fixed", ""]
    shown = _Shown()
    for model in _PARAMETERS:
        kind = typing.get_args(model.model_fields["type"].annotation)[0]
        summary = (model.__doc__ or "").strip().splitlines()[0]
        lines += [f'`type = "{kind}"`: {summary}', "", *shown.table(model, kind, skip=("type",))]
    shown = _Shown()
    for kind in WORKLOADS.names():
        settings = _settings(kind)
        if settings is not None:
            lines += [f'**`[workload]`** with `kind = "{kind}"`', "", *shown.table(settings, kind)]
    return "\n".join(lines).rstrip() + "\n"


class _Shown:
    """Rows that stand in a table already: a kind that has them, too, names the kind where they are."""

    def __init__(self) -> None:
        self._where: dict[str, str] = {}

    def table(self, model: type[BaseModel], kind: str, skip: tuple[str, ...] = ()) -> list[str]:
        """The rows that no earlier table has, behind the names of the others."""
        rows = [*_rows(model, "", skip)]
        elsewhere: dict[str, list[str]] = {}
        for row in rows:
            if row in self._where:
                elsewhere.setdefault(self._where[row], []).append(row.split(" | ")[0].removeprefix("| "))
        new = [row for row in rows if row not in self._where]
        self._where.update(dict.fromkeys(new, kind))
        as_before = [f'As for `"{other}"`: {", ".join(keys)}.' for other, keys in elsewhere.items()]
        table = [*_HEAD, *new, ""] if new else []
        return [*(line for sentence in as_before for line in (sentence, "")), *table]


def _settings(kind: str) -> type[BaseModel] | None:
    try:
        found: type[BaseModel] = WORKLOADS.load(kind).Settings
    except ModuleNotFoundError:  # an optional workload
        return None
    return found


def _table(model: type[BaseModel], skip: tuple[str, ...] = ()) -> Iterator[str]:
    yield from _HEAD
    yield from _rows(model, "", skip)


def _rows(model: type[BaseModel], prefix: str, skip: tuple[str, ...] = ()) -> Iterator[str]:
    """A row a key; the keys of a table within the section follow it, as ``table.key``.

    A key without a description is not for users: ``secrets``, which ``environment`` fills.
    """
    for name, field in model.model_fields.items():
        if field.description is None:
            continue
        if name not in skip:
            meaning = (field.description or "").replace("|", "\\|")
            yield f"| `{prefix}{name}` | {_type(field.annotation)} | {_default(field)} | {meaning} |"
        for inner in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _rows(inner, f"{prefix}{name}.")


def _type(annotation: Any) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(a) for a in inner if a is not type(None)))
    if origin is tuple:
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    names = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`", Any: "any"}
    return names.get(annotation, "path" if getattr(annotation, "__name__", "") == "Path" else str(annotation))


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "" if field.default_factory else "needed"
    if field.default in (None, (), ""):
        return ""
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
