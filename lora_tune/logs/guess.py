"""The format of a log that nobody has described: a guess, proved by reading the log with it.

Each form proposes settings of ``workload.log``; what counts is what a reader with these settings reads.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lora_tune.logs.line_forms import EVAL_SCORE, ORDER, NamedNumber, name_score, pairs, pattern, positions
from lora_tune.logs.line_meters import means, without_batches
from lora_tune.logs.line_series import (
    Series,
    Stated,
    advances,
    last_batch,
    progress_apart,
    reads,
    series_of,
    with_grouping,
)
from lora_tune.logs.line_tables import columns
from lora_tune.logs.readers import make_reader
from lora_tune.logs.run import RunLog, as_number

MAX_LINES = 20_000
"""Lines at each end of a log that are looked at."""

MAX_LINE = 1000
_TRIED = 6
"""Names of measures that are tried, the likeliest first."""

_TRAIN_LINES = 500
"""Lines that are asked which pattern for training losses fits most of them."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BAR = re.compile(r"\d%\|")
_AVERAGE = re.compile(r"(?i)(?<![a-z])(?:avg|average|mean|overall)(?![a-z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogGuess:
    """How a log seems to be read.

    Parameters
    ----------
    settings : mapping of str to str, bool
        Keys of ``workload.log``, ``kind`` among them.
    example : str
        A line of the log that is read as an eval; "" where the format is known by other signs.
    unit : str
        What the numbers of the log count: samples, step or epoch.
    is_eval : bool
        False where only something like a training loss was found.
    rising : bool
        Whether more of the measure is better.
    last_batch : bool
        Whether an eval prints its batches alone, of which the last one counts.
    run : RunLog
        What a reader with these settings reads in the log, as it is printed there.
    """

    settings: Mapping[str, Any]
    example: str = ""
    unit: str = "step"
    is_eval: bool = True
    rising: bool = False
    last_batch: bool = False
    run: RunLog = field(default_factory=RunLog)


def log_lines(log: bytes) -> list[str]:
    """The lines of a log as readers see them: carriage returns end lines, colours of a terminal are left out."""
    lines = _ESCAPES.sub("", log.decode("utf-8", "replace")).replace("\r", "\n").split("\n")
    kept = lines if len(lines) <= 2 * MAX_LINES else lines[:MAX_LINES] + lines[-MAX_LINES:]
    return [line[:MAX_LINE] for line in kept if line.strip()]


def guess(log: bytes) -> LogGuess | None:
    """The likeliest way to read a log; None where nothing in it looks like a loss. Pure."""
    lines = log_lines(log)
    for form in (_mllog, _hf_trainer, _json_lines, _tables, _means_of_batches, _last_batches, _plain_text):
        for candidate in form(lines):
            if proved := _proved(candidate, lines):
                return proved
    return None


def _proved(candidate: LogGuess, lines: Sequence[str]) -> LogGuess | None:
    """The guess with what it reads; None where it reads nothing."""
    try:
        reader = make_reader(**candidate.settings)
    except ValueError:
        return None
    reader.feed("\n".join([*lines, ""]).encode())
    run = reader.run()
    return replace(candidate, run=run) if run.evals else None


def _mllog(lines: Sequence[str]) -> Iterator[LogGuess]:
    if any(":::MLLOG" in line for line in lines):
        yield LogGuess(settings={"kind": "mllog"}, unit="samples")


def _hf_trainer(lines: Sequence[str]) -> Iterator[LogGuess]:
    example = next((line for line in lines if re.search(r"\{[^{}]*'eval_loss':[^{}]*'epoch':", line)), "")
    if example:
        yield LogGuess(settings={"kind": "hf_trainer"}, example=example.strip(), unit="epoch")


def _json_lines(lines: Sequence[str]) -> Iterator[LogGuess]:
    """Objects that state a measure and how far the run is."""
    counted: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    first: dict[tuple[str, str], float] = {}
    for line in lines:
        record = _object(line)
        numbers = {k: v for k, v in record.items() if as_number(v) is not None}
        places = sorted((ORDER.index(g), k) for k in numbers if (g := _unit(k)))
        for name in numbers:
            if places and name_score(_words(name)):
                key = (name, places[0][1])
                counted[key] += 1
                examples.setdefault(key, line.strip())
                first.setdefault(key, float(as_number(numbers[key[1]]) or 0))
    ranked = sorted(counted, key=lambda key: (-name_score(_words(key[0])), -counted[key]))
    for loss, place in ranked:
        unit = _unit(place)
        settings: dict[str, Any] = {"kind": "jsonl", "loss": loss, unit: place}
        train = next((name for name, at in ranked if at == place and _trains(name, loss)), None)
        if train:
            settings["train_loss"] = train
        if unit == "epoch" and not first[loss, place]:
            settings["from_zero"] = True
        yield LogGuess(
            settings=settings,
            example=examples[loss, place],
            unit=unit,
            is_eval=name_score(_words(loss)) > 8,
            rising=not NamedNumber(loss, "", 0, 0, 0).falls,
        )


def _object(line: str) -> dict[str, Any]:
    text = line.strip()
    if not text.startswith("{"):
        return {}
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _words(name: str) -> list[str]:
    return NamedNumber(name, "", 0, 0, 0).words


def _unit(name: str) -> str:
    return NamedNumber(name, "", 0, 0, 0).progress


def _trains(name: str, loss: str) -> bool:
    """Whether a name is of the training loss, beside the eval's."""
    return name != loss and NamedNumber(name, "", 0, 0, 0).trains and name_score(_words(loss)) > 8


def _tables(lines: Sequence[str]) -> Iterator[LogGuess]:
    """A header with the names of columns, and rows below it."""
    for name, unit, settings, example in columns(lines):
        yield LogGuess(
            settings=settings,
            example=example,
            unit=unit,
            is_eval=name_score(_words(name)) > 8,
            rising=not NamedNumber(name, "", 0, 0, 0).falls,
        )


def _means_of_batches(lines: Sequence[str]) -> Iterator[LogGuess]:
    """Evals that print each batch and the mean so far."""
    for mean in means(lines):
        yield LogGuess(
            settings={**mean.settings, **_counts_from_zero("epoch", mean.first)},
            example=mean.example,
            unit="epoch",
            rising=not mean.measure.falls,
        )


def _stated(lines: Sequence[str]) -> Stated:
    return with_grouping([(line, [*(p for p in pairs(line) if not p.progress), *positions(line)]) for line in lines])


def _measures(stated: Stated) -> list[tuple[int, str, list[int]]]:
    """(score, name, the rows where it stands) of each measure, the likeliest first."""
    named: dict[tuple[int, str], list[int]] = {}
    for at, (_, numbers) in enumerate(stated):
        for pair in numbers:
            if pair.score and not pair.progress:
                named.setdefault((pair.score, " ".join(pair.words)), []).append(at)
    ranked = sorted(named, key=lambda known: (-known[0], -len(named[known])))
    return [(*known, named[known]) for known in ranked[:_TRIED]]


def _last_batches(lines: Sequence[str]) -> Iterator[LogGuess]:
    """Evals that print their batches alone, each with its epoch: the last one comes nearest to the eval's result."""
    stated = _stated(lines)
    for whole, name, rows in _measures(stated):
        if whole <= EVAL_SCORE or (found := last_batch(stated, rows)) is None:
            continue
        row, batch = found
        line, numbers = stated[row]
        loss = next(p for p in numbers if " ".join(p.words) == name)
        place = next((p for p in numbers if p.progress == "epoch"), None)
        if place is None or not place.end <= batch.begin < batch.end <= loss.begin:
            continue
        said = max(batch.begin, loss.split_at + len(loss.split)) if loss.split_at < batch.at else batch.begin
        text = pattern(line, loss, place, rf".*?{re.escape(line[said : batch.end])}(?!\d).*?")
        read = series_of(text, stated)
        if advances(read, ordered=place.bracketed) and reads(text, line, loss):
            settings = {"kind": "regex", "eval": text, **_form(read, "epoch", line)}
            settings |= {"train": train} if (train := _train_pattern(stated, "epoch")) else {}
            yield LogGuess(
                settings=settings, example=line.strip(), unit="epoch", rising=not loss.falls, last_batch=True
            )


def _plain_text(lines: Sequence[str]) -> Iterator[LogGuess]:
    """Names with numbers: the likeliest measure, and what says how far the run is, on its line or on one before."""
    stated = _stated(without_batches(lines))
    for whole, name, rows in _measures(stated):
        for settings, unit, example, falls in _readings(stated, name, rows):
            train = "" if whole <= EVAL_SCORE else _train_pattern(stated, unit)
            if train:
                settings["train"] = train
            yield LogGuess(
                settings=settings, example=example.strip(), unit=unit, is_eval=whole > EVAL_SCORE, rising=not falls
            )


def _readings(stated: Stated, name: str, rows: Sequence[int]) -> Iterator[tuple[dict[str, Any], str, str, bool]]:
    """Settings that read the measure called ``name``, which stands on these rows, the likeliest first."""
    told = [row for row in rows if _AVERAGE.search(stated[row][0])] or rows
    for unit in ORDER:
        for at in (*told[:3], *told[-3:]):
            line, numbers = stated[at]
            loss = next(p for p in numbers if " ".join(p.words) == name)
            place = next((p for p in numbers if p.progress == unit and p.number[:1].isdigit()), None)
            if place is None:
                continue
            for between in (*_average(line, place, loss), ".*?", ".*"):
                text = pattern(line, loss, place, between)
                read = series_of(text, stated)
                if advances(read, ordered=place.bracketed) and reads(text, line, loss):
                    yield {"kind": "regex", "eval": text, **_form(read, unit, line)}, unit, line, loss.falls
    for unit in ORDER:
        if (apart := progress_apart(stated, unit, rows)) is not None:
            line, numbers = stated[rows[-1]]
            loss = next(p for p in numbers if " ".join(p.words) == name)
            progress = pattern(apart.line, None, apart.place)
            settings = {"kind": "regex", "eval": pattern(line, loss, None), "progress": progress}
            yield settings | _counts_from_zero(unit, apart.place.number), unit, line, loss.falls


def _average(line: str, place: NamedNumber, loss: NamedNumber) -> list[str]:
    """What stands between progress and measure where a word there says that it is the mean of an eval's batches."""
    word = _AVERAGE.search(line, place.end, max(place.end, loss.begin))
    return [f".*?{word[0]}.*?"] if word else []


def _form(series: Series, unit: str, line: str) -> dict[str, Any]:
    """What a series says of how the script counts and repeats itself."""
    settings: dict[str, Any] = _counts_from_zero(unit, f"{series[0][0]:g}")
    if _BAR.search(line) and len(series) > len({loss for _, loss in series}):
        settings["repeated"] = True
    return settings


def _counts_from_zero(unit: str, first: str) -> dict[str, Any]:
    return {"from_zero": True} if unit == "epoch" and as_number(first) == 0 else {}


def _train_pattern(stated: Stated, unit: str) -> str:
    """The pattern for training losses in the same unit that most lines match; "" where none is printed."""
    patterns = dict.fromkeys(
        pattern(line, loss, place)
        for line, pairs_ in stated[:_TRAIN_LINES]
        for loss in pairs_
        for place in pairs_
        if loss.trains and place.progress == unit
    )
    counted = {text: len(series_of(text, stated[:_TRAIN_LINES])) for text in [*patterns][:_TRIED]}
    return max(counted, key=lambda text: counted[text], default="")
