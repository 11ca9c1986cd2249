"""A table that leaves columns out where a terminal is narrow, so that no number is cut in half."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

Cells = dict[str, str | Text]
"""Column -> what a row has there; every row of a table has the same columns."""

CURVE_WIDTH = 16
"""Evals that the column "curve" shows where there is room."""

_SHORT_CURVE, _SHORTEST_CURVE, _SHORT_PARAMETERS = 8, 5, 12
_LEFT = ("state", "curve", "parameters")
_FIRST_TO_GO, _KEPT = ("parameters", "ETA", "curve", "to target"), ("trial", "state")
"""The columns that are left out first, and those that never are; between them go the others, the last one first."""


@dataclass(frozen=True, slots=True)
class FittedTable:
    """Rows as a rich renderable; the column "parameters" takes the room that is left."""

    rows: Sequence[Cells]
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        yield self.at(options.max_width)

    def at(self, room: int) -> Table:
        """The table in ``room`` characters."""
        columns, gap, curve_width = _layout(self.rows, room)
        table = Table(
            title=self.title or None,
            title_justify="left",
            title_style="bold",
            box=None,
            padding=(0, gap, 0, 0),
            header_style="bold",
            expand="parameters" in columns,
        )
        for name in columns:
            width = curve_width if name == "curve" else None
            ratio = 1 if name == "parameters" else None
            justify: Literal["left", "right"] = "left" if name in _LEFT else "right"
            table.add_column(
                name, justify=justify, width=width, ratio=ratio, no_wrap=name != "parameters", overflow="fold"
            )
        for row in self.rows:
            shown = {**row, "curve": str(row.get("curve", ""))[-curve_width:]}
            table.add_row(*(shown[name] for name in columns))
        return table


def _layout(rows: Sequence[Cells], room: int) -> tuple[list[str], int, int]:
    """Which columns fit into ``room`` characters, the gap between them, and the width of the curve.

    Wide gaps and curves go first, then columns, the least needed first.
    """
    columns = list(rows[0]) if rows else []
    widths = {name: max(len(name), *(cell_len(str(row[name])) for row in rows)) for name in columns}
    word = max((cell_len(word) for row in rows for word in str(row.get("parameters", "")).split()), default=0)
    least = max(_SHORT_PARAMETERS, word)  # a narrower column would break a value in two
    for gap, curve_width, shown in ((2, CURVE_WIDTH, 3 * least), (1, _SHORT_CURVE, least), (1, _SHORTEST_CURVE, least)):
        widths |= {"curve": curve_width, "parameters": min(widths.get("parameters", 0), shown)}
        if sum(widths[name] + gap for name in columns) <= room:
            return columns, gap, curve_width
    for name in (*_FIRST_TO_GO, *(n for n in reversed(columns) if n not in (*_FIRST_TO_GO, *_KEPT))):
        if sum(widths[kept] + gap for kept in columns) > room and name in columns:
            columns.remove(name)
    return columns, gap, curve_width
