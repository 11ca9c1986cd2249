"""A log in which a study's reader finds nothing: what its lines look like, and what pattern would read them.

Pure functions of text. A wrong pattern shows in the first minute of the first trial, so it must not cost a second one.
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
from lora_tune.logs.tokens import in_use, losses, of_an_eval, positions, with_points

ENOUGH_LINES = 50
"""Lines without a match after which a line that looks like an eval says that the pattern is wrong."""

LONGEST_SHOWN = 1000
"""Characters of a line that are looked at: they bound the time that one line can take."""


def is_eval_line(line: str) -> bool:
    """Whether a line states a loss and how far the run is."""
    return bool(losses(line[:LONGEST_SHOWN]) and positions(line[:LONGEST_SHOWN]))


def suggest(line: str) -> str:
    """Keys of ``workload.log`` that read lines like this one; "" where none is seen."""
    measures, places = losses(line[:LONGEST_SHOWN]), positions(line[:LONGEST_SHOWN])
    if not measures or not places:
        return ""
    return f'kind = "named", loss = "{measures[0].spelling}", {places[0].unit} = "{places[0].name}"'


TELL_APART = "let the pattern say which it is, by the name of its data set for example"
"""The remedy where two things are printed in the same words."""


@dataclass(slots=True)
class Unmatched:
    """Counts the lines of a log until one is understood.

    patterns: what the study searches for, "" for formats without a pattern; it tells whether plain losses are wanted.
    error: what the format's own code raised last for a line. cut: the last number that a pattern took a part of.
    """

    patterns: str = ""
    lines: int = 0
    likely: str = ""
    error: str = ""
    cut: str = ""
    found: bool = field(default=False)

    def take(self, line: str) -> None:
        """One line that no setting matched."""
        self.lines += 1
        if not is_eval_line(with_points(line) if in_use([line[:LONGEST_SHOWN]]) else line):
            return
        if of_an_eval(line) or (self.patterns and not of_an_eval(self.patterns)):
            self.likely = line.strip()[:200]

    def describe(self, *, ended: bool) -> str:
        """What is wrong and what to write instead; "" while it may only be too early. ended: the job is over."""
        if self.found or not (ended or (self.lines >= ENOUGH_LINES and self.likely)):
            return ""
        lines = "1 line" if self.lines == 1 else f"{self.lines} lines"
        failed = f" (its reader failed: {self.error})" if self.error else ""
        failed += f" (its pattern takes only a part of the number {self.cut})" if self.cut else ""
        counted = f"{lines} read, none matched workload.log{failed}"
        if not self.likely:
            return f"{counted}; none of them looks like an eval"
        comma = in_use([self.likely])
        settings = suggest(with_points(self.likely) if comma else self.likely)
        remedy = f"; try in its place: {settings}" if settings else ""
        remedy += ", decimal_comma = true" if comma else ""
        return f"{counted}; a line that looks like an eval: `{self.likely}`{remedy}"


# What the readers of line-by-line logs share: lines out of bytes, facts out of fields, and what a reader kind is.


Clock = Callable[[], float]

MAX_LINE = 4096
"""Bytes; longer lines are dropped and counted."""

LATE_READ_MS = 2500
"""A line that came this long after a pause began was written before it: it is timed when it is read."""

FACTS = ("samples", "step", "epoch", "train_loss", "seconds", "eval_seconds", "throughput")
"""What a line may say beside an eval's loss."""

NUMBER = (int, float)
SCALES: Mapping[str, Any] = {"global_batch_size": NUMBER, "samples_per_epoch": NUMBER}
"""Settings that turn steps and epochs into samples."""

