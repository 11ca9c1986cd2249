"""Guesses the format of an unknown log, and proves the guess by reading the log with it.

Lines become tokens, and tokens of one name a series. The series that looks most like an eval's is read with a counter
that advances at its lines.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from lora_tune.logs.lines import cut, make_reader, plain
from lora_tune.logs.readers import of_counted_batch
from lora_tune.logs.run import RunLog, as_count, as_number
from lora_tune.logs.tokens import (
    EVAL_SCORE,
    MEAN,
    ORDER,
    Token,
    Tokens,
    batch_of,
    decimal_points,
    in_use,
    of_an_eval,
    of_test_set,
    other_sets,
    terms_of,
    unit_of,
)

MAX_LINES = 20_000
"""Lines examined at each end of a log."""

MAX_LINE = 1000

_TRIED = 12
"""Maximum names of metrics that are tried, the likeliest first."""

_REPEATS = 3
"""Lines per distinct eval from which on a progress line counts as repeating evals; a plateau has fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogGuess:
    """A guessed format of a log.

    Parameters
    ----------
    settings : mapping of str to str, bool
        Keys of ``workload.log``, including ``kind``.
    example : str
        A log line that is read as an eval; "" if the format was recognised otherwise.
    unit : str
        Unit of progress in the log: samples, step or epoch.
    is_eval : bool
        False if only something like a training loss was found.
    rising : bool
        Whether the metric is maximised.
    by_trend : bool
        Whether ``rising`` follows from the log only: the name is of no known metric, and a loss on the same line is.
    last_batch : bool
        Whether an eval prints only its batches, of which the last one counts.
    names_batch : bool
        Whether the pattern finds that batch by its number, which changes with the number of batches per eval.
    other_sets : tuple of str
        Names, or a line, of the same metric on other data sets, which this guess does not read.
    run : RunLog
        The run that a reader with these settings reads, with numbers as printed.
    """

    settings: Mapping[str, Any]
    example: str = ""
    unit: str = "step"
    is_eval: bool = True
    rising: bool = False
    by_trend: bool = False
    last_batch: bool = False
    names_batch: bool = False
    other_sets: tuple[str, ...] = ()
    run: RunLog = field(default_factory=RunLog)

    @property
    def metric(self) -> str:
        """Name of the evals' metric for ``objective.metric``."""
        default = "eval_loss" if self.settings["kind"] == "hf_trainer" else "loss"
        return str(self.settings.get("metric", self.settings.get("loss", default)))


def log_lines(log: bytes) -> list[str]:
    """The lines of a log as readers see them: carriage returns end lines, terminal colours are removed."""
    lines = cut(log)
    kept = lines if len(lines) <= 2 * MAX_LINES else lines[:MAX_LINES] + lines[-MAX_LINES:]
    return [line[:MAX_LINE] for line in map(plain, kept) if line.strip()]


def guess(log: bytes) -> LogGuess | None:
    """The likeliest format of a log; None if nothing looks like a loss. Pure."""
    lines = log_lines(log)
    if in_use(lines) and (guessed := _guess([*map(decimal_points, lines)])):
        proved = _proved(replace(guessed, settings={**guessed.settings, "decimal_comma": True}), lines)
        return proved and replace(proved, example=_as_printed(guessed.example, lines))
    return _guess(lines)


def _as_printed(example: str, lines: Sequence[str]) -> str:
    return next((line.strip() for line in lines if decimal_points(line).strip() == example), example)


_SUMMARIES = re.compile(r"^\s*(?:wandb|COMET INFO):\s")
"""Summary of a run that a tracker prints after its end: no eval."""


def _guess(lines: Sequence[str]) -> LogGuess | None:
    prefix = [line for line in lines if not _SUMMARIES.match(line)]
    return _guess_of(prefix) or (_guess_of(lines) if len(prefix) < len(lines) else None)


def _guess_of(lines: Sequence[str]) -> LogGuess | None:
    if any(":::MLLOG" in line for line in lines):
        return _proved(LogGuess(settings={"kind": "mllog"}, unit="samples"), lines)
    return next(filter(None, (_proved(candidate, lines) for candidate in _candidates(lines))), None)


def _proved(candidate: LogGuess, lines: Sequence[str]) -> LogGuess | None:
    """The guess with the run that it reads; None if it reads no evals."""
    try:
        reader = make_reader(**candidate.settings)
    except ValueError:
        return None
    reader.feed("\n".join([*lines, ""]).encode())
    run = reader.run()
    return replace(candidate, run=run) if run.evals else None


class _Point(NamedTuple):
    """A metric in a log row, with the row's line and tokens."""

    row: int
    token: Token
    line: str
    tokens: list[Token]


Series = Sequence[_Point]


def _candidates(lines: Sequence[str]) -> Iterator[LogGuess]:
    """Each metric, the likeliest first, with each progress counter that advances with it."""
    named, counters = _series(lines)
    judged = any(
        p[0].token.score > EVAL_SCORE and not (of_test_set(n.split()) or p[0].token.heading) for n, p in named.items()
    )
    ranked = sorted(named, key=lambda name: _rank(name, named, judged=judged))[:_TRIED]
    for name in ranked:
        points, batches = _of_batches(named[name])
        if not points or _is_headed_by_chance(points, named):
            continue
        for counter in _counters(points, counters):
            yield _described(points, counter, batches, ranked, named)


