"""Readers of logs that are not MLLOG: prints of Hugging Face's Trainer, JSON lines, and lines of any other form.

Most such logs have no time stamps. Then a line is stamped with its *arrival time*: what the reader's ``clock`` says
when :meth:`LogReader.feed` is called, so feed them as they grow (the driver polls every second or so; that is also the
error). A log that is read again later gets the times of that reading, unless somebody kept the first ones
(:mod:`lora_tune.logs.arrival_times`): only its samples and losses are then worth something. Formats that print seconds
themselves do not depend on the clock.

Settings of each kind are keyword arguments of :func:`make_reader`; study files name them under ``workload.log``.
"""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]  # the only way to know how patterns nest
from typing import Any

from lora_tune.base.process import steady_epoch
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import LogReader, RunBuilder, RunLog, as_number

Clock = Callable[[], float]

MAX_LINE = 4096
"""Bytes; longer lines are dropped and counted."""

MAX_REPEATS = 100
"""A repetition that may go on for longer counts as unbounded."""

MAX_PATTERN_LINE = 1000
"""Characters of a line that a user's pattern is given: they bound a polynomial pattern's time to seconds."""

SLOW_SECONDS = 1.0
"""CPU seconds on one line after which a user's pattern is given up."""


def make_reader(kind: str, *, clock: Clock = steady_epoch, **settings: Any) -> LogReader:
    """A reader of ``kind``: ``mllog``, ``hf_trainer``, ``jsonl`` or ``regex``.

    clock: epoch seconds now; see above. settings: of the kind's class. ValueError for an unknown kind, an unknown
    setting or a bad value, in words that name it.
    """
    if kind not in _KINDS:
        raise ValueError(f"log kind {kind!r} is unknown; known are {', '.join(_KINDS)}")
    known = _KINDS[kind]
    unknown = sorted(settings.keys() - known.keys())
    if unknown:
        allowed = ", ".join(known) or "none"
        raise ValueError(f"log kind {kind!r} has no setting {unknown[0]!r}; its settings: {allowed}")
    for name, value in settings.items():
        wanted = known[name]
        if isinstance(value, bool) or not isinstance(value, wanted) or (wanted is not str and value <= 0):
            expected = "a text" if wanted is str else "a number above 0"
            raise ValueError(f"log setting {name!r} is {value!r}; it must be {expected}")
    if kind == "mllog":
        return MllogReader()
    made: dict[str, Callable[..., LogReader]] = {
        "hf_trainer": HfTrainerReader,
        "jsonl": JsonLinesReader,
        "regex": RegexReader,
    }
    return made[kind](clock=clock, **settings)


class LineReader:
    """Cuts bytes into lines and gathers a Run from them; a subclass says what a line means. clock: see above.

    The run starts when the first bytes arrive, or where :meth:`line` says so. Carriage returns end lines too, as
    progress bars print them.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._held = b""
        self._skipping = False
        self._dropped = 0
        self.states_seconds = False
        self.run_builder = RunBuilder()

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log. Never raises for what they contain."""
        now = int(self.clock() * 1000)
        if chunk and self.run_builder.run_start is None:
            self.run_builder.run_start = now
        *lines, held = (self._held + chunk).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            self._take(line, now)
        self._held = held
        if len(held) > MAX_LINE:
            self._dropped += not self._skipping
            self._skipping, self._held = True, b""

    def run(self) -> RunLog:
        """What the log says so far."""
        return self.run_builder.run(self._dropped)

    def _take(self, line: bytes, now: int) -> None:
        if self._skipping:
            self._skipping = False
        elif len(line) > MAX_LINE:
            self._dropped += 1
        elif line:
            self.run_builder.mark(now)
            if not self.line(line.decode("utf-8", "replace"), now):
                self._dropped += 1

    def line(self, text: str, now: int) -> bool:
        """Take one line that arrived at ``now`` (epoch ms); False for one that should have been understood."""
        raise NotImplementedError

    def take_fields(self, fields: Mapping[str, object], now: int, samples: float | None) -> bool:
        """Take the facts of one line under this module's names; False when a loss is no number or has no samples.

        fields: ``loss`` (an eval's), ``train_loss``, ``seconds`` (since the start of the run), ``eval_seconds``,
        ``throughput`` (samples/s); each may be missing.
        """
        builder = self.run_builder
        seconds = as_number(fields.get("seconds"))
        if seconds is not None and abs(seconds) < 1e9 and builder.run_start is not None:
            now = builder.run_start + round(seconds * 1000)
            self.states_seconds = True
        understood = True
        for name, add in (("loss", builder.add_eval), ("train_loss", builder.add_train)):
            if name in fields:
                loss = as_number(fields[name])
                if loss is None or samples is None or not 0 <= samples < float("inf"):
                    understood = False
                else:
                    add(samples, loss, now)
        length = as_number(fields.get("eval_seconds"))
        if "loss" in fields and understood and length is not None and 0 <= length < 1e9:
            builder.add_eval_start(samples, now - round(length * 1000))
            builder.add_eval_stop(samples, now)
        throughput = as_number(fields.get("throughput"))
        if throughput is not None:
            builder.add_stated(now, throughput, False)
        return understood


