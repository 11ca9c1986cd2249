"""Line readers, and advice for logs in which a study's reader finds nothing.

A wrong pattern must show in the first minute of the first trial, so that it does not cost a second one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_tune.base.host import steady_epoch
from lora_tune.base.paths import without_head
from lora_tune.base.registry import LOG_READERS
from lora_tune.base.text import without_escapes
from lora_tune.logs.run import MAX_TEXT, LogReader, RunLog, as_count, as_number
from lora_tune.logs.run_builder import RunBuilder, states_resume
from lora_tune.logs.tokens import decimal_points, in_use, losses, of_an_eval, positions

ENOUGH_LINES = 50
"""Lines without a match after which a line that looks like an eval shows that the pattern is wrong."""

LONGEST_SHOWN = 1000
"""Characters of a line that are examined, which bounds the time per line."""


def is_eval_line(line: str) -> bool:
    """Whether a line states a loss and progress."""
    return bool(losses(line[:LONGEST_SHOWN]) and positions(line[:LONGEST_SHOWN]))


def suggest(line: str) -> str:
    """Keys of ``workload.log`` that read lines like this one; "" if there are none."""
    measures, places = losses(line[:LONGEST_SHOWN]), positions(line[:LONGEST_SHOWN])
    if not measures or not places:
        return ""
    return f'kind = "named", loss = "{measures[0].spelling}", {places[0].unit} = "{places[0].name}"'


TELL_APART = "let the pattern say which it is, by the name of its data set for example"
"""Remedy if two metrics are printed in the same words."""


@dataclass(slots=True)
class Unmatched:
    """Counts the lines of a log until one is understood.

    patterns: of the study, "" for formats without patterns; used to decide whether plain losses are wanted. error: last
    exception of the format's code for a line. cut: last number that a pattern matched only in part.
    """

    patterns: str = ""
    lines: int = 0
    likely: str = ""
    error: str = ""
    cut: str = ""
    found: bool = field(default=False)

    def take(self, line: str) -> None:
        """Count one line that no setting matched."""
        self.lines += 1
        if not is_eval_line(decimal_points(line) if in_use([line[:LONGEST_SHOWN]]) else line):
            return
        if of_an_eval(line) or (self.patterns and not of_an_eval(self.patterns)):
            self.likely = line.strip()[:200]

    def describe(self, *, ended: bool) -> str:
        """What is wrong and what to write instead; "" while it may be too early to tell. ended: the job is over."""
        if self.found or not (ended or (self.lines >= ENOUGH_LINES and self.likely)):
            return ""
        lines = "1 line" if self.lines == 1 else f"{self.lines} lines"
        failed = f" (its reader failed: {self.error})" if self.error else ""
        failed += f" (its pattern takes only a part of the number {self.cut})" if self.cut else ""
        counted = f"{lines} read, none matched workload.log{failed}"
        if not self.likely:
            return f"{counted}; none of them looks like an eval"
        comma = in_use([self.likely])
        settings = suggest(decimal_points(self.likely) if comma else self.likely)
        remedy = f"; try in its place: {settings}" if settings else ""
        remedy += ", decimal_comma = true" if comma else ""
        return f"{counted}; a line that looks like an eval: `{self.likely}`{remedy}"


# Base of line-based readers: lines from bytes, values from fields, and the definition of a reader kind.


Clock = Callable[[], float]

MAX_LINE = 4096
"""Bytes; longer lines are dropped and counted."""

LATE_READ_MS = 2500
"""A line that arrived within this many ms after a pause began was written before it, as lines are timed on reading."""

FACTS = ("samples", "step", "epoch", "train_loss", "seconds", "eval_seconds", "throughput")
"""Fields of a line other than an eval's loss."""

NUMBER = (int, float)
SCALES: Mapping[str, Any] = {"global_batch_size": NUMBER, "samples_per_epoch": NUMBER}
"""Settings that convert steps and epochs to samples."""