def _series(lines: Sequence[str]) -> tuple[dict[str, list[_Point]], dict[tuple[str, str], list[tuple[int, str]]]]:
    """The metrics of a log by name, and its counters by unit and name."""
    named: dict[str, list[_Point]] = {}
    counters: dict[tuple[str, str], list[tuple[int, str]]] = {}
    reads = Tokens()
    for row, line in enumerate(lines):
        record = _object(line)
        tokens = [*_keys(record)] if record else reads.of(line)
        for token in tokens:
            if token.unit:
                counters.setdefault((token.unit, token.name), []).append((row, token.number))
            elif token.score:
                named.setdefault(token.name, []).append(_Point(row, token, line, tokens))
    return named, counters


def _object(line: str) -> dict[str, Any]:
    """The object of a JSON line; empty for others."""
    text = line.strip()
    if not text.startswith("{"):
        return {}
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _keys(record: Mapping[str, Any]) -> Iterator[Token]:
    """The tokens of a JSON object."""
    for key, value in record.items():
        if as_number(value) is not None:
            yield Token(terms_of(key), str(value), unit_of(terms_of(key)), key)


def _rank(name: str, named: Mapping[str, Series], *, judged: bool) -> tuple[Any, ...]:
    """Sort key, likeliest eval series first: a test set last if there are other sets, a mean before a single value, a
    total before its parts, and a name with its data set before one that takes it from another word of the line."""
    score, terms = max(point.token.score for point in named[name]), {*name.split()}
    part = any({*other.split()} < terms and named[other][0].token.score == score for other in named)
    borrowed = not of_an_eval(named[name][0].token.raw)
    return (judged and of_test_set(terms), -score - ("avg" in terms), part, borrowed, -len(named[name]))


def _of_batches(points: Series) -> tuple[Series, str]:
    """The points with an eval's result if evals print their batches, and the setting that reads only these."""
    runs: list[list[_Point]] = []
    for point in points:
        if runs and point.row == runs[-1][-1].row + 1:
            runs[-1].append(point)
        else:
            runs.append([point])
    if max(map(len, runs)) < 2:
        return points, ""
    counts = [batch_of(point.line) for point in points]
    if any(counts) and not any(
        t.unit and not t.nameless for p, c in zip(points, counts, strict=True) if c for t in p.tokens
    ):
        whole = [point for point, count in zip(points, counts, strict=True) if count is None]
        last = [point for point, count in zip(points, counts, strict=True) if count and count[0] == count[1]]
        return (whole, "none") if whole else (last, "last")
    if len(runs) > 1 and min(map(len, runs)) > 1:
        for token in (t for t in runs[0][-1].tokens if t.unit == "step" and not t.nameless):
            batches = [[_count(point, token.unit, token.name) or 0.0 for point in run] for run in runs]
            rising = all(before < after for run in batches for before, after in pairwise(run))
            if rising and len({run[-1] for run in batches}) == 1:
                setting = f"{token.name} {token.number}"
                return [p for p in points if of_counted_batch(p.line, p.tokens, setting)], setting
    return points, ""


def _count(point: _Point, unit: str, name: str) -> float | None:
    return next((as_count(t.number) for t in point.tokens if (t.unit, t.name) == (unit, name)), None)


def _is_headed_by_chance(points: Series, named: Mapping[str, Series]) -> bool:
    """Whether a heading turned lines into evals that also occur without it."""
    if not points[0].token.heading:
        return False
    shapes = {re.sub(r"\d+", "", point.line) for point in points}
    plain = named.get(" ".join(points[0].token.terms[1:]), ())
    return any(re.sub(r"\d+", "", point.line) in shapes for point in plain)


class _Counter(NamedTuple):
    """A progress counter. progress: at each eval. below: it is printed after the evals."""

    unit: str
    name: str
    progress: list[float]
    below: bool = False


def _counters(points: Series, counters: Mapping[tuple[str, str], Sequence[tuple[int, str]]]) -> Iterator[_Counter]:
    """The counters that advance with the evals: those on most of their lines first, then finest first."""
    order = sorted(counters, key=lambda known: (ORDER.index(known[0]), "step" not in known[1], known[1] == "count"))
    beside = []
    for unit, name in order:
        counts = [_count(point, unit, name) for point in points]
        if 2 * sum(count is not None for count in counts) >= len(points):
            nameless = any(t.nameless for p in points for t in p.tokens if t.name == name)
            beside.append((unit, name))
            counted = [
                (progress, p.token.number) for progress, p in zip(counts, points, strict=True) if progress is not None
            ]
            if _advances(counted, ordered=nameless):
                yield _Counter(unit, name, [count for count, _ in counted])
    for unit, name in order:
        if (unit, name) not in beside and (counter := _apart(points, unit, name, counters[unit, name])):
            yield counter