FORM: Mapping[str, Any] = {"from_zero": bool, "repeated": bool, "decimal_comma": bool}
"""Settings that say how a script counts, repeats itself and writes its numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderKind:
    """What ``workload.log.kind`` names.

    Parameters
    ----------
    make : callable
        ``make(clock=..., **settings)`` gives a reader; ``clock()`` is the epoch time in seconds.
    settings : mapping of str to type, or None
        The settings that it takes, with their types; None leaves that to ``make``.
    metric : str
        The setting that names the metric whose evals count, which ``objective.metric`` fills; "" where none does.
    counts : callable
        What a log of these settings counts its progress in: samples, steps or epochs; None: always samples.
    """

    make: Callable[..., LogReader]
    settings: Mapping[str, Any] | None = None
    metric: str = ""
    counts: Callable[[Mapping[str, Any]], str] | None = None


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
        self.repeated = False
        self.decimal_comma = False
        self._last_loss: float | None = None
        self._started_again: int | None = None
        self.unmatched = Unmatched()
        self.pauses: Sequence[tuple[int, int]] = ()

    def read_shortfall(self, ceiling: float) -> None:
        """Read evals that rise, such as an accuracy, as what they lack of ``ceiling``. To be said before any byte."""
        self.run_builder.ceiling = ceiling

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log. Never raises for what they contain."""
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
        """What the log says so far."""
        # Seconds that the log itself states are counted from a time that nobody knows.
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
            text = with_points(plain(line)) if self.decimal_comma else plain(line)
            if not self.run_builder.resumed_line and states_resume(text):
                self.run_builder.resumed_line = text.strip()[:MAX_TEXT]
            if not self._understood(text, now):
                self._dropped += 1
            if not self.unmatched.found:
                self._count(text)

    def _understood(self, text: str, now: int) -> bool:
        """Whether :meth:`line` did. A format of somebody else's need not expect every line: one must end no sweep."""
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
        """Take one line that arrived at ``now`` (epoch ms); False for one that should have been understood.

        A line for which this raises counts as not understood as well.
        """
        raise NotImplementedError

    def take_fields(self, fields: Mapping[str, object], now: int, samples: float | None) -> bool:
        """Take the facts of one line under this module's names; False when a loss is no number or has no samples.

        fields: ``loss`` (an eval's), ``train_loss``, ``seconds`` (since the start of the run), ``eval_seconds``,
        ``throughput`` (samples/s); each may be missing.
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
                    continue  # what a progress bar still shows of the last eval
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
        """The log says that a run starts: the run, or its program again within the job."""
        builder = self.run_builder
        if builder.evals or builder.train:
            self._started_again = now
        else:
            builder.run_start = now

    def _begin_anew(self, samples: float, loss: float, now: int, *, trained: bool) -> None:
        """Make a run of its own of training that began again with its first point, after a start of its own.

        That takes about as long as the first time; lines of another rank, which only come late, do not. Who counts from
        zero again and has the loss of where the run was goes on from a checkpoint.
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
    """Bytes of a log as lines, the last one without its end; those of a progress bar are lines of their own.

    NUL bytes are left out: a file that was truncated while its writer went on begins with a hole of them, however
    long; in UTF-16 one stands beside each letter.
    """
    return log.replace(b"\0", b"").replace(b"\r", b"\n").split(b"\n")


def plain(line: bytes) -> str:
    """A line as people see it, without colours of a terminal and a byte order mark of any encoding."""
    return without_escapes(line.decode("utf-8", "replace")).lstrip("\ufeff\ufffd")


def scaled_samples(fields: Mapping[str, object], scale: Mapping[str, float], *, first: int = 1) -> float | None:
    """Samples from the first of samples, step and epoch that is a number, times its scale; None without any.

    first: what the first step and the first epoch are called when they are over, 0 or 1.
    """
    for name, factor in scale.items():
        number = as_count(fields[name]) if name in fields else None
        if number is not None:
            return (number + (1 - first if name != "samples" else 0)) * factor
    return None


# Readers of logs that are not MLLOG: prints of Hugging Face's Trainer, JSON lines, and lines of any other form.
#
# Most such logs have no time stamps. Then a line is stamped with its *arrival time*: what the reader's ``clock`` says
# when :meth:`LogReader.feed` is called, so feed them as they grow (the driver polls every second or so; that is also
# the error). A log that is read again later gets the times of that reading, unless somebody kept the first ones
# (:mod:`lora_tune.logs.arrival`): only its samples and losses are then worth something. Formats that print
# seconds themselves do not depend on the clock.
#
# Settings of each kind are keyword arguments of :func:`make_reader`; study files name them under ``workload.log``.


def make_reader(kind: str, *, clock: Clock = steady_epoch, **settings: Any) -> LogReader:
    """A reader of a log format by its name, or of ``path/to/file.py:Class``.

    Parameters
    ----------
    kind : str
        ``mllog``, ``hf_trainer``, ``jsonl``, ``named``, ``regex``, or one that was added.
    clock : callable
        Epoch seconds now; see above.
    **settings
        The kind's own settings.

    Raises
    ------
    ValueError
        An unknown kind, an unknown setting or a bad value, in words that name it.
    """
    LOG_READERS.known(kind)
    loaded = LOG_READERS.load(kind)
    reader = loaded if isinstance(loaded, ReaderKind) else ReaderKind(make=loaded)
    if reader.settings is not None:
        _check_settings(kind, reader.settings, settings)
    instance: LogReader = LOG_READERS.make(kind, reader.make, clock=clock, **settings)
    return instance


def _check_settings(kind: str, known: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting that the kind does not have, or a value of another type."""
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
