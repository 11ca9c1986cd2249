"""``config_*.sh``: a trial's variables as bash exports, the format of MLPerf users."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from lora_tune.workloads.base import Value
from lora_tune.workloads.script_needs import as_typed

_INTO_SCRIPT_FOLDER = 'CDPATH= pushd "$(dirname "${BASH_SOURCE[0]}")"'


def value_text(value: Value) -> str:
    """A value as a trial reads it: ``True`` and ``False`` as in the public configs, floats exactly."""
    return repr(value) if isinstance(value, float) else str(value)


def render(
    values: Mapping[str, Value], *, comments: Sequence[str] = (), before: Sequence[str] = (), after: Sequence[str] = ()
) -> str:
    """A bash file that exports ``values``, in order.

    comments: provenance, one line each (newlines within one are folded). before, after: quoted bash lines around the
    exports, such as ``source config_common.sh``. The file can be sourced under ``set -eu``.
    """
    lines = ["#!/usr/bin/env bash"]
    lines += ["# " + " ".join(printable(comment).split()) for comment in comments]
    lines += before
    lines += [f"export {name}={shlex.quote(value_text(value))}" for name, value in values.items()]
    lines += after
    return "\n".join(lines) + "\n"


def source_lines(files: Sequence[Path], *, beside: bool = False) -> list[str]:
    """Bash lines that source ``files`` in order from the last one's own folder, the user's working folder.

    Paths in a config may be relative to it, or derived from the config's own name, often unquoted. beside: for a file
    in that folder, wherever it is moved; else the lines work in any file.
    """
    if not files:
        return []
    folder = files[-1].parent
    into = _INTO_SCRIPT_FOLDER if beside else f"pushd {shlex.quote(str(folder))}"
    typed = (as_typed(file, folder) for file in files)
    named = [os.path.relpath(name, folder) if beside and Path(name).is_absolute() else name for name in typed]
    return [f"{into} >/dev/null", *(f"source {shlex.quote(name)}" for name in named), "popd >/dev/null"]


def needs(name: str) -> str:
    """A bash line that fails if the secret ``name`` is not in the environment."""
    return f': "${{{name}:?is a secret of the study and stands in no file; export it first}}"'


def printable(text: str) -> str:
    """Text with control characters replaced by spaces, safe for a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


# Edits a script's own config file for a trial: scalars of YAML, JSON, TOML and gin.
#
# Values are replaced in the text, so that comments, order and anchors stay. Pure functions of text.


SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".gin")

_TABLE = re.compile(r"\s*\[\s*(?P<keys>[^\[\]]+?)\s*\]\s*(?:#.*)?$")
_ENTRY = re.compile(r"(?P<keys>\s*[\w\s.\"'-]+?\s*=\s*)(?P<value>\"[^\"\\]*\"|'[^']*'|[-+\w.:]+)\s*(?:#.*)?$")
"""A table's header, and a one-line entry with a scalar, in TOML."""

_BINDING = re.compile(
    r"(?m)^(?P<key>[\w./]+)[ \t]*=[ \t]*(?P<quote>[\"']?)(?P<value>[-+\w./]+)(?P=quote)[ \t]*(?:#.*)?$"
)
"""A parameter that gin binds to a number or a text."""

_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")
"""The anchor and the tag before a scalar of YAML."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value in a file. begin, end: its position in the text; value: as parsed, without quotes."""

    value: str
    begin: int
    end: int


def is_config(name: str) -> bool:
    """Whether a file of this name has a supported format."""
    return PurePath(name).suffix.lower() in SUFFIXES


def scalars(text: str, name: str = "") -> dict[str, Scalar]:
    """Every scalar within mappings, by its dotted key. Raises ValueError if the text is not YAML, JSON or TOML.

    name: the file's, which distinguishes TOML and gin.
    """
    if name.lower().endswith((".toml", ".gin")):
        lines = [*(_toml_scalars(text) if name.lower().endswith(".toml") else _gin_scalars(text))]
        twice = Counter(key for key, _ in lines)  # one of them is part of a multi-line string
        return {key: scalar for key, scalar in lines if twice[key] == 1}
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"neither YAML nor JSON: {' '.join(str(error).split())}") from error
    return dict(_scalars(root, "", text)) if root is not None else {}


def _scalars(node: object, before: str, text: str) -> Iterator[tuple[str, Scalar]]:
    from yaml.nodes import MappingNode, ScalarNode

    if not isinstance(node, MappingNode):
        return
    for key, value in node.value:
        name = f"{before}{key.value}"
        if isinstance(value, ScalarNode):
            begin, end = value.start_mark.index, value.end_mark.index
            begin += len(_PROPERTIES.match(text[begin:end])[0])  # type: ignore[index]  # it also matches ""
            yield name, Scalar(value.value, begin, end)
        else:
            yield from _scalars(value, f"{name}.", text)


def _gin_scalars(text: str) -> Iterator[tuple[str, Scalar]]:
    for bound in _BINDING.finditer(text):
        yield bound["key"], Scalar(bound["value"], bound.start("value"), bound.end("value"))


def _toml_scalars(text: str) -> Iterator[tuple[str, Scalar]]:
    """One-line TOML entries whose values a full parse confirms, without those in arrays."""
    values, before, begin = _flat(tomllib.loads(text)), "", 0
    for line in text.splitlines(keepends=True):
        if table := _TABLE.match(line):
            before = _dotted(table["keys"]) + "."
        elif line.lstrip().startswith("[["):
            before = "[]."  # a table in an array has no dotted key
        elif entry := _ENTRY.match(line):
            name = before + _dotted(entry["keys"].rpartition("=")[0])
            quoted = entry["value"][0] in "\"'"
            if name in values and values[name] == tomllib.loads(f"x = {entry['value']}")["x"]:
                start, end = begin + entry.start("value") + quoted, begin + entry.end("value") - quoted
                yield name, Scalar(text[start:end], start, end)
        begin += len(line)


def _flat(table: Mapping[str, object], before: str = "") -> dict[str, object]:
    leaves: dict[str, object] = {}
    for key, value in table.items():
        leaves |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return leaves


def _dotted(keys: str) -> str:
    return ".".join(key.strip().strip("\"'") for key in keys.split("."))


def changed(text: str, values: Mapping[str, str], name: str = "") -> str:
    """The text with new values for the dotted keys of ``values``. Raises ValueError for a missing key."""
    known = scalars(text, name)
    if absent := [key for key in values if key not in known]:
        raise ValueError(f"there is no key {absent[0]!r}; it has {', '.join([*known][:20]) or 'none'}")
    for key in sorted(values, key=lambda key: -known[key].begin):
        text = text[: known[key].begin] + _written(values[key]) + text[known[key].end :]
    return text


def _written(value: str) -> str:
    """A number that every parser of YAML, JSON and TOML recognises: PyYAML reads ``3e-05`` as a string."""
    return re.sub(r"^(-?\d+)(e[-+]\d+)$", r"\1.0\2", value)
