"""Readers of formats other than MLLOG: Trainer output, JSON lines, and lines of any form by names or patterns."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Container, Mapping
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]  # the only way to know how patterns nest
from typing import Any

from lora_tune.base.host import steady_epoch
from lora_tune.logs.lines import FACTS, FORM, NUMBER, SCALES, Clock, LineReader, ReaderKind, scaled_samples
from lora_tune.logs.run import as_number
from lora_tune.logs.tokens import ORDER, Numbers, Token, Tokens, batch_of, terms_of


class ScaledReader(LineReader):
    """Reads lines that count samples, steps or epochs.

    global_batch_size converts steps, and samples_per_epoch epochs, to samples. from_zero: the first epoch and step are
    numbered 0, so one is added. repeated: lines repeat the last eval until the next one, as progress bars do, so only a
    changed loss is an eval. decimal_comma: numbers are printed as ``0,925`` and ``1.200``.
    """

    def __init__(
        self,
        clock: Clock,
        global_batch_size: float = 1.0,
        samples_per_epoch: float = 1.0,
        from_zero: bool = False,
        repeated: bool = False,
        decimal_comma: bool = False,
    ) -> None:
        super().__init__(clock)
        self._scale = {"samples": 1.0, "step": global_batch_size, "epoch": samples_per_epoch}
        self._first, self.repeated, self.decimal_comma = 0 if from_zero else 1, repeated, decimal_comma

    def samples_of(self, facts: Mapping[str, object]) -> float | None:
        """Samples from the first of samples, step and epoch that is a number; None without any."""
        return scaled_samples(facts, self._scale, first=self._first)


def _counts(settings: Mapping[str, Any], names: Container[str]) -> str:
    """The unit of progress for the settings and counter names; steps need the batch size to become samples."""
    for name, scale in (("step", "global_batch_size"), ("epoch", "samples_per_epoch")):
        if name in names and "samples" not in names and scale not in settings:
            return f"{name}s"
    return "samples"


def _apart(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Split the settings into those of :class:`ScaledReader` and the others."""
    scales = {name: value for name, value in settings.items() if name in {**SCALES, **FORM}}
    return scales, {name: value for name, value in settings.items() if name not in scales}


class HfTrainerReader(LineReader):
    """Output of transformers' Trainer, one Python dict per line.

    ``{'loss': 1.2, 'learning_rate': 0.0001, 'epoch': 0.04}``, ``{'eval_loss': 0.93, 'eval_runtime': 4.1, 'epoch':
    0.5}``, and at the end ``{'train_runtime': 2577.75, 'train_samples_per_second': 95.339, 'train_loss': 1.0156,
    'epoch': 0.9}``, which becomes ``run_stop`` and the run's throughput.

    samples_per_epoch: samples in the training set, as the dicts count in epochs. Without it, samples are epochs.
    metric: the key of the evals' values, such as ``eval_accuracy``.

    The run starts at ``***** Running training *****`` if that is printed.
    """

    def __init__(self, clock: Clock = steady_epoch, samples_per_epoch: float = 1.0, metric: str = "eval_loss") -> None:
        super().__init__(clock)
        if metric in ("loss", "train_loss"):
            raise ValueError(f"{metric!r} is the training loss of these prints; name an eval's key, such as eval_loss")
        self._samples_per_epoch, self._metric = samples_per_epoch, metric
        self._logged = re.compile(rf"'(?:loss|train_runtime|{re.escape(metric)})':")

    def line(self, text: str, now: int) -> bool:
        builder = self.run_builder
        if "***** Running training *****" in text and not builder.train and not builder.evals:
            builder.run_start = now
        entry = next((one[0] for one in _DICT.finditer(text) if self._logged.search(one[0])), None)
        if entry is None:
            return True
        logged = _literal(entry)
        if logged is None:
            return False
        epoch = as_number(logged.get("epoch"))
        samples = None if epoch is None else epoch * self._samples_per_epoch
        if "train_runtime" in logged:
            if builder.run_stop is None:
                builder.run_stop = now
            speed = as_number(logged.get("train_samples_per_second"))
            if speed is not None:
                builder.add_stated(now, speed, False)
                builder.overall = speed
            return True
        names = {"loss": "train_loss", "eval_runtime": "eval_seconds", self._metric: "loss"}
        return self.take_fields({names[key]: logged[key] for key in names if key in logged}, now, samples)


