"""A script's own config file, changed for a trial: scalars of YAML and JSON, everything else to the letter.

Values are replaced where they stand in the text, so that comments, order and anchors stay. Pure functions of text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

SUFFIXES = (".yaml", ".yml", ".json")

_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")
"""What stands before a scalar of YAML: its anchor and its tag."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value in a file. begin, end: where it stands in the text; value: as it is read, without quotes."""

    value: str
    begin: int
    end: int


def is_config(name: str) -> bool:
    """Whether a file of this name is one whose values are read here."""
    return PurePath(name).suffix.lower() in SUFFIXES


def scalars(text: str) -> dict[str, Scalar]:
    """Every scalar within mappings, under its dotted key. Raises ValueError for what is no YAML or JSON."""
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
            begin += len(_PROPERTIES.match(text[begin:end])[0])  # type: ignore[index]  # it matches nothing, too
            yield name, Scalar(value.value, begin, end)
        else:
            yield from _scalars(value, f"{name}.", text)


def changed(text: str, values: Mapping[str, str]) -> str:
    """The text with other values under the dotted keys of ``values``. Raises ValueError for a key that it lacks."""
    known = scalars(text)
    if absent := [key for key in values if key not in known]:
        raise ValueError(f"there is no key {absent[0]!r}; it has {', '.join([*known][:20]) or 'none'}")
    for key in sorted(values, key=lambda key: -known[key].begin):
        text = text[: known[key].begin] + _written(values[key]) + text[known[key].end :]
    return text


def _written(value: str) -> str:
    """A number as every reader of YAML and JSON takes it for one: PyYAML reads ``3e-05`` as words."""
    return re.sub(r"^(-?\d+)(e[-+]\d+)$", r"\1.0\2", value)