class HfTrainerReader(LineReader):
    """Prints of transformers' Trainer, one Python dict a line.

    ``{'loss': 1.2, 'learning_rate': 0.0001, 'epoch': 0.04}``, ``{'eval_loss': 0.93, 'eval_runtime': 4.1, 'epoch':
    0.5}``, and at the end ``{'train_runtime': 2577.75, 'train_samples_per_second': 95.339, 'train_loss': 1.0156,
    'epoch': 0.9}``, which becomes ``run_stop`` and the run's throughput.

    samples_per_epoch: samples in the training set; the dicts count in epochs. Without it, samples are epochs.
    The run starts at ``***** Running training *****`` if that is printed.
    """

    def __init__(self, clock: Clock = steady_epoch, samples_per_epoch: float = 1.0) -> None:
        super().__init__(clock)
        self._samples_per_epoch = samples_per_epoch

    def line(self, text: str, now: int) -> bool:
        builder = self.run_builder
        if "***** Running training *****" in text and not builder.train and not builder.evals:
            builder.run_start = now
        found = next((one[0] for one in _DICT.finditer(text) if _LOGGED.search(one[0])), None)
        if found is None:
            return True
        logged = _literal(found)
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
        names = {"eval_loss": "loss", "loss": "train_loss", "eval_runtime": "eval_seconds"}
        return self.take_fields({names[key]: logged[key] for key in names if key in logged}, now, samples)


_DICT = re.compile(r"\{'[^{}\\]*\}")
_LOGGED = re.compile(r"'(?:loss|eval_loss|train_runtime)':")
_FLAT = re.compile(
    r"\{(?:'[^'\\]*': (?:'[^'\\]*'|-?\d[\d.]*(?:[eE][-+]?\d+)?|-?nan|-?inf|None|True|False)(?:, (?=')|(?=\})))+\}"
)
_NOT_A_LITERAL = re.compile(r"(?<=: )(-?(?:nan|inf))(?=[,}])")


def _literal(text: str) -> dict[str, object] | None:
    """A flat Python dict of plain values; None for anything else, which is not even parsed."""
    if not _FLAT.fullmatch(text):
        return None
    try:
        value = ast.literal_eval(_NOT_A_LITERAL.sub(r"'\1'", text))
    except (ValueError, SyntaxError):  # such as the number 1.2.3
        return None
    return value if isinstance(value, dict) else None


class JsonLinesReader(LineReader):
    """One JSON object a line; lines that start otherwise are ignored.

    Each setting is the name under which the objects hold that fact: ``loss`` (of an eval), ``train_loss``,
    ``samples`` or ``step`` or ``epoch``, ``seconds`` since the start of the run (without it, arrival times),
    ``eval_seconds``, ``throughput`` in samples/s. global_batch_size turns steps, and samples_per_epoch epochs, into
    samples.
    """

    def __init__(
        self,
        clock: Clock = steady_epoch,
        *,
        global_batch_size: float = 1.0,
        samples_per_epoch: float = 1.0,
        loss: str = "eval_loss",
        **names: str,
    ) -> None:
        super().__init__(clock)
        self._scale = {"samples": 1.0, "step": global_batch_size, "epoch": samples_per_epoch}
        self._names = {name: names.get(name, name) for name in _FACTS} | {"loss": loss}

    def line(self, text: str, now: int) -> bool:
        text = text.lstrip()
        if not text.startswith("{"):
            return True
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            return False
        fields = {fact: record[name] for fact, name in self._names.items() if record.get(name) is not None}
        return self.take_fields(fields, now, scaled_samples(fields, self._scale))