_DICT = re.compile(r"\{'[^{}\\]*\}")
_FLAT = re.compile(
    r"\{(?:'[^'\\]*': (?:'[^'\\]*'|-?\d[\d.]*(?:[eE][-+]?\d+)?|-?nan|-?inf|None|True|False)(?:, (?=')|(?=\})))+\}"
)
_NOT_A_LITERAL = re.compile(r"(?<=: )(-?(?:nan|inf))(?=[,}])")


def _literal(text: str) -> dict[str, object] | None:
    """Parse a flat Python dict of plain values; None for anything else, without parsing it."""
    if not _FLAT.fullmatch(text):
        return None
    try:
        value = ast.literal_eval(_NOT_A_LITERAL.sub(r"'\1'", text))
    except (ValueError, SyntaxError):  # e.g. for the number 1.2.3
        return None
    return value if isinstance(value, dict) else None


HF_TRAINER = ReaderKind(
    make=HfTrainerReader,
    settings={"samples_per_epoch": NUMBER, "metric": str},
    metric="metric",
    counts=lambda settings: "samples" if "samples_per_epoch" in settings else "epochs",
)
"""``workload.log.kind = "hf_trainer"``."""


class JsonLinesReader(ScaledReader):
    """One JSON object per line; lines without a leading ``{`` are ignored.

    Each setting is the objects' key for that value: ``loss`` (of an eval), ``train_loss``, ``samples`` or ``step`` or
    ``epoch``, ``seconds`` since the start of the run (without it, arrival times), ``eval_seconds``, ``throughput`` in
    samples/s.
    """

    def __init__(
        self,
        clock: Clock = steady_epoch,
        *,
        loss: str = "eval_loss",
        **settings: Any,
    ) -> None:
        scales, names = _apart(settings)
        super().__init__(clock, **scales)
        if names.get("train_loss") == loss:
            raise ValueError(f"loss and train_loss are both {loss!r}; loss is the key of an eval's")
        self._names = {name: names.get(name, name) for name in FACTS} | {"loss": loss}

    def line(self, text: str, now: int) -> bool:
        text = text.lstrip()
        if not text.startswith("{"):
            return True
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            return False
        fields = {fact: record[name] for fact, name in self._names.items() if record.get(name) is not None}
        return self.take_fields(fields, now, self.samples_of(fields))


JSONL = ReaderKind(
    make=JsonLinesReader,
    settings={**SCALES, **FORM, "loss": str, **dict.fromkeys(FACTS, str)},
    metric="loss",
    counts=lambda settings: _counts(settings, settings),
)
"""``workload.log.kind = "jsonl"``."""


class NamedReader(ScaledReader):
    """Lines of any form, by the names of their numbers.

    A name is written as words: ``val loss`` matches ``val_loss=``, ``Val Loss:``, ``vloss``, ``loss: 2.3`` below ``===
    validation ===`` or after ``val |``, and a table column.

    loss: name of the eval metric. train_loss: name of the training loss. samples, step or epoch: name of the progress
    counter, on the same line or on the last one before (0 before the first). below: the counter is on a line below the
    eval's. batches: evals print their batches as ``Test: [ 3/78]``; "last" reads only the last one, "none" the line
    after them, "iter 30" those with this count.
    """

    def __init__(
        self,
        clock: Clock = steady_epoch,
        *,
        loss: str = "val loss",
        train_loss: str = "",
        batches: str = "",
        below: bool = False,
        **settings: Any,
    ) -> None:
        scales, places = _apart(settings)
        super().__init__(clock, **scales)
        if len(places) > 1 or (train_loss and terms_of(train_loss) == terms_of(loss)):
            raise ValueError("log kind 'named' needs one of samples, step and epoch, and a train_loss other than loss")
        unit, name = next(iter(places.items()), ("step", "step"))
        self._unit = unit
        names = {(terms_of(name), unit): unit, (terms_of(loss), ""): "loss"}
        self._numbers = Numbers(names | ({(terms_of(train_loss), ""): "train_loss"} if train_loss else {}))
        self._batches, self._below = batches, below
        self._last: str | None = None
        self._waiting: dict[str, str] = {}
        self.unmatched.patterns = loss

    def line(self, text: str, now: int) -> bool:
        values = self._numbers.of(text)
        if not values:
            return True
        if self._batches and "loss" in values and not of_counted_batch(text, Tokens().of(text), self._batches):
            del values["loss"]
        place = values.pop(self._unit, None)
        self._last = self._last if place is None else place
        if self._below:
            values, self._waiting = (self._waiting | values, {}) if place is not None else ({}, self._waiting | values)
        samples = self.samples_of({self._unit: self._last}) if self._last else 0.0
        return self.take_fields(values, now, samples) if values else True


