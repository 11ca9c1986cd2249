"""A log that is a table: names of columns, and rows below them or beside them. Pure functions of text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lora_tune.logs.line_forms import EVAL_SCORE, ORDER, NamedNumber, name_score
from lora_tune.logs.run import as_number

_HEADERS = 200
"""Lines among which a header is looked for."""

_NAME = re.compile(r"[A-Za-z][\w./ ()%@-]*")
_BAR = re.compile(r":?\s+\d+%(?:\||\s*━).*")
"""A progress bar behind a row."""

_EDGE = re.compile(r"[|│┃]")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredColumn:
    """A measure in a table: settings of a reader, a row, what its progress counts, and what kind of measure it is."""

    settings: dict[str, Any]
    example: str
    unit: str
    is_eval: bool
    rising: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How columns are set apart. cells: of a line. cell: one that is not wanted, as a pattern. between: two of them.

    begin, end: what stands before the first and behind the last.
    """

    cells: Callable[[str], list[str]]
    cell: str
    between: str
    begin: str = "^"
    end: str = r"\s*$"


def _separated(mark: str) -> _Form:
    return _Form(
        cells=lambda line: [cell.strip().strip('"') for cell in line.split(mark)], cell=f"[^{mark}]*", between=mark
    )


def _framed(line: str) -> list[str]:
    """The cells of a row of a Markdown table or of one that is drawn with lines; none where it has no frame."""
    cells = _EDGE.split(line.strip())
    return [cell.strip() for cell in cells[1:-1]] if len(cells) > 3 and not cells[0] and not cells[-1] else []


_TUPLE = _Form(cells=lambda text: [cell.strip() for cell in text.split(",")], cell=r"[^,()]*", between=r",\s*", end="")
_FORMS = (
    _separated(","),
    _separated(";"),
    _Form(
        cells=_framed, cell="[^|│┃]*", between=r"\s*[|│┃]\s*", begin=r"^\s*[|│┃]\s*", end=r"\s*[|│┃]\s*$"
    ),
    _Form(cells=str.split, cell=r"\S+", between=r"\s+", begin=r"^\s*"),
)  # fmt: skip


def columns(lines: Sequence[str]) -> Iterator[MeasuredColumn]:
    """The measures of tables, the likeliest of each first."""
    yield from _of_libraries(lines)
    for at, line in enumerate(lines[:_HEADERS]):
        for form in _FORMS:
            yield from _measures(form, form.cells(line), lines[at + 1 :])
        if shown := _SHOWN.match(line):
            form = replace(_TUPLE, begin=re.escape(shown["names"]).replace(r"\ ", r"\s") + r"\s=\s\(\s*")
            values = [m["values"] for row in lines if (m := _SHOWN.match(row)) and m["names"] == shown["names"]]
            yield from _measures(form, form.cells(shown["names"].strip("()")), values)


_SHOWN = re.compile(r"\s*(?P<names>\([A-Za-z]\w*(?:, ?[A-Za-z]\w*)+\)) = \((?P<values>[^()]*)\)\s*$")
"""Julia's ``@show (epoch, val_loss)``."""


def _measures(form: _Form, names: Sequence[str], below: Sequence[str]) -> Iterator[MeasuredColumn]:
    if len(names) < 2 or not all(_NAME.fullmatch(name) for name in names):
        return
    known = [NamedNumber(name, "", 0, 0, 0) for name in names]
    places = sorted((ORDER.index(pair.progress), i) for i, pair in enumerate(known) if pair.progress)
    measures = sorted((-score, i) for i, pair in enumerate(known) if (score := name_score(pair.words)))
    if not places or not measures:
        return
    place, unit = places[0][1], ORDER[places[0][0]]
    rows = [(row, cells) for row in below if len(cells := form.cells(_BAR.sub("", row))) == len(names)]
    for score, column in measures:
        row, cells = next((r for r in rows if as_number(r[1][column]) is not None), ("", []))
        if not cells:
            continue
        settings = {"kind": "regex", "eval": _row_pattern(form, len(names), {place: unit, column: "loss"})}
        zero = {"from_zero": True} if unit == "epoch" and as_number(cells[place]) == 0 else {}
        yield MeasuredColumn(
            settings=settings | zero,
            example=row.strip(),
            unit=unit,
            is_eval=-score > EVAL_SCORE,
            rising=not known[column].falls,
        )


def _row_pattern(form: _Form, count: int, groups: Mapping[int, str]) -> str:
    last = max(groups)
    held = {g: f"(?P<{g}>[-+.\\w]+)" if g == "loss" else rf"(?P<{g}>[\d.]+)(?:/\d+)?" for g in groups.values()}
    fields = [held[groups[i]] if i in groups else form.cell for i in range(last + 1)]
    return form.begin + form.between.join(fields) + (form.between if last + 1 < count else form.end)


_SPACY = re.compile(r"\s*E\s+#\s.*\sSCORE\s*$")
_ULTRALYTICS = re.compile(r"\s*(?:Class\s+Images\s+Instances\s.*\bmAP50-95\)|classes\s+top1_acc\s)")


def _of_libraries(lines: Sequence[str]) -> Iterator[MeasuredColumn]:
    """Tables whose columns have names of their own: spaCy's scores, and what Ultralytics finds for all classes."""
    for at, line in enumerate(lines):
        settings: dict[str, Any] = {}
        if _SPACY.match(line):
            settings = {"kind": "regex", "eval": r"^\s*\d+\s+(?P<step>\d+)\s.*\s(?P<loss>[\d.]+)\s*$"}
        elif _ULTRALYTICS.match(line):
            names = _BAR.sub("", line).split()
            column = max((i for i, name in enumerate(names) if name.startswith("mAP50-95")), default=1)
            before = rf"(?:\s+\S+){{{column - 1}}}" if column > 1 else ""
            settings = {
                "kind": "regex",
                "eval": rf"^\s*all{before}\s+(?P<loss>[\d.]+)(?!\S)",
                "progress": r"^\s*(?P<epoch>\d+)/\d+\s+[\d.]+[GM]\s",
            }
        if settings:
            row = next((row for row in lines[at + 1 :] if re.search(settings["eval"], row)), "")
            unit = "epoch" if "progress" in settings else "step"
            yield MeasuredColumn(settings=settings, example=row.strip(), unit=unit, is_eval=True, rising=True)
            return
