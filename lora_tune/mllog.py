"""Log text in, a :class:`Run` out: the only channel from a trial to the sweep.

A trial prints one record a line, ``:::MLLOG {json}``, with ``time_ms``, ``event_type``, ``key``, ``value`` and
``metadata``. :class:`MllogReader` finds the records wherever they stand in the bytes and keeps what a sweep needs.

What is believed when a log repeats itself:

- An eval, a train loss or a hyperparameter that several ranks print counts once, at its first printing.
- A file may hold several runs, one after another (``NEXP`` seeds, or a requeued job that appends). A new run begins
  with an ``init_start`` later than the current run's ``init_stop`` or ``run_start``, or with a ``run_start`` later
  than something the current run measured. Lines that a rank printed late carry their old time stamp, so they open
  nothing. :meth:`MllogReader.run` is the run of the last ``run_start``; :meth:`MllogReader.runs` has all of them.
- ``init_start`` twice before ``run_start`` is one initialisation, from the first on.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Eval:
    """One evaluation of a run.

    samples: training samples consumed when it was made.
    loss: the eval loss (MLLOG's ``eval_accuracy``); may be NaN or infinite.
    seconds: since ``run_start``, from the log's own time stamps; NaN when ``run_start`` was not seen.
    """

    samples: float
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainPoint:
    """A training-loss reading: samples consumed, loss, seconds since ``run_start``."""

    samples: float
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a log says so far; a snapshot, never changed.

    Times ``*_ms`` are the log's own epoch milliseconds. ``status`` is what ``run_stop`` claims; only
    :meth:`reached` says whether the target was met. ``evals`` and ``train`` are in order of samples.

    throughput: samples/s of each training block in order, by the log's clock: samples between two evals over the
        seconds from the end of one eval to the start of the next. The first is the cold block (NaN if unknown);
        a later block whose time cannot be told is left out.
    stated_throughput: samples/s as the trial itself printed them (``tracked_stats``). They leave out what happens
        between steps: 1 to 58% too high for the first block of the public runs, up to 5% for warm ones.
    eval_seconds: the length of each eval whose start the log shows.
    hyperparameters: every scalar that the trial announced, under its MLLOG key (``opt_base_learning_rate``, ...).
    dropped_lines: records that were cut, malformed, or longer than the reader holds.
    """

    init_start_ms: int | None = None
    init_stop_ms: int | None = None
    run_start_ms: int | None = None
    run_stop_ms: int | None = None
    last_ms: int | None = None
    status: str | None = None
    evals: tuple[Eval, ...] = ()
    throughput: tuple[float, ...] = ()
    stated_throughput: tuple[float, ...] = ()
    eval_seconds: tuple[float, ...] = ()
    train: tuple[TrainPoint, ...] = ()
    hyperparameters: Mapping[str, object] = field(default_factory=dict)
    dropped_lines: int = 0

    def reached(self, target: float) -> Eval | None:
        """The first eval with ``loss <= target`` (NaN never), or None."""
        return next((e for e in self.evals if e.loss <= target), None)

    @property
    def init_seconds(self) -> float | None:
        """``init_stop - init_start``: paid for by the cluster, not scored. None until both are seen."""
        return _seconds_between(self.init_start_ms, self.init_stop_ms)

    @property
    def seconds(self) -> float | None:
        """``run_stop - run_start``: the scored time of a run that reached its target. None until both are seen."""
        return _seconds_between(self.run_start_ms, self.run_stop_ms)


class LogReader(Protocol):
    """Turns the bytes of one log, in pieces of any size, into a Run."""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log; a line may be cut anywhere."""
        ...

    def run(self) -> Run:
        """What the log says so far."""
        ...


MAX_POINTS = 16384
"""Evals that one run keeps, and train points (every second one goes when they are full). Real runs have hundreds."""

MAX_HYPERPARAMETERS = 512


class RunBuilder:
    """Gathers the facts of one run and computes the :class:`Run`. Times are epoch milliseconds."""

    __slots__ = (
        "eval_start",
        "eval_stop",
        "evals",
        "hyperparameters",
        "init_start",
        "init_stop",
        "last",
        "measured",
        "paused",
        "resumed",
        "run_start",
        "run_stop",
        "stated",
        "status",
        "train",
    )

    def __init__(self) -> None:
        self.init_start: int | None = None
        self.init_stop: int | None = None
        self.run_start: int | None = None
        self.run_stop: int | None = None
        self.status: str | None = None
        self.last = -1
        self.measured = -1  # the latest eval, train point or run_stop
        self.evals: dict[float, tuple[float, int]] = {}
        self.train: dict[float, tuple[float, int]] = {}
        self.eval_start: dict[float, int] = {}
        self.eval_stop: dict[float, int] = {}
        self.paused: list[int] = []  # training stops for an eval: block_stop
        self.resumed: list[int] = []
        self.stated: list[tuple[int, float, bool]] = []  # time, number, whether it is seconds a step
        self.hyperparameters: dict[str, object] = {}

    def add_eval(self, samples: float, loss: float, ms: int) -> None:
        """An eval; the first one printed at its number of samples counts."""
        if samples not in self.evals and len(self.evals) < MAX_POINTS:
            self.evals[samples] = loss, ms
            self.measured = max(self.measured, ms)

    def add_train(self, samples: float, loss: float, ms: int) -> None:
        """A train loss; the first one printed at its number of samples counts."""
        train = self.train
        if samples not in train:
            if len(train) == MAX_POINTS:
                for old in [*train][::2]:
                    del train[old]
            train[samples] = loss, ms
            if ms > self.measured:
                self.measured = ms

    def run(self, dropped_lines: int = 0) -> Run:
        """What was gathered so far."""
        start = self.run_start
        zero = math.nan if start is None else start
        evals = sorted(self.evals.items())
        throughput, eval_seconds = self._timing()
        return Run(
            init_start_ms=self.init_start,
            init_stop_ms=self.init_stop,
            run_start_ms=start,
            run_stop_ms=self.run_stop,
            last_ms=None if self.last < 0 else self.last,
            status=self.status,
            evals=tuple([Eval(samples, loss, (ms - zero) / 1000) for samples, (loss, ms) in evals]),
            throughput=throughput,
            stated_throughput=self._stated_throughput(),
            eval_seconds=eval_seconds,
            train=tuple(
                [TrainPoint(samples, loss, (ms - zero) / 1000) for samples, (loss, ms) in sorted(self.train.items())]
            ),
            hyperparameters=dict(self.hyperparameters),
            dropped_lines=dropped_lines,
        )

    def _timing(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Samples/s of each block and seconds of each eval; see :class:`Run`.

        An eval begins at its eval_start, else where the block before it stopped, and ends at its eval_stop, else
        where the next block starts. Two public stacks print both block marks after the eval: there the eval's
        length is unknown, and a block's speed is the median over its train points.
        """
        throughput: list[float] = []
        eval_seconds: list[float] = []
        paused, resumed = sorted(self.paused), sorted(self.resumed)
        ended, done = self.run_start, 0.0
        for samples, (_, ms) in sorted(self.evals.items()):
            began = self.eval_start.get(samples)
            if began is None:
                stops = bisect_left(paused, ms - 1)
                began = paused[stops - 1] if stops and (ended is None or paused[stops - 1] > ended) else None
            stopped = self.eval_stop.get(samples)
            if stopped is None:
                starts = bisect_left(resumed, ms)
                stopped = resumed[starts] if starts < len(resumed) else ms
            if began is not None:
                eval_seconds.append((stopped - began) / 1000)
            rate = self._train_rate(done, samples) if began is None else _rate(samples - done, ended, began)
            if not math.isnan(rate) or not throughput:
                throughput.append(rate)
            ended, done = stopped, samples
        return tuple(throughput), tuple(eval_seconds)

    def _train_rate(self, after: float, until: float) -> float:
        """Median samples/s between consecutive train points in ``(after, until)``; NaN for less than two points."""
        points = [(samples, ms) for samples, (_, ms) in sorted(self.train.items()) if after < samples < until]
        rates = [_rate(b - a, a_ms, b_ms) for (a, a_ms), (b, b_ms) in pairwise(points)]
        rates = [rate for rate in rates if not math.isnan(rate)]
        return median(rates) if rates else math.nan

    def _stated_throughput(self) -> tuple[float, ...]:
        """The first printed number after each eval, as samples/s; seconds a step need the global batch size."""
        evals = sorted([ms for _, ms in self.evals.values()])
        batch = _number(self.hyperparameters.get("global_batch_size"))
        blocks: dict[int, float] = {}
        for ms, number, is_step_time in self.stated:
            rate = number
            if is_step_time:
                if batch is None or number <= 0:
                    continue
                rate = batch / number
            blocks.setdefault(bisect_left(evals, ms), rate)
        return tuple([rate for _, rate in sorted(blocks.items())])


def _seconds_between(start: int | None, stop: int | None) -> float | None:
    return None if start is None or stop is None else (stop - start) / 1000


def _rate(samples: float, start: int | None, stop: int) -> float:
    """Samples/s between two times in ms; NaN when that is no positive length of time."""
    return samples / ((stop - start) / 1000) if start is not None and stop > start else math.nan


def _number(value: object) -> float | None:
    """The value as a float; None for what is no number. NaN and infinities, also spelt out in a string, are numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


MARKER = b":::MLLOG"
MAX_RECORD = 1 << 20
"""A record that does not end within this many bytes is dropped; nothing longer is ever held."""

MAX_EARLIER_RUNS = 64

# The form in which mlperf_logging.mllog prints a record. Anything else is still read, by the JSON decoder, at a
# tenth of the speed. Groups: time, event type, key, number, other value, samples.
_NUMBER = rb"-?\d[\d.eE+-]*"
_USUAL = re.compile(
    rb' \{"namespace": "[^"\\\n]*", "time_ms": (\d{1,14}), "event_type": "([A-Z_]*)", "key": "([^"\\\n]*)", '
    rb'"value": (?:(' + _NUMBER + rb')|(null|true|false|"[^"\\\n]*"|\{[^{}\n]*\})), '
    rb'"metadata": \{"file": "[^"\\\n]*", "lineno": \d+(?:, "samples_count": (\d+))?'
    rb'(?:, "[\w.]+": ' + _NUMBER + rb")*\}\}"
)
_decode = json.JSONDecoder(strict=False).raw_decode
_NOTHING: Mapping[str, Any] = {}


class MllogReader:
    """The reader of ``:::MLLOG`` logs. Pure: no files, no clock; bounded memory whatever it is fed.

    The Run depends on the bytes alone, not on how they were cut into chunks.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._dropped = 0
        self._current = RunBuilder()
        self._earlier: list[RunBuilder] = []

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log; a line may be cut anywhere. Never raises for what they contain."""
        held = self._tail + chunk if self._tail else chunk
        pieces = held.split(MARKER)
        for piece in pieces[1:-1]:
            self._piece(piece)
        last = pieces[-1]
        if len(pieces) > 1 and not self._last_piece(last, b"}" in chunk):
            self._tail = MARKER + last
        else:
            self._tail = last[1 - len(MARKER) :]

    def run(self) -> Run:
        """The run of the last ``run_start``; what there is while none was seen."""
        builders = [*self._earlier, self._current]
        return next((b for b in reversed(builders) if b.run_start is not None), self._current).run(self._dropped)

    def runs(self) -> tuple[Run, ...]:
        """Every run in the log, oldest first (at most the last 65)."""
        return tuple(builder.run(self._dropped) for builder in (*self._earlier, self._current))

    def _piece(self, piece: bytes) -> None:
        """Take what stands between one marker and the next: a record, and whatever follows it."""
        if not self._usual(piece) and not self._unusual(piece):
            self._dropped += 1

    def _last_piece(self, piece: bytes, closes: bool) -> bool:
        """Take what stands behind the last marker if its record is over or whole; tell whether it was taken."""
        if b"\n" in piece or len(piece) >= MAX_RECORD:
            self._piece(piece)
            return True
        return closes and (self._usual(piece) or self._unusual(piece))

    def _usual(self, piece: bytes) -> bool:
        """Take a record in the usual form; tell whether it was one."""
        match = _USUAL.match(piece, 0, MAX_RECORD)
        if match is None:
            return False
        time, event, key, number, other, samples = match.groups()
        try:
            if number is not None:
                value: object = int(number) if number.isdigit() and len(number) < 19 else float(number)
            else:
                value = json.loads(other)
        except ValueError:
            return False
        return self._take(int(time), event, key, value, None if samples is None else float(samples), _NOTHING)

    def _unusual(self, piece: bytes) -> bool:
        """Take a record in any other JSON; tell whether it was one."""
        text = piece[:MAX_RECORD].split(b"\n", 1)[0].decode("utf-8", "replace").lstrip()
        try:
            record, _ = _decode(text)
        except (ValueError, RecursionError):
            return False
        if not isinstance(record, dict):
            return False
        time, key, metadata = _number(record.get("time_ms")), record.get("key"), record.get("metadata")
        if time is None or not 0 <= time < 1e14 or not isinstance(key, str):
            return False
        metadata = metadata if isinstance(metadata, dict) else _NOTHING
        event = str(record.get("event_type", "")).encode(errors="replace")
        samples = self._samples(metadata)
        return self._take(int(time), event, key.encode(errors="replace"), record.get("value"), samples, metadata)

    def _samples(self, metadata: Mapping[str, Any]) -> float | None:
        """Training samples consumed at a record: samples_count, or step times batch size, or epochs.

        ``epoch_num`` of older stacks is epochs, or samples where it is at least one batch.
        """
        batch = _number(self._current.hyperparameters.get("global_batch_size"))
        samples = _number(metadata.get("samples_count"))
        if samples is None and batch is not None:
            step = _number(metadata.get("step_num", metadata.get("step")))
            samples = None if step is None else step * batch
        if samples is None:
            samples = _number(metadata.get("epoch_num"))
            epoch = _number(self._current.hyperparameters.get("train_samples"))
            if samples is not None and batch is not None and epoch is not None and samples < batch:
                samples *= epoch
        return samples if samples is not None and 0 <= samples < math.inf else None

    def _take(
        self, ms: int, event: bytes, key: bytes, value: object, samples: float | None, metadata: Mapping[str, Any]
    ) -> bool:
        """Take one record; tell whether it could be understood."""
        take = _TAKE.get(key)
        if take is not None:
            understood = take(self, ms, value, samples, metadata)
        else:
            understood = True
            if event == b"POINT_IN_TIME":
                self._hyperparameter(key, value)
        if understood and ms > self._current.last:
            self._current.last = ms
        return understood

    def _hyperparameter(self, key: bytes, value: object) -> None:
        known = self._current.hyperparameters
        name = key.decode(errors="replace")
        if isinstance(value, (int, float, str)) and len(known) < MAX_HYPERPARAMETERS and len(name) <= 200:
            known.setdefault(name, value[:1000] if isinstance(value, str) else value)

    def _next_run(self) -> None:
        self._earlier = [*self._earlier, self._current][-MAX_EARLIER_RUNS:]
        self._current = RunBuilder()

    def _take_init_start(self, ms: int, *_: object) -> bool:
        current = self._current
        began = current.init_stop if current.run_start is None else current.run_start
        if began is not None and ms > began:
            self._next_run()
        if self._current.init_start is None:
            self._current.init_start = ms
        return True

    def _take_init_stop(self, ms: int, *_: object) -> bool:
        if self._current.init_stop is None:
            self._current.init_stop = ms
        return True

    def _take_run_start(self, ms: int, *_: object) -> bool:
        if 0 <= self._current.measured < ms:
            self._next_run()
        if self._current.run_start is None:
            self._current.run_start = ms
        return True

    def _take_run_stop(self, ms: int, _: object, __: object, metadata: Mapping[str, Any]) -> bool:
        current = self._current
        if current.run_stop is None:
            current.run_stop = ms
            current.measured = max(current.measured, ms)
            status = metadata.get("status")
            current.status = status[:1000] if isinstance(status, str) else None
        return True

    def _take_eval(self, ms: int, value: object, samples: float | None, *_: object) -> bool:
        loss = _number(value)
        if loss is None or samples is None:
            return False
        self._current.add_eval(samples, loss, ms)
        return True

    def _take_train(self, ms: int, value: object, samples: float | None, *_: object) -> bool:
        loss = _number(value)
        if loss is None or samples is None:
            return False
        self._current.add_train(samples, loss, ms)
        return True

    def _take_eval_start(self, ms: int, _: object, samples: float | None, *__: object) -> bool:
        _remember(self._current.eval_start, self._current.paused, samples, ms)
        return True

    def _take_eval_stop(self, ms: int, _: object, samples: float | None, *__: object) -> bool:
        _remember(self._current.eval_stop, self._current.resumed, samples, ms)
        return True

    def _take_block_start(self, ms: int, *_: object) -> bool:
        _remember({}, self._current.resumed, None, ms)
        return True

    def _take_block_stop(self, ms: int, *_: object) -> bool:
        _remember({}, self._current.paused, None, ms)
        return True

    def _take_tracked(self, ms: int, value: object, samples: float | None, *_: object) -> bool:
        if not isinstance(value, dict):
            return True
        loss = value.get("train_loss", value.get("reduced_train_loss"))
        if loss is not None:
            return self._take_train(ms, loss, samples)
        throughput, step_time = _number(value.get("throughput")), _number(value.get("train_step_time"))
        number = step_time if throughput is None else throughput
        if number is not None and len(self._current.stated) < MAX_POINTS:
            self._current.stated.append((ms, number, throughput is None))
        return True


def _remember(by_samples: dict[float, int], by_time: list[int], samples: float | None, ms: int) -> None:
    """Keep the time of an interval's edge, by its number of samples if it has one; the first printing counts."""
    if samples is None:
        if len(by_time) < MAX_POINTS:
            by_time.append(ms)
    elif len(by_samples) < MAX_POINTS:
        by_samples.setdefault(samples, ms)


# Key -> what takes it. The train loss was renamed from round to round (and once misspelt). In blocks,
# samples_count is cumulative up to v5.0 and the block's length from v5.1 on: it is not read.
_TAKE: dict[bytes, Callable[..., bool]] = {
    b"init_start": MllogReader._take_init_start,
    b"init_stop": MllogReader._take_init_stop,
    b"run_start": MllogReader._take_run_start,
    b"run_stop": MllogReader._take_run_stop,
    b"eval_accuracy": MllogReader._take_eval,
    b"eval_start": MllogReader._take_eval_start,
    b"eval_stop": MllogReader._take_eval_stop,
    b"block_start": MllogReader._take_block_start,
    b"block_stop": MllogReader._take_block_stop,
    b"train_loss": MllogReader._take_train,
    b"train_loss ": MllogReader._take_train,
    b"reduced_train_loss": MllogReader._take_train,
    b"tracked_stats": MllogReader._take_tracked,
}
