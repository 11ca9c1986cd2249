"""What lines of one form say one after another: whether they go on as a training does. Pure functions."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lora_tune.logs.line_forms import ORDER, NamedNumber
from lora_tune.logs.run import as_count

Stated = Sequence[tuple[str, list[NamedNumber]]]
"""Lines with the named numbers in them."""

Series = Sequence[tuple[float, str]]
"""How far, and the loss there, as printed."""


def with_grouping(stated: Stated) -> Stated:
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


def last_batch(stated: Stated, rows: Sequence[int]) -> tuple[int, NamedNumber] | None:
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
    found = (as_count(p.number) for p in numbers if p.progress == like.progress and p.words == like.words)
    return next((count for count in found if count is not None), math.nan)


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
        advanced = len(counts) == 1 or counts[0] != counts[-1]
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