def of_counted_batch(line: str, tokens: list[Token], batches: str) -> bool:
    """Whether a line's eval result counts under the setting ``batches``."""
    if batches in ("", "last", "none"):
        batch = batch_of(line) if batches else None
        return batch is None or (batches == "last" and batch[0] == batch[1])
    *name, number = batches.split()
    return any(t.name == " ".join(name) and t.number == number for t in tokens)


NAMED = ReaderKind(
    make=NamedReader,
    settings={**SCALES, **FORM, "below": bool, **dict.fromkeys(("loss", "train_loss", "batches", *ORDER), str)},
    metric="loss",
    counts=lambda settings: _counts(settings, settings),
)
"""``workload.log.kind = "named"``."""


# Regular expressions from study files, rejected if a log line could make them hang.


_PROGRESS = frozenset(("samples", "step", "epoch"))

MAX_REPEATS = 100
"""Maximum repetitions that count as bounded."""


@lru_cache(maxsize=64)
def compile_safely(name: str, pattern: str, *, progress_apart: bool = False) -> re.Pattern[str]:
    """Compile a pattern. Raises ValueError if it is malformed, lacks groups, or has nested repetitions.

    progress_apart: a separate pattern reads the progress.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        remedy = "; Python writes a named group (?P<name>...)" if "unknown extension ?<" in str(error) else ""
        raise ValueError(
            f"log setting {name!r} is not a valid regular expression ({error}){remedy}; got {pattern!r}"
        ) from error
    if _repeats_repetition(_parser.parse(pattern)):
        raise ValueError(
            f"log setting {name!r} repeats a repetition or an alternative, which can hang on a long line; "
            f"write the inner one possessively (x++) or without repetition; got {pattern!r}"
        )
    groups = set(compiled.groupindex)
    measures = name in ("eval", "train")
    if measures and not ("loss" in groups and (progress_apart or groups & _PROGRESS)):
        raise ValueError(
            f"log setting {name!r} needs the named groups loss and samples, step or epoch; where these stand on lines "
            f"of their own, add a pattern 'progress' with one of them; got {pattern!r}"
        )
    if name == "progress" and not groups & _PROGRESS:
        raise ValueError(f"log setting 'progress' needs the named group samples, step or epoch; got {pattern!r}")
    unknown = sorted(groups - {"loss", *FACTS})
    if unknown:
        raise ValueError(
            f"log setting {name!r} has the unknown group {unknown[0]!r}; known are loss, {', '.join(FACTS)}"
        )
    return compiled


def _repeats_repetition(parsed: Any, inside: bool = False) -> bool:
    """Whether an unbounded repetition contains another, or an alternative, which takes exponential time to fail."""
    for operation, argument in parsed:
        kind = str(operation)
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, held = argument
            if (inside and most != least) or _repeats_repetition(held, inside or most > MAX_REPEATS):
                return True
        elif kind == "BRANCH" and (inside or any(_repeats_repetition(branch) for branch in argument[1])):
            return True
        elif kind in _HOLDS:
            position, starts_anew = _HOLDS[kind]
            held = argument if position is None else argument[position]
            if _repeats_repetition(held, inside and not starts_anew):
                return True
    return False


# Position of the inner pattern in a parsed operation, and whether that pattern never backtracks.
_HOLDS: dict[str, tuple[int | None, bool]] = {
    "SUBPATTERN": (3, False),
    "ASSERT": (1, True),
    "ASSERT_NOT": (1, True),
    "ATOMIC_GROUP": (None, True),
    "POSSESSIVE_REPEAT": (2, True),
}


MAX_PATTERN_LINE = 1000
"""Characters of a line that users' patterns search, which bounds a polynomial pattern's time to seconds."""

SLOW_SECONDS = 1.0
"""CPU seconds on one line after which a user's pattern is dropped."""


