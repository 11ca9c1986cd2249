"""A log that is a table: names of columns, and rows below them or beside them. Pure functions of text."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from lora_tune.logs.line_forms import (
    EVAL_SCORE,
    EVAL_WORDS,
    NUMBER,
    ORDER,
    NamedNumber,
    headed,
    losses,
    of_test_set,
    pairs,
    pattern,
    positions,
)
from lora_tune.logs.run import as_count, as_number

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
    known = [NamedNumber(name, "0.0", 0, 0, 0) for name in names]
    places = sorted((ORDER.index(pair.progress), i) for i, pair in enumerate(known) if pair.progress)
    measures = sorted((-score, i) for i, pair in enumerate(known) if (score := pair.score) and not pair.progress)
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


# What lines of one form say one after another: whether they go on as a training does. Pure functions.


_TRIED = 6
"""Names of measures, and patterns for training losses, that are tried, the likeliest first."""

_TRAIN_LINES = 500
"""Lines that are asked which pattern for training losses fits most of them."""

_SHOWN_AGAIN = 3
"""Lines to each different eval, from which on a line of progress shows each again; a plateau has fewer."""

_PROGRESS_BAR = re.compile(r"\d%\|")

Stated = Sequence[tuple[str, list[NamedNumber]]]
"""Lines with the named numbers in them."""

Series = Sequence[tuple[float, str]]
"""How far, and the loss there, as printed."""


def stated_in(lines: Sequence[str]) -> Stated:
    """The lines with their measures and with what says how far the run is."""
    stated = []
    for at, line in enumerate(lines):
        own = (headed(lines, at, pair) for pair in pairs(line) if not pair.progress)
        stated.append((line, [*own, *positions(line)]))
    return _with_grouping(stated)


def _with_grouping(stated: Stated) -> Stated:
    """The same, with the knowledge which names have thousands set apart somewhere: a pattern for one fits all lines."""
    grouped = {tuple(pair.words) for _, numbers in stated for pair in numbers if "," in pair.number}
    if not grouped:
        return stated
    return [
        (line, [replace(pair, grouped=tuple(pair.words) in grouped) for pair in numbers]) for line, numbers in stated
    ]


def series_of(text: str, stated: Stated) -> Series:
    """How far and what, of each line that the pattern matches."""
    matcher = re.compile(text)
    read = []
    for match in filter(None, (matcher.search(line) for line, _ in stated)):
        groups = match.groupdict()
        far = next((as_count(groups[g]) for g in ORDER if groups.get(g)), None)
        if far is not None:
            read.append((far, groups["loss"]))
    return read


def measures(stated: Stated) -> list[tuple[int, str, list[int]]]:
    """(score, name, the rows where it stands) of each measure, the likeliest first."""
    named: dict[tuple[int, str], list[int]] = {}
    for at, (_, numbers) in enumerate(stated):
        for pair in numbers:
            if pair.score and not pair.progress:
                named.setdefault((pair.score, " ".join(pair.words)), []).append(at)
    judged = any(score > EVAL_SCORE and not of_test_set(name.split()) for score, name in named)
    last = {known: judged and of_test_set(known[1].split()) for known in named}
    ranked = sorted(named, key=lambda known: (last[known], -known[0], -len(named[known])))
    return [(*known, named[known]) for known in ranked[:_TRIED]]


def counting(series: Series, unit: str, line: str) -> dict[str, Any]:
    """Settings that say how the script counts and repeats itself."""
    settings = counts_from_zero(unit, f"{series[0][0]:g}")
    if len(series) > len({loss for _, loss in series}) and (_PROGRESS_BAR.search(line) or _shows_again(series, line)):
        settings["repeated"] = True
    return settings


def _shows_again(series: Series, line: str) -> bool:
    """Whether a line of progress shows the last eval until there is a new one: beside another loss, several times."""
    changes = 1 + sum(before != after for (_, before), (_, after) in pairwise(series))
    others = sum(p.score > 0 and not p.progress for p in pairs(line))
    return others > 1 and changes > 1 and len(series) >= _SHOWN_AGAIN * changes


def counts_from_zero(unit: str, first: str) -> dict[str, Any]:
    """The setting for a script whose first epoch is 0."""
    return {"from_zero": True} if unit == "epoch" and as_number(first) == 0 else {}


def train_pattern(stated: Stated, unit: str) -> str:
    """The pattern for training losses in the same unit that most lines match; "" where none is printed."""
    patterns = dict.fromkeys(
        pattern(line, loss, place)
        for line, numbers in stated[:_TRAIN_LINES]
        for loss in numbers
        for place in numbers
        if loss.trains and place.progress == unit
    )
    counted = {text: len(series_of(text, stated[:_TRAIN_LINES])) for text in [*patterns][:_TRIED]}
    return max(counted, key=lambda text: counted[text], default="")


def reads(text: str, line: str, loss: NamedNumber) -> bool:
    """Whether the pattern finds this loss in its own line, and not another one."""
    match = re.search(text, line)
    return match is not None and match["loss"] == loss.number


def advances(series: Series, *, ordered: bool) -> bool:
    """Whether what should say how far the run is does go on where several different losses are stated.

    ordered: it may not go back at all, as the numbers of several ranks do; batches of evals begin anew each time.
    """
    if not _goes_on([far for far, _ in series], ordered=ordered):
        return False
    return len({far for far, _ in series}) > 1 or len({loss for _, loss in series}) == 1


def _goes_on(counts: Sequence[float], *, ordered: bool = False) -> bool:
    """Whether numbers rise, but for a restart now and then unless ``ordered``."""
    back = sum(after < before for before, after in pairwise(counts))
    return len(counts) > 0 and not (back and (ordered or 4 * back > len(counts)))


@dataclass(frozen=True, slots=True)
class ProgressLine:
    """The first line that says how far the run is, and what of it does."""

    line: str
    place: NamedNumber


def progress_apart(stated: Stated, unit: str, rows: Sequence[int]) -> ProgressLine | None:
    """What counts this unit on lines of its own: the first name whose numbers go on; None without one.

    rows: where the measure stands. What begins anew in each epoch says the same at each eval, and is none.
    """
    named: dict[str, list[tuple[int, NamedNumber]]] = {}
    for row, (_, numbers) in enumerate(stated):
        for place in numbers:
            if place.progress == unit and not place.bracketed:
                named.setdefault(" ".join(place.words), []).append((row, place))
    for places in named.values():
        counts = [as_count(place.number) or 0.0 for _, place in places]
        advanced = counts[0] != counts[-1] or len(counts) == 1 or (unit == "epoch" and len(rows) == 1)
        if advanced and _goes_on(counts) and _differs_at_evals([row for row, _ in places], counts, rows):
            row, place = places[0]
            return ProgressLine(stated[row][0], place)
    return None


def _differs_at_evals(places: Sequence[int], counts: Sequence[float], evals: Sequence[int]) -> bool:
    """Whether evals tell counts apart, but for those that a restart makes again; the same in each epoch does not.

    places: rows of the counts. evals: rows of the evals; several between two counts are one.
    """
    before = {bisect_left(places, row) for row in evals}
    distinct = len({counts[at - 1] if at else 0.0 for at in before})
    return distinct >= min(2, len(before)) and 2 * distinct >= len(before)


# Evals that print their batches: which of an eval's lines tells its result. Pure functions of text.
#
# In this order: the mean so far that the last batch states, as timm does, or the line behind the batches; the last
# batch alone, where no other line states an eval's measure; a line that says in a word that it is the mean::
#
# Train: 0 [1250/1251 (100%)] Loss: 2.6 (2.8) Test: [ 78/78] Time: 0.06 (0.07) Loss: 0.605 ( 1.245) Acc@1: 87.0 (72.0)
# * Acc@1 72.0 Acc@5 91.3


_BATCH = re.compile(
    rf"(?i)^(?P<split>(?:{'|'.join(sorted(EVAL_WORDS))})\w*)(?P<between>[^\[\d]{{0,20}})\[\s*(?P<at>\d++)/(?P<of>\d++)\]"
)
_EPOCHS = (r"(?i)^train\w*:?\s+(?P<epoch>\d+)\s+\[", r"(?i)\bepoch:?\s+\[\s*(?P<epoch>\d+)")
_BEHIND = re.compile(r"\s{0,8}\*\s")
_MEAN = re.compile(rf"\s{{1,8}}\(\s{{0,8}}{NUMBER}\s{{0,8}}\)")
_AVERAGE = re.compile(r"(?i)(?<![a-z])(?:avg|average|mean|overall)(?![a-z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReading:
    """How the results of such evals are read, by epochs.

    Parameters
    ----------
    settings : dict
        Keys of ``workload.log``.
    example : str
        A line that is read.
    rising : bool
        Whether more of the measure is better.
    alone : bool
        Whether it is the last batch's own measure, and no mean.
    named : bool
        Whether the pattern finds the last batch by its number.
    """

    settings: dict[str, Any]
    example: str
    rising: bool
    alone: bool = False
    named: bool = False


def readings(lines: Sequence[str]) -> Iterator[BatchReading]:
    """The ways to read evals that print their batches, the likeliest first; none where nothing counts the epochs."""
    yield from _numbered_of_all(lines)
    yield from _counted_by_name(stated_in(lines))


def states_average(line: str) -> bool:
    """Whether a word in the line says that it holds a mean."""
    return _AVERAGE.search(line) is not None


def average_between(line: str, place: NamedNumber, loss: NamedNumber) -> list[str]:
    """What stands between progress and measure, as a pattern, where a word there says that it is a mean."""
    word = _AVERAGE.search(line, place.end, max(place.end, loss.begin))
    return [f".*?{word[0]}.*?"] if word else []


def without_batches(lines: Sequence[str]) -> list[str]:
    """The lines without those of an eval's batches.

    Such lines follow each other, and say nothing else of how far the run is: what is counted otherwise is epochs, evals
    or all samples of one.
    """
    counted = [batch if (batch := _BATCH.match(line)) and not positions(line) else None for line in lines]
    batches = {one["of"] for one, after in pairwise(counted) if one and after and one["of"] == after["of"] != one["at"]}
    return [line for line, count in zip(lines, counted, strict=True) if count is None or count["of"] not in batches]


def _numbered_of_all(lines: Sequence[str]) -> Iterator[BatchReading]:
    """Batches as ``[78/78]``: the mean in brackets of the last one, the line behind it, or its own measure."""
    epochs = ((form, epoch["epoch"]) for form in _EPOCHS for line in lines if (epoch := re.search(form, line)))
    form, first = next(epochs, ("", ""))
    batches = [(line, batch) for line in lines if (batch := _BATCH.match(line))]
    if not batches or not form:
        return

    def reading(text: str, measure: NamedNumber, line: str, *, alone: bool = False) -> BatchReading:
        settings = {"kind": "regex", "eval": text, "progress": form, **counts_from_zero("epoch", first)}
        return BatchReading(settings=settings, example=line, rising=not measure.falls, alone=alone)

    last = [
        (line, measure, _pattern(line, batch, measure))
        for line, batch in [(line, batch) for line, batch in batches if batch["at"] == batch["of"]][:1]
        for measure in losses(line)
    ]
    yield from (reading(text, measure, line) for line, measure, text in last if _MEAN.match(line, measure.end))
    for line in [line for line in lines if _BEHIND.match(line)][:1]:
        for measure in losses(line):
            name = re.escape(line[measure.begin : measure.at].strip())
            yield reading(rf"^\s*\*\s.*?(?<![\w/]){name}\s+(?P<loss>[-+.\w]+)", measure, line)
    if not any(measure.score > EVAL_SCORE for line in without_batches(lines) for measure in losses(line)):
        yield from (reading(text, measure, line, alone=True) for line, measure, text in last)


def _pattern(line: str, batch: re.Match[str], measure: NamedNumber) -> str:
    """A pattern for the line of the last batch: its number is that of all, and the mean stands in brackets."""
    head = re.escape(batch["split"] + batch["between"].rstrip()).replace(r"\ ", " ")
    name = re.escape(line[measure.begin : measure.at].rstrip())
    value = r"(?P<loss>[-+.\w]+)"
    shown = rf"\S+\s+\(\s*{value}" if _MEAN.match(line, measure.end) else value
    return rf"{head}\s*\[\s*(\d+)/\1\].*?(?<![\w/]){name}\s*{shown}"


def _counted_by_name(stated: Stated) -> Iterator[BatchReading]:
    """Batches that a name counts, each with its epoch and without a mean: the last one comes nearest to the result."""
    for whole, name, rows in measures(stated):
        if whole <= EVAL_SCORE or (last := _last_batch(stated, rows)) is None:
            continue
        row, batch = last
        line, numbers = stated[row]
        loss = next(p for p in numbers if " ".join(p.words) == name)
        place = next((p for p in numbers if p.progress == "epoch"), None)
        if place is None or not place.end <= batch.begin < batch.end <= loss.begin:
            continue
        start = max(batch.begin, loss.split_at + len(loss.split)) if loss.split_at < batch.at else batch.begin
        text = pattern(line, loss, place, rf".*?{re.escape(line[start : batch.end])}(?!\d).*?")
        read = series_of(text, stated)
        if advances(read, ordered=place.bracketed) and reads(text, line, loss):
            settings = {"kind": "regex", "eval": text, **counting(read, "epoch", line)}
            settings |= {"train": train} if (train := train_pattern(stated, "epoch")) else {}
            yield BatchReading(settings=settings, example=line.strip(), rising=not loss.falls, alone=True, named=True)


def _last_batch(stated: Stated, rows: Sequence[int]) -> tuple[int, NamedNumber] | None:
    """The row of an eval's last batch and what counts batches there; None where evals do not print batches alone.

    They do where each states the measure on several lines, nothing between them, and a count rises from line to line
    and ends at the same number in every eval. rows: where the measure stands.
    """
    evals: list[list[int]] = []
    for row in rows:
        if evals and row == evals[-1][-1] + 1:
            evals[-1].append(row)
        else:
            evals.append([row])
    if len(evals) < 2 or min(map(len, evals)) < 2:
        return None
    row = evals[0][-1]
    for place in (p for p in stated[row][1] if p.progress == "step"):
        counts = [[_count(stated[at][1], place) for at in batches] for batches in evals]
        rising = all(before < after for batches in counts for before, after in pairwise(batches))
        if rising and len({batches[-1] for batches in counts}) == 1:
            return row, place
    return None


def _count(numbers: Sequence[NamedNumber], like: NamedNumber) -> float:
    """The number with the same name as another one; NaN without one, which is not above any other."""
    counts = (as_count(p.number) for p in numbers if p.progress == like.progress and p.words == like.words)
    return next((count for count in counts if count is not None), math.nan)
