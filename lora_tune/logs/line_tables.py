"""A log that is a table: a header with the names of columns, and rows below it. Pure functions of text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_tune.logs.line_forms import ORDER, NamedNumber, name_score
from lora_tune.logs.run import as_number

_HEADERS = 200
"""Lines among which a header is looked for."""


_BAR = re.compile(r":?\s+\d+%\|.*")
"""A progress bar behind a row."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How columns are set apart. cells: of a line. cell: one that is not wanted, as a pattern. between: two of them."""

    cells: Callable[[str], list[str]]
    cell: str
    between: str
    begin: str


_FORMS = (
    _Form(lambda line: [cell.strip().strip('"') for cell in line.split(",")], "[^,]*", ",", "^"),
    _Form(str.split, r"\S+", r"\s+", r"^\s*"),
)


def columns(lines: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """The measures of tables, the likeliest of each first: name, unit, settings of a reader, and a row."""
    for at, line in enumerate(lines[:_HEADERS]):
        for form in _FORMS:
            yield from _measures(form, form.cells(line), lines[at + 1 :])


def _measures(
    form: _Form, names: Sequence[str], below: Sequence[str]
) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    if len(names) < 2 or not all(re.fullmatch(r"[A-Za-z][\w./ ()%@-]*", name) for name in names):
        return
    known = [NamedNumber(name, "", 0, 0, 0) for name in names]
    places = sorted((ORDER.index(pair.progress), i) for i, pair in enumerate(known) if pair.progress)
    measures = sorted((-score, i) for i, pair in enumerate(known) if (score := name_score(pair.words)))
    if not places or not measures:
        return
    place, unit = places[0][1], ORDER[places[0][0]]
    rows = [(row, cells) for row in below if len(cells := form.cells(_BAR.sub("", row))) == len(names)]
    for _, column in measures:
        row, cells = next((r for r in rows if as_number(r[1][column]) is not None), ("", []))
        if not cells:
            continue
        settings = {"kind": "regex", "eval": _row_pattern(form, len(names), {place: unit, column: "loss"})}
        zero = {"from_zero": True} if unit == "epoch" and as_number(cells[place]) == 0 else {}
        yield names[column], unit, settings | zero, row.strip()


def _row_pattern(form: _Form, count: int, groups: Mapping[int, str]) -> str:
    last = max(groups)
    held = {g: f"(?P<{g}>[-+.\\w]+)" if g == "loss" else rf"(?P<{g}>[\d.]+)(?:/\d+)?" for g in groups.values()}
    fields = [held[groups[i]] if i in groups else form.cell for i in range(last + 1)]
    return form.begin + form.between.join(fields) + (form.between if last + 1 < count else r"\s*$")