class RegexReader(ScaledReader):
    """Lines of any form, by one pattern for evals and one for train losses.

    eval, train: regular expressions searched for in each line, with the named group ``loss`` (for an eval, the name in
    ``metric`` is allowed too), one of ``samples``, ``step`` and ``epoch``, and optionally ``seconds`` (since the start
    of the run), ``eval_seconds`` and ``throughput``. start, stop: patterns of the lines where the run starts and ends.
    global_batch_size and samples_per_epoch: as for JSON lines.

    progress: a pattern with one of ``samples``, ``step`` and ``epoch`` for progress on separate lines; an eval or train
    loss without such a group then takes the last such line (0 before the first). from_zero: the first epoch and step
    are numbered 0, so one is added. repeated: lines repeat the last eval until the next one, as progress bars do, so
    only a changed loss is an eval. decimal_comma: numbers are printed as ``0,925`` and ``1.200``; the patterns see
    ``0.925`` and ``1,200``.

    A number of which a pattern matches only the first digits, e.g. 0 of ``0.925``, is not understood.

    Only the first 1,000 characters of a line are searched. Nested repetitions are rejected, and a pattern that takes
    more than a second for a line is dropped (counted in ``dropped_lines``), because a log line can make either hang.
    """

    def __init__(
        self,
        clock: Clock = steady_epoch,
        *,
        metric: str = "loss",
        **settings: Any,
    ) -> None:
        scales, patterns = _apart(settings)
        super().__init__(clock, **scales)
        self._metric = metric
        if "eval" not in patterns:
            raise ValueError("log kind 'regex' needs the setting 'eval': a pattern with the groups loss and samples")
        if other := reads_a_loss_instead(metric, patterns["eval"]):
            raise ValueError(
                f"eval reads {other!r}, the metric is {metric!r}: put the group (?P<loss>...) behind {metric} in it"
            )
        apart = "progress" in patterns
        order = sorted(patterns, key=lambda name: name != "progress")  # progress first, for lines that match both
        self._patterns = {name: compile_safely(name, patterns[name], progress_apart=apart) for name in order}
        self._progress: dict[str, Any] = {"samples": 0.0} if apart else {}
        self.unmatched.patterns = patterns["eval"]
        self._cpu = 0.0

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log. Never raises because of their content."""
        self._cpu = time.thread_time()  # too slow a call for every line
        super().feed(chunk)

    def line(self, text: str, now: int) -> bool:
        understood = True
        for name, pattern in list(self._patterns.items()):
            begin = time.perf_counter()
            match = pattern.search(text[:MAX_PATTERN_LINE])
            if time.perf_counter() - begin > SLOW_SECONDS and time.thread_time() - self._cpu > SLOW_SECONDS:
                del self._patterns[name]
                understood = False
            if match:
                understood &= self._found(name, match, now)
        return understood

    def _found(self, name: str, match: re.Match[str], now: int) -> bool:
        builder, groups = self.run_builder, match.groupdict()
        if short := cut_short(match):
            self.unmatched.cut = short
            return False
        if name == "start":
            self.started(now)
        elif name == "stop" and builder.run_stop is None:
            builder.run_stop = now
        elif name == "progress":
            self._progress = {fact: value for fact, value in groups.items() if value is not None}
        elif name in ("eval", "train"):
            fields = {fact: value for fact, value in groups.items() if value is not None}
            if name == "eval" and self._metric in fields:
                fields["loss"] = fields.pop(self._metric)
            samples = self.samples_of(fields)
            if samples is None:
                samples = self.samples_of(self._progress)
            if name == "train" and "loss" in fields:
                fields["train_loss"] = fields.pop("loss")
            return self.take_fields(fields, now, samples)
        return True


def reads_a_loss_instead(metric: str, pattern: str) -> str:
    """The name before a pattern's group ``loss``, if that is a loss and ``metric`` is not; else ""."""
    if "loss" in metric.lower():
        return ""
    before = re.sub(r"\\[A-Za-z]", " ", pattern.partition("(?P<loss>")[0])
    name = (re.findall(r"\w+", before) or [""])[-1]
    return name if "loss" in name.lower() else ""


def cut_short(match: re.Match[str]) -> str:
    """The complete number that a match cuts, e.g. ``0,925`` if it ends after 0; "" if it cuts none."""
    last = match[match.lastgroup] if match.lastgroup else None
    if not last or not last.isdigit() or match.end() != match.end(match.lastgroup or 0):
        return ""
    rest = _REST.match(match.string, match.end())
    return last + rest[0] if rest else ""


_REST = re.compile(r"[.,]\d{0,20}[1-9]\d{0,20}")


_PATTERNS = ("eval", "train", "progress", "start", "stop")


REGEX = ReaderKind(
    make=RegexReader,
    settings={**SCALES, **FORM, **dict.fromkeys((*_PATTERNS, "metric"), str)},
    metric="metric",
    counts=lambda settings: _counts(settings, re.findall(r"\(\?P<(\w+)>", "".join(map(str, settings.values())))),
)
"""``workload.log.kind = "regex"``."""