FORM: Mapping[str, Any] = {"from_zero": bool, "repeated": bool, "decimal_comma": bool}
"""Settings for a script's counting, repeated lines and number format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderKind:
    """A log format, as ``workload.log.kind`` names it.

    Parameters
    ----------
    make : callable
        ``make(clock=..., **settings)`` returns a reader; ``clock()`` is the epoch time in seconds.
    settings : mapping of str to type, or None
        Its settings with their types; None: ``make`` checks them.
    metric : str
        The setting for the name of the evals' metric, which ``objective.metric`` fills; "" if there is none.
    counts : callable
        Returns the unit of progress for given settings: samples, steps or epochs; None: always samples.
    """

    make: Callable[..., LogReader]
    settings: Mapping[str, Any] | None = None
    metric: str = ""
    counts: Callable[[Mapping[str, Any]], str] | None = None


class LineReader:
    """Splits bytes into lines and collects a RunLog; subclasses interpret the lines. clock: returns epoch seconds.

    The run starts when the first bytes arrive, or where :meth:`line` sets it. Carriage returns end lines too, as in
    progress bars.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._held = b""
        self._skipping = False
        self._dropped = 0
        self.states_seconds = False
        self.run_builder = RunBuilder()
        self.repeated = False
        self.decimal_comma = False
        self._last_loss: float | None = None
        self._started_again: int | None = None
        self.unmatched = Unmatched()
        self.pauses: Sequence[tuple[int, int]] = ()

    def read_shortfall(self, ceiling: float) -> None:
        """Read maximised metrics, such as an accuracy, as ``ceiling`` minus the value. Call it before ``feed``."""
        self.run_builder.ceiling = ceiling

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log. Never raises because of their content."""
        now = int(self.clock() * 1000)
        if self.run_builder.run_start is None:
            chunk = without_head(chunk)
        if chunk and self.run_builder.run_start is None:
            self.run_builder.run_start = now
        *lines, held = cut(self._held + chunk)
        for line in lines:
            self._take(line, now)
        self._held = held
        if len(held) > MAX_LINE:
            self._dropped += not self._skipping
            self._skipping, self._held = True, b""

    def run(self) -> RunLog:
        """The run so far."""
        # Seconds stated by the log have an unknown origin, so pauses cannot be subtracted.
        placed = self.pauses and not self.states_seconds
        builder = self.run_builder.without(self.pauses, LATE_READ_MS) if placed else self.run_builder
        return builder.run(self._dropped)

    def _take(self, line: bytes, now: int) -> None:
        if self._skipping:
            self._skipping = False
        elif len(line) > MAX_LINE:
            self._dropped += 1
        elif line:
            self.run_builder.mark(now)
            text = decimal_points(plain(line)) if self.decimal_comma else plain(line)
            if not self.run_builder.resumed_line and states_resume(text):
                self.run_builder.resumed_line = text.strip()[:MAX_TEXT]
            if not self._understood(text, now):
                self._dropped += 1
            if not self.unmatched.found:
                self._count(text)

    def _understood(self, text: str, now: int) -> bool:
        """Result of :meth:`line`; False if it raises, because an unexpected line of a user's format must not end a
        sweep."""
        try:
            return self.line(text, now)
        except Exception as error:  # noqa: BLE001
            self.unmatched.error = f"{type(error).__name__}: {error}"
            return False

    def _count(self, text: str) -> None:
        builder = self.run_builder
        if builder.evals or builder.train or builder.run_stop is not None:
            self.unmatched.found = True
        else:
            self.unmatched.take(text)

    def line(self, text: str, now: int) -> bool:
        """Take one line that arrived at ``now`` (epoch ms); return False for one that should have been understood.

        A line for which this raises also counts as not understood.
        """
        raise NotImplementedError

    def take_fields(self, fields: Mapping[str, object], now: int, samples: float | None) -> bool:
        """Take the fields of one line under this module's names; False if a loss is not a number or has no samples.

        fields: ``loss`` (of an eval), ``train_loss``, ``seconds`` (since the start of the run), ``eval_seconds``,
        ``throughput`` (samples/s); all optional.
        """
        builder = self.run_builder
        seconds = as_number(fields["seconds"]) if "seconds" in fields else None
        if seconds is not None and abs(seconds) < 1e9 and builder.run_start is not None:
            now = builder.run_start + round(seconds * 1000)
            self.states_seconds = True
        understood = True
        for name, add in (("loss", "add_eval"), ("train_loss", "add_train")):
            if name in fields:
                loss = as_number(fields[name])
                if loss is None or samples is None or not 0 <= samples < float("inf"):
                    understood = False
                elif name == "loss" and self.repeated and loss == self._last_loss:
                    continue  # a progress bar repeats the last eval
                else:
                    self._last_loss = loss if name == "loss" else self._last_loss
                    self._begin_anew(samples, loss, now, trained=name != "loss")
                    getattr(self.run_builder, add)(samples, loss, now)
        builder = self.run_builder
        length = as_number(fields["eval_seconds"]) if "loss" in fields and "eval_seconds" in fields else None
        if understood and length is not None and 0 <= length < 1e9:
            builder.add_eval_start(samples, now - round(length * 1000))
            builder.add_eval_stop(samples, now)
        throughput = as_number(fields["throughput"]) if "throughput" in fields else None
        if throughput is not None:
            builder.add_stated(now, throughput, False)
        return understood

    def started(self, now: int) -> None:
        """The log states that a run starts: the first time, or again after its program restarted in the job."""
        builder = self.run_builder
        if builder.evals or builder.train:
            self._started_again = now
        else:
            builder.run_start = now

    def _begin_anew(self, samples: float, loss: float, now: int, *, trained: bool) -> None:
        """Start a new run if training began again with its first point, after a printed start.

        A restart takes about as long as the first start, unlike late lines of other ranks. A program that counts from
        zero but has the loss of the run's end continues from a checkpoint: it is no new run.
        """
        begun, self._started_again, run = self._started_again, None, self.run_builder
        points = run.train if trained else run.evals
        if begun is None or not points or run.run_start is None or run.run_stop is not None:
            return
        (first, (high, at)), (low, _) = next(iter(points.items())), points[next(reversed(points))]
        loss = loss if trained or run.ceiling is None else run.ceiling - loss
        like_first = len(points) == 1 or abs(loss - high) < abs(loss - low)
        if like_first and samples <= first and now - begun >= (at - run.run_start) / 2:
            self.run_builder = RunBuilder(ceiling=run.ceiling)
            self.run_builder.run_start = begun


def cut(log: bytes) -> list[bytes]:
    """Split bytes of a log into lines without line ends; progress bar updates are separate lines.

    NUL bytes are dropped: a file truncated under its writer begins with a hole of them of any length; UTF-16 has one
    with each ASCII letter.
    """
    return log.replace(b"\0", b"").replace(b"\r", b"\n").split(b"\n")


def plain(line: bytes) -> str:
    """A line without terminal colours and byte order marks."""
    return without_escapes(line.decode("utf-8", "replace")).lstrip("\ufeff\ufffd")


def scaled_samples(fields: Mapping[str, object], scale: Mapping[str, float], *, first: int = 1) -> float | None:
    """Samples from the first of samples, step and epoch that is a number, times its scale; None without any.

    first: number of the first completed step and epoch, 0 or 1.
    """
    for name, factor in scale.items():
        number = as_count(fields[name]) if name in fields else None
        if number is not None:
            return (number + (1 - first if name != "samples" else 0)) * factor
    return None


# Readers of formats other than MLLOG: Hugging Face Trainer output, JSON lines, and lines of any form.
#
# Most such logs have no time stamps. Each line then gets its *arrival time*: the ``clock`` when :meth:`LogReader.feed`
# is called, so feed logs as they grow (the driver polls about every second, which is also the error). A log that is
# read again later gets the times of that reading, unless the first ones were stored (:mod:`lora_tune.logs.arrival`);
# without them only samples and losses are meaningful. Formats that print seconds do not depend on the clock.
#
# Settings of each kind are keyword arguments of :func:`make_reader`, and keys of ``workload.log`` in study files.


def make_reader(kind: str, *, clock: Clock = steady_epoch, **settings: Any) -> LogReader:
    """A reader of a log format by name, or of ``path/to/file.py:Class``.

    Parameters
    ----------
    kind : str
        ``mllog``, ``hf_trainer``, ``jsonl``, ``named``, ``regex``, or a registered one.
    clock : callable
        Returns the epoch time in seconds.
    **settings
        The kind's settings.

    Raises
    ------
    ValueError
        For an unknown kind, an unknown setting or a bad value, named in the message.
    """
    LOG_READERS.known(kind)
    loaded = LOG_READERS.load(kind)
    reader = loaded if isinstance(loaded, ReaderKind) else ReaderKind(make=loaded)
    if reader.settings is not None:
        _check_settings(kind, reader.settings, settings)
    instance: LogReader = LOG_READERS.make(kind, reader.make, clock=clock, **settings)
    return instance


def _check_settings(kind: str, known: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown setting of the kind, or a value of another type."""
    unknown = sorted(settings.keys() - known.keys())
    if unknown:
        allowed = ", ".join(known) or "none"
        raise ValueError(f"log kind {kind!r} has no setting {unknown[0]!r}; its settings: {allowed}")
    for name, value in settings.items():
        wanted = known[name]
        if wanted is bool:
            if not isinstance(value, bool):
                raise ValueError(f"log setting {name!r} is {value!r}; it must be true or false")
        elif isinstance(value, bool) or not isinstance(value, wanted) or (wanted is not str and value <= 0):
            expected = "a text" if wanted is str else "a number above 0"
            raise ValueError(f"log setting {name!r} is {value!r}; it must be {expected}")
