"""Numbers as a German, French or Brazilian locale prints them: ``1.234,5`` for 1,234.5. Pure functions of text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lora_tune.logs.line_forms import pairs

_NUMBER = re.compile(r"(?<![\w.,])(?:\d{1,3}(?:\.\d{3})++(?:,\d++)?+|\d++,\d++)(?![.,]?\d)")
_SWAPPED = str.maketrans(",.", ".,")
_NO_THOUSANDS = re.compile(
    r"(?<!\d)(?<!\d\d:)\d++,\d++(?<![1-9],\d\d\d)(?<![1-9]\d,\d\d\d)(?<![1-9]\d\d,\d\d\d)(?![.,]?\d)"
)
"""A comma that sets no thousands apart: ``0,925``, ``2,5``, but not ``1,200``."""


def with_points(text: str) -> str:
    """The text, as long as it was, with a point in numbers that have a decimal comma; their thousands have commas."""
    return _NUMBER.sub(lambda number: number[0].translate(_SWAPPED), text) if "," in text or "." in text else text


def in_use(lines: Sequence[str]) -> bool:
    """Whether measures stand there with a decimal comma for certain, by their names or in a table with semicolons."""
    return any(_in_use(line) for line in lines if _NO_THOUSANDS.search(line))


def _in_use(line: str) -> bool:
    if ";" in line and any(_NO_THOUSANDS.fullmatch(cell.strip()) for cell in line.split(";")):
        return True
    return any(pair.score and _NO_THOUSANDS.match(line, pair.at) for pair in pairs(with_points(line)))
