"""Logs that count the batches of an eval and print its running mean in brackets, as timm does. Pure functions of text.

Only the line of an eval's last batch tells its result, or one behind it; the epoch stands on the lines of training::

    Train: 0 [1250/1251 (100%)]  Loss: 2.6 (2.8)
    Test: [  78/78]  Time: 0.06 (0.07)  Loss:  0.605 ( 1.245)  Acc@1: 87.0 (72.0)
     *   Acc@1 72.0 Acc@5 91.3
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lora_tune.logs.line_forms import EVAL_SCORE, EVAL_WORDS, NUMBER, NamedNumber, losses, positions

_BATCH = re.compile(
    rf"(?i)^(?P<split>(?:{'|'.join(sorted(EVAL_WORDS))})\w*)(?P<between>[^\[\d]{{0,20}})\[\s*(?P<at>\d++)/(?P<of>\d++)\]"
)
_EPOCHS = (r"(?i)^train\w*:?\s+(?P<epoch>\d+)\s+\[", r"(?i)\bepoch:?\s+\[\s*(?P<epoch>\d+)")
_BEHIND = re.compile(r"\s{0,8}\*\s")
_MEAN = re.compile(rf"\s{{1,8}}\(\s{{0,8}}{NUMBER}\s{{0,8}}\)")


@dataclass(frozen=True, slots=True)
class MeanOfBatches:
    """A measure of an eval. settings: of a reader, without how it counts; first: the first epoch."""

    measure: NamedNumber
    settings: dict[str, str]
    example: str
    first: str


def without_batches(lines: Sequence[str]) -> list[str]:
    """The lines without those of an eval's batches.

    Such lines follow each other, and say nothing else of how far the run is: what is counted otherwise is epochs, evals
    or all samples of one.
    """
    counted = [batch if (batch := _BATCH.match(line)) and not positions(line) else None for line in lines]
    batches = {one["of"] for one, after in pairwise(counted) if one and after and one["of"] == after["of"] != one["at"]}
    return [line for line, count in zip(lines, counted, strict=True) if count is None or count["of"] not in batches]


def means(lines: Sequence[str]) -> Iterator[MeanOfBatches]:
    """The measures of the last batches' lines, the likeliest first, or those of the line behind an eval.

    A last batch without a mean in brackets may tell its own measure alone: it counts where no other line states an
    eval's. None where nothing counts the epochs.
    """
    epochs = ((form, epoch["epoch"]) for form in _EPOCHS for line in lines if (epoch := re.search(form, line)))
    form, first = next(epochs, ("", ""))
    batches = [(line, batch) for line in lines if (batch := _BATCH.match(line))]
    if not batches or not form:
        return
    last = [
        (line, batch, measure)
        for line, batch in [(line, batch) for line, batch in batches if batch["at"] == batch["of"]][:1]
        for measure in losses(line)
    ]
    for line, batch, measure in last:
        if _MEAN.match(line, measure.end):
            yield _mean(measure, _pattern(line, batch, measure), form, line, first)
    for line in [line for line in lines if _BEHIND.match(line)][:1]:
        for measure in losses(line):
            name = re.escape(line[measure.begin : measure.at].strip())
            yield _mean(measure, rf"^\s*\*\s.*?(?<![\w/]){name}\s+(?P<loss>[-+.\w]+)", form, line, first)
    if any(measure.score > EVAL_SCORE for line in without_batches(lines) for measure in losses(line)):
        return
    for line, batch, measure in last:
        yield _mean(measure, _pattern(line, batch, measure), form, line, first)


def _mean(measure: NamedNumber, text: str, form: str, example: str, first: str) -> MeanOfBatches:
    return MeanOfBatches(measure, {"kind": "regex", "eval": text, "progress": form}, example, first)


def _pattern(line: str, batch: re.Match[str], measure: NamedNumber) -> str:
    """A pattern for the line of the last batch: its number is that of all, and the mean stands in brackets."""
    head = re.escape(batch["split"] + batch["between"].rstrip()).replace(r"\ ", " ")
    name = re.escape(line[measure.begin : measure.at].rstrip())
    value = r"(?P<loss>[-+.\w]+)"
    shown = rf"\S+\s+\(\s*{value}" if _MEAN.match(line, measure.end) else value
    return rf"{head}\s*\[\s*(\d+)/\1\].*?(?<![\w/]){name}\s*{shown}"