class RegexReader(LineReader):
    """Lines of any form, by one pattern for evals and one for train losses.

    eval, train: regular expressions searched for in each line, with the named group ``loss``, one of ``samples``,
    ``step`` and ``epoch``, and if printed ``seconds`` (since the start of the run), ``eval_seconds`` and
    ``throughput``. start, stop: patterns of the lines where the run starts and ends. global_batch_size and
    samples_per_epoch: as for JSON lines.

    Only the first 1,000 characters of a line are searched. A repetition within a repetition is refused, and a pattern
    that needs more than a second for a line is given up (``dropped_lines`` counts it): a log line can make either hang.
    """

    def __init__(
        self,
        clock: Clock = steady_epoch,
        *,
        global_batch_size: float = 1.0,
        samples_per_epoch: float = 1.0,
        **patterns: str,
    ) -> None:
        super().__init__(clock)
        if "eval" not in patterns:
            raise ValueError("log kind 'regex' needs the setting 'eval': a pattern with the groups loss and samples")
        self._scale = {"samples": 1.0, "step": global_batch_size, "epoch": samples_per_epoch}
        self._patterns = {name: compile_safely(name, pattern) for name, pattern in patterns.items()}
        self._cpu = 0.0

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log. Never raises for what they contain."""
        self._cpu = time.thread_time()  # too slow a call for every line
        super().feed(chunk)

    def line(self, text: str, now: int) -> bool:
        understood = True
        for name, pattern in list(self._patterns.items()):
            begin = time.perf_counter()
            found = pattern.search(text[:MAX_PATTERN_LINE])
            if time.perf_counter() - begin > SLOW_SECONDS and time.thread_time() - self._cpu > SLOW_SECONDS:
                del self._patterns[name]
                understood = False
            if found:
                understood &= self._found(name, found.groupdict(), now)
        return understood

    def _found(self, name: str, groups: dict[str, Any], now: int) -> bool:
        builder = self.run_builder
        if name == "start" and not builder.evals and not builder.train:
            builder.run_start = now
        elif name == "stop" and builder.run_stop is None:
            builder.run_stop = now
        elif name in ("eval", "train"):
            fields = {fact: value for fact, value in groups.items() if value is not None}
            samples = scaled_samples(fields, self._scale)
            if name == "train" and "loss" in fields:
                fields["train_loss"] = fields.pop("loss")
            return self.take_fields(fields, now, samples)
        return True


def scaled_samples(fields: Mapping[str, object], scale: Mapping[str, float]) -> float | None:
    """Samples from the first of samples, step and epoch that is a number, times its scale; None without any."""
    numbers = ((as_number(fields.get(name)), factor) for name, factor in scale.items())
    return next((number * factor for number, factor in numbers if number is not None), None)


@lru_cache(maxsize=64)
def compile_safely(name: str, pattern: str) -> re.Pattern[str]:
    """The compiled pattern; ValueError where it is malformed, lacks groups, or repeats a repetition."""
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"log setting {name!r} is no regular expression ({error}); got {pattern!r}") from error
    if _repeats_repetition(_parser.parse(pattern)):
        raise ValueError(
            f"log setting {name!r} repeats a repetition or an alternative, which can hang on a long line; "
            f"write the inner one possessively (x++) or without repetition; got {pattern!r}"
        )
    groups = set(compiled.groupindex)
    if name in ("eval", "train") and not ("loss" in groups and groups & {"samples", "step", "epoch"}):
        raise ValueError(
            f"log setting {name!r} needs the named groups loss and samples, step or epoch; got {pattern!r}"
        )
    unknown = sorted(groups - {"loss", *_FACTS})
    if unknown:
        raise ValueError(
            f"log setting {name!r} has the unknown group {unknown[0]!r}; known are loss, {', '.join(_FACTS)}"
        )
    return compiled


def _repeats_repetition(parsed: Any, inside: bool = False) -> bool:
    """Whether an unbounded repetition holds another, or an alternative: what takes exponential time to fail."""
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


# Where a parsed operation holds another pattern, and whether that one never gives back what it matched.
_HOLDS: dict[str, tuple[int | None, bool]] = {
    "SUBPATTERN": (3, False),
    "ASSERT": (1, True),
    "ASSERT_NOT": (1, True),
    "ATOMIC_GROUP": (None, True),
    "POSSESSIVE_REPEAT": (2, True),
}
_FACTS = ("samples", "step", "epoch", "train_loss", "seconds", "eval_seconds", "throughput")
_Number = (int, float)
_SCALES: dict[str, Any] = {"global_batch_size": _Number, "samples_per_epoch": _Number}
_KINDS: dict[str, dict[str, Any]] = {
    "mllog": {},
    "hf_trainer": {"samples_per_epoch": _Number},
    "jsonl": {**_SCALES, "loss": str, **dict.fromkeys(_FACTS, str)},
    "regex": {**_SCALES, **dict.fromkeys(("eval", "train", "start", "stop"), str)},
}