def _apart(points: Series, unit: str, name: str, counts: Sequence[tuple[int, str]]) -> _Counter | None:
    """A counter on separate lines, above the evals or below them; None if it does not distinguish the evals."""
    rows, numbers = [row for row, _ in counts], [as_count(number) or 0.0 for _, number in counts]
    single = len(points) == 1 and (len(numbers) == 1 or unit == "epoch")
    if not (numbers[0] != numbers[-1] or single) or not _goes_on(numbers):
        return None
    before = [bisect_left(rows, point.row) for point in points]
    gaps = {rows[at] - point.row for at, point in zip(before, points, strict=True) if at < len(rows)}
    below = before[0] == 0 and before[-1] < len(rows) and len({*before}) == len(points) == len(rows) and len(gaps) == 1
    if name == "count" and len({*before}) != len(rows):
        return None
    distinct = len({numbers[at - 1] if at else 0.0 for at in {*before}})
    if not below and (distinct < min(2, len({*before})) or 2 * distinct < len({*before})):
        return None
    return _Counter(unit, name, [numbers[at if below else at - 1] if at or below else 0.0 for at in before], below)


def _advances(series: Sequence[tuple[float, str]], *, ordered: bool) -> bool:
    """Whether a counter advances when different losses are stated.

    ordered: it must never decrease, unlike the numbers of several ranks.
    """
    if not _goes_on([progress for progress, _ in series], ordered=ordered):
        return False
    return len({progress for progress, _ in series}) > 1 or len({loss for _, loss in series}) == 1


def _goes_on(counts: Sequence[float], *, ordered: bool = False) -> bool:
    """Whether numbers increase, with occasional restarts unless ``ordered``."""
    back = sum(after < before for before, after in pairwise(counts))
    return len(counts) > 0 and not (back and (ordered or 4 * back > len(counts)))


def _described(
    points: Series, counter: _Counter, batches: str, ranked: Sequence[str], named: Mapping[str, Series]
) -> LogGuess:
    """The guess that reads these points with this counter."""
    token, name = points[0].token, points[0].token.name
    is_eval = token.score > EVAL_SCORE or _of_episodes(points[0])
    trains = [n for n in named if n != name and is_eval and named[n][0].token.trains]
    train = max(trains, key=lambda n: len(named[n]), default="")
    place = next((t for p in points for t in p.tokens if (t.unit, t.name) == (counter.unit, counter.name)), None)
    others = other_sets(name, ranked)
    by_trend = token.bare and any("loss" in t.terms for t in points[0].tokens)
    rising = (as_number(points[-1].token.number) or 0) > (as_number(token.number) or 0) if by_trend else not token.falls
    example = points[-1 if counter.progress[0] != counter.progress[-1] and place is None else 0].line.strip()
    settings: dict[str, Any]
    if re.search(r"\{[^{}]*'eval_\w*':[^{}]*'epoch':", points[0].line) and token.raw.startswith("eval_"):
        more = {} if token.raw == "eval_loss" else {"metric": token.raw}
        settings, unit = {"kind": "hf_trainer", **more}, "epoch"
    elif place is not None and all(_object(point.line) for point in points):
        unit = counter.unit
        settings = {"kind": "jsonl", "loss": token.raw, unit: place.raw}
        settings |= {"train_loss": named[train][0].token.raw} if train else {}
        others = tuple(named[n][0].token.raw for n in others)
    else:
        unit = counter.unit
        settings = {
            "kind": "named",
            "loss": token.spelling,
            unit: counter.name,
        }
        settings |= {"train_loss": train} if train else {}
        settings |= {"below": True} if counter.below else {}
        settings |= {"batches": batches} if batches else {}
        settings |= {"repeated": True} if _repeats(points) else {}
    if (
        unit == "epoch"
        and settings["kind"] != "hf_trainer"
        and not counter.progress[0]
        and (place or len(counter.progress) > 1)
    ):
        settings["from_zero"] = True
    return LogGuess(
        settings=settings, example=example, unit=unit, is_eval=is_eval, rising=rising, by_trend=by_trend,
        other_sets=others, last_batch=batches not in ("", "none") and not MEAN.search(points[0].line),
        names_batch=batches not in ("", "none", "last"),
    )  # fmt: skip


def _of_episodes(point: _Point) -> bool:
    """Whether a metric is a policy's reward per episode, which has no separate eval."""
    return (
        bool({"reward", "rew", "return", "returns"} & {*point.token.terms}) and _EPISODES.search(point.line) is not None
    )


_EPISODES = re.compile(r"(?i)episod|epret|timesteps|\bep_|env_?steps|global_step")
_PROGRESS_BAR = re.compile(r"\d%\|")


def _repeats(points: Series) -> bool:
    """Whether a progress line repeats the last eval until the next one: together with another loss, several times."""
    losses = [point.token.number for point in points]
    if len(losses) == len({*losses}):
        return False
    changes = 1 + sum(before != after for before, after in pairwise(losses))
    others = sum(t.score > 0 for t in points[0].tokens)
    return _PROGRESS_BAR.search(points[0].line) is not None or (
        others > 1 and changes > 1 and len(points) >= _REPEATS * changes
    )
