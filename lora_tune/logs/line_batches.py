"""Evals that print their batches: which of an eval's lines tells its result. Pure functions of text.

In this order: the mean so far that the last batch states, as timm does, or the line behind the batches; the last batch
alone, where no other line states an eval's measure; a line that says in a word that it is the mean::

    Train: 0 [1250/1251 (100%)]  Loss: 2.6 (2.8)
    Test: [  78/78]  Time: 0.06 (0.07)  Loss:  0.605 ( 1.245)  Acc@1: 87.0 (72.0)
     *   Acc@1 72.0 Acc@5 91.3
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lora_tune.logs.line_forms import EVAL_SCORE, EVAL_WORDS, NUMBER, NamedNumber, losses, pattern, positions
from lora_tune.logs.line_series import (
    Stated,
    advances,
    counting,
    counts_from_zero,
    measures,
    reads,
    series_of,
    stated_in,
    train_pattern,
)
from lora_tune.logs.run import as_count

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
