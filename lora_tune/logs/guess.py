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

from lora_tune.logs import guess_tables, line_forms
from lora_tune.logs.guess_tables import (
    Stated,
    advances,
    columns,
    counting,
    counts_from_zero,
    measures,
    progress_apart,
    reads,
    series_of,
    stated_in,
    train_pattern,
)
from lora_tune.logs.line_forms import (
    EVAL_SCORE,
    ORDER,
    NamedNumber,
    losses,
    name_score,
    of_test_set,
    other_sets,
    pattern,
    with_points,
)
from lora_tune.logs.lines import cut, make_reader, plain
from lora_tune.logs.run import RunLog, as_number
from lora_tune.logs.trainer_lines import rows_of

MAX_LINES = 20_000
"""Lines at each end of a log that are looked at."""

MAX_LINE = 1000

_UNREAD_SHOWN = 4
"""Forms of lines that are shown because the pattern does not read them."""


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
    names_batch : bool
        Whether the pattern finds that batch by its number, which is another where evals have more or fewer of them.
    other_sets : tuple of str
        Names under which the same measure of other sets is printed, or a line of them; this guess reads none.
    run : RunLog
        What a reader with these settings reads in the log, as it is printed there.
    """

    settings: Mapping[str, Any]
    example: str = ""
    unit: str = "step"
    is_eval: bool = True
    rising: bool = False
    last_batch: bool = False
    names_batch: bool = False
    other_sets: tuple[str, ...] = ()
    run: RunLog = field(default_factory=RunLog)

    @property
    def metric(self) -> str:
        """What ``objective.metric`` calls the evals: their key, or the group of a pattern."""
        if self.settings["kind"] == "hf_trainer":
            return str(self.settings.get("metric", "eval_loss"))
        if self.rising and "eval" in self.settings:
            before = re.sub(r"\\[sbdwW][*+?]*|\.\*\??", " ", self.settings["eval"].partition("(?P<loss>")[0])
            name = (re.findall(r"[A-Za-z][\w/^-]*", before.replace("\\", "")) or [""])[-1]
            if name and re.search(rf"(?<![\w/]){re.escape(name)}(?![\w/])", self.example):
                return str(name)
        return str(self.settings.get("loss", "loss"))


def log_lines(log: bytes) -> list[str]:
    """The lines of a log as readers see them: carriage returns end lines, colours of a terminal are left out."""
    lines = cut(log)
    kept = lines if len(lines) <= 2 * MAX_LINES else lines[:MAX_LINES] + lines[-MAX_LINES:]
    return [line[:MAX_LINE] for line in map(plain, kept) if line.strip()]


def guess(log: bytes) -> LogGuess | None:
    """The likeliest way to read a log; None where nothing in it looks like a loss. Pure."""
    lines = log_lines(log)
    if line_forms.in_use(lines) and (guessed := _guess([*map(with_points, lines)])):
        proved = _proved(replace(guessed, settings={**guessed.settings, "decimal_comma": True}), lines)
        return proved and replace(proved, example=_as_printed(guessed.example, lines))
    return _guess(lines)


def _as_printed(example: str, lines: Sequence[str]) -> str:
    return next((line.strip() for line in lines if with_points(line).strip() == example), example)


_SUMMARIES = re.compile(r"^\s*(?:wandb|COMET INFO):\s")
"""What a tracker prints of a run behind its end: no eval of its own."""


def _guess(lines: Sequence[str]) -> LogGuess | None:
    own = [line for line in lines if not _SUMMARIES.match(line)]
    return _guess_of(own) or (_guess_of(lines) if len(own) < len(lines) else None)


def _guess_of(lines: Sequence[str]) -> LogGuess | None:
    for form in (_mllog, _hf_trainer, _json_lines, _trainer_lines, _tables, _batches, _plain_text):
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
        return
    sets: dict[str, str] = {}  # of a dict of eval sets, which has no eval_loss
    for line in lines:
        for key in re.findall(r"'(eval_\w+_loss)':(?=[^{}]*'epoch':)", line):
            sets.setdefault(key, line.strip())
    if sets:
        first, *others = sets
        settings = {"kind": "hf_trainer", "metric": first}
        names = tuple(name.replace("_", " ") for name in others)
        yield LogGuess(settings=settings, example=sets[first], unit="epoch", other_sets=names)


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
    judged = any(name_score(_words(key[0])) > EVAL_SCORE and not of_test_set(_words(key[0])) for key in counted)
    last = {key: judged and of_test_set(_words(key[0])) for key in counted}
    ranked = sorted(counted, key=lambda key: (last[key], -name_score(_words(key[0])), -counted[key]))
    names = {" ".join(_words(name)): name for name, _ in ranked}
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
            is_eval=name_score(_words(loss)) > EVAL_SCORE,
            other_sets=tuple(names[n] for n in other_sets(" ".join(_words(loss)), names)),
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
    return name != loss and NamedNumber(name, "", 0, 0, 0).trains and name_score(_words(loss)) > EVAL_SCORE


def _trainer_lines(lines: Sequence[str]) -> Iterator[LogGuess]:
    """Lines of trainers that are known by a sign."""
    states_evals: bool | None = None
    for row, example in rows_of(lines):
        if not row.is_eval:
            if states_evals is None:
                states_evals = any(loss.score > EVAL_SCORE for line in lines for loss in losses(line))
            if states_evals:
                continue
        settings = {"kind": "regex", **row.settings}
        yield LogGuess(settings=settings, example=example, unit=row.unit, is_eval=row.is_eval, rising=row.rising)


def _tables(lines: Sequence[str]) -> Iterator[LogGuess]:
    """A header with the names of columns, and rows below it."""
    for column in columns(lines):
        yield LogGuess(
            settings=column.settings,
            example=column.example,
            unit=column.unit,
            is_eval=column.is_eval,
            rising=column.rising,
        )


def _batches(lines: Sequence[str]) -> Iterator[LogGuess]:
    """Evals that print their batches."""
    for reading in guess_tables.readings(lines):
        yield LogGuess(
            settings=reading.settings,
            example=reading.example,
            unit="epoch",
            rising=reading.rising,
            last_batch=reading.alone,
            names_batch=reading.named,
        )


def _plain_text(lines: Sequence[str]) -> Iterator[LogGuess]:
    """Names with numbers: the likeliest measure, and what says how far the run is, on its line or on one before."""
    stated = stated_in(guess_tables.without_batches(lines))
    ranked = measures(stated)
    for whole, name, rows in ranked:
        others = other_sets(name, [other for _, other, _ in ranked])
        for settings, unit, example, falls in _readings(stated, name, rows):
            train = "" if whole <= EVAL_SCORE else train_pattern(stated, unit)
            if train:
                settings["train"] = train
            yield LogGuess(
                settings=settings, example=example.strip(), unit=unit, rising=not falls,
                is_eval=whole > EVAL_SCORE or _of_episodes(name, example),
                other_sets=others or _unread(settings["eval"], [stated[row][0] for row in rows]),
            )  # fmt: skip


def _of_episodes(name: str, line: str) -> bool:
    """Whether a measure is what a policy earned in its episodes: there is no other eval of it."""
    return bool({"reward", "rew", "return", "returns"} & {*name.split()}) and _EPISODES.search(line) is not None


_EPISODES = re.compile(r"(?i)episod|timesteps|\bep_|env_?steps|global_step")


def _unread(text: str, lines: Sequence[str]) -> tuple[str, ...]:
    """The last line of each form that the pattern does not match, where most lines are such; they state one measure."""
    unread = [line.strip() for line in lines if not re.search(text, line)]
    forms = {re.sub(r"\([^)]*\)\s*|\d[\d.e+-]*", "", line.lower()): line[:80] for line in unread}
    return tuple(forms.values())[:_UNREAD_SHOWN] if 2 * len(unread) > len(lines) else ()


def _same_measure(text: str, stated: Stated, name: str) -> bool:
    """Whether a pattern reads the measure called ``name`` wherever it matches."""
    for line, numbers in stated:
        match = re.search(text, line)
        if match and not any(p.at == match.start("loss") and " ".join(p.words) == name for p in numbers):
            return False
    return True


def _readings(stated: Stated, name: str, rows: Sequence[int]) -> Iterator[tuple[dict[str, Any], str, str, bool]]:
    """Settings that read the measure called ``name``, which stands on these rows, the likeliest first."""
    few: list[tuple[int, tuple[dict[str, Any], str, str, bool]]] = []  # what most of these rows do not match
    averages = [row for row in rows if guess_tables.states_average(stated[row][0])] or rows
    for unit in ORDER:
        for at in (*averages[:3], *averages[-3:]):
            line, numbers = stated[at]
            loss = next(p for p in numbers if " ".join(p.words) == name)
            place = next((p for p in numbers if p.progress == unit and p.number[:1].isdigit()), None)
            if place is None:
                continue
            for between in (*guess_tables.average_between(line, place, loss), ".*?", ".*"):
                text = pattern(line, loss, place, between)
                read = series_of(text, stated)
                wide = pattern(line, loss, place, between, wide=True)  # of an eval before training, which says more
                if len(also := series_of(wide, stated)) > len(read) and _same_measure(wide, stated, name):
                    text, read = wide, also
                own = not loss.heading or _same_measure(text, stated, name)
                if advances(read, ordered=place.bracketed) and reads(text, line, loss) and own:
                    settings = {"kind": "regex", "eval": text, **counting(read, unit, line)}
                    if 2 * len(read) >= len(rows):
                        yield settings, unit, line, loss.falls
                    else:
                        few.append((len(read), (settings, unit, line, loss.falls)))
    yield from (reading for _, reading in sorted(few, key=lambda known: -known[0]))
    for unit in ORDER:
        if (apart := progress_apart(stated, unit, rows)) is not None:
            line, numbers = stated[rows[-1]]
            loss = next(p for p in numbers if " ".join(p.words) == name)
            text = pattern(line, loss, None)
            if loss.heading and not _same_measure(text, stated, name):
                continue
            settings = {"kind": "regex", "eval": text, "progress": pattern(apart.line, None, apart.place)}
            yield settings | counts_from_zero(unit, apart.place.number), unit, line, loss.falls
