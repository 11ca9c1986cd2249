"""What lines of one form say one after another: whether they go on as a training does. Pure functions."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from lora_tune.logs.line_forms import EVAL_SCORE, ORDER, NamedNumber, of_test_set, pairs, pattern, positions
from lora_tune.logs.run import as_count, as_number

_TRIED = 6
"""Names of measures, and patterns for training losses, that are tried, the likeliest first."""

_TRAIN_LINES = 500
"""Lines that are asked which pattern for training losses fits most of them."""

_SHOWN_AGAIN = 3
"""Lines to each different eval, from which on a line of progress shows each again; a plateau has fewer."""

_BAR = re.compile(r"\d%\|")

Stated = Sequence[tuple[str, list[NamedNumber]]]
"""Lines with the named numbers in them."""

Series = Sequence[tuple[float, str]]
"""How far, and the loss there, as printed."""


def stated_in(lines: Sequence[str]) -> Stated:
    """The lines with their measures and with what says how far the run is."""
    return _with_grouping([(line, [*(p for p in pairs(line) if not p.progress), *positions(line)]) for line in lines])


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
    if len(series) > len({loss for _, loss in series}) and (_BAR.search(line) or _shows_again(series, line)):
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
