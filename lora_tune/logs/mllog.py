"""Reader of ``:::MLLOG`` text into a :class:`RunLog`: the only channel from a trial to the sweep.

A trial prints one record per line, ``:::MLLOG {json}``, with ``time_ms``, ``event_type``, ``key``, ``value`` and
``metadata``. :class:`MllogReader` finds the records anywhere in the bytes and keeps what a sweep needs.

Rules for repetitions in a log:

- An eval, train loss or hyperparameter printed by several ranks counts once, at its first printing.
- A file may contain several runs (``NEXP`` seeds, or a requeued job that appends). A new run begins with an
  ``init_start`` later than the current run's ``init_stop`` or ``run_start``, or with a ``run_start`` later than
  a measurement of the current run. Lines that a rank printed late carry their old time stamp, so they start no
  run. :meth:`MllogReader.run` is the run of the last ``run_start``; :meth:`MllogReader.runs` has all of them.
- A run that starts again without having stopped, and whose progress continues, is one run
  (:class:`~lora_tune.logs.run_builder.RunSequence`).
- ``init_start`` twice before ``init_stop`` is one initialisation, from the first one on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lora_tune.logs.lines import ReaderKind
from lora_tune.logs.log_files import printed_settings
from lora_tune.logs.run import MAX_TEXT, Eval, LogReader, RunLog, TrainPoint, as_number
from lora_tune.logs.run_builder import RunBuilder, RunSequence

# Form of a ``:::MLLOG`` record: patterns to find it in bytes, and its metadata in either form.


MAX_RECORD = 1 << 20
"""Bytes; a longer record is dropped, and nothing longer is held in memory."""

MARKER = b":::MLLOG"
LEAD = len(MARKER) + 16  # the marker, and the maximum of blanks before the brace
START = re.compile(rb":::MLLOG[ \t]{0,16}\{")

# Either a record as mlperf_logging.mllog prints it, with undecoded fields (time, key, value, samples, rest of the
# metadata); or the rest of a line that starts with a record in another form, for the JSON decoder, which is ten times
# slower. Text in a usual record has no brace, so no record starts within one, and lengths are bounded by MAX_RECORD.
_TEXT = rb'"[^"\\\n{]{0,4096}+"'
_NUMBER = rb"-?\d[\d.eE+-]{0,64}+"
RECORD = re.compile(
    rb':::MLLOG(?: \{"namespace": "", "time_ms": (\d{1,14}+), "event_type": "[A-Z_]{0,64}+", '
    rb'"key": "([^"\\\n{]{0,256}+)", "value": (null|%b|true|false|%b|\{[^{}\n]{0,4096}+\}), '
    rb'"metadata": \{"file": %b, "lineno": \d{1,9}+(?:, "samples_count": (\d{1,18}+))?([^{}\n]{0,4096}+)\}\}'
    rb"|([ \t]{0,16}+\{[^\n]*+))" % (_NUMBER, _TEXT, _TEXT)
)
SPEEDS, _LOSSES = ("throughput", "train_step_time"), ("train_loss", "reduced_train_loss")
PEAK = "max_memory_usage"
STATED = re.compile(rb'"(%b)": (%b|NaN|-?Infinity)[,}]' % ("|".join((*SPEEDS, *_LOSSES, PEAK)).encode(), _NUMBER))
STATUS = re.compile(rb'"status": "([^"]*)"')
decode = json.JSONDecoder(strict=False).raw_decode
Metadata = bytes | Mapping[str, Any]


def metric_name(metadata: Metadata) -> str:
    """The name of an eval's metric, if a log has several."""
    if isinstance(metadata, bytes) and b'"metric"' not in metadata:
        return ""
    return str(fields(metadata).get("metric", ""))[:MAX_TEXT]


def fields(metadata: Metadata) -> Mapping[str, Any]:
    """The metadata of either form as a mapping; empty if a number is malformed."""
    if not isinstance(metadata, bytes):
        return metadata
    try:
        parsed: dict[str, Any] = json.loads(b"{%b}" % metadata[2:])
    except ValueError:
        return {}
    return parsed


__all__ = ["MAX_RECORD", "Eval", "LogReader", "MllogReader", "RunLog", "TrainPoint"]

WINDOW = 4096
"""Bytes searched for records at a time; from 1 to 64 KiB the speed differs by less than a tenth."""

INSIDE_MS = 500
"""A record within this many ms after a pause began was written before it: the two clock readings are not atomic."""

_RUN_BEGINS = b'"key": "run_start"'
_KEPT = 40
"""Bytes of an unfinished line without a record that are held: longer than any printed setting."""


class MllogReader:
    """The reader of ``:::MLLOG`` logs. Pure: no files, no clock; bounded memory for any input.

    The RunLog depends only on the bytes, not on how they are cut into chunks.
    """

    __slots__ = ("_dropped", "_printed", "_prolog", "_runs", "_tail", "pauses")

    def __init__(self) -> None:
        self.pauses: Sequence[tuple[int, int]] = ()
        self._tail = b""
        self._printed: dict[bytes, bytes] = {}
        self._prolog = True  # no run has begun yet: configs are printed before that
        self._dropped = 0
        self._runs = RunSequence()

    def read_shortfall(self, ceiling: float) -> None:
        """Read maximised metrics, such as an accuracy, as ``ceiling`` minus the value. Call it before ``feed``."""
        self._runs.read_shortfall(ceiling)

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log; a line may be cut anywhere. Never raises because of their content.

        Outside records, braces are rare in training logs, and a single byte is found ten times faster than the marker,
        so the marker is searched for only in windows that begin near a brace.
        """
        held = self._tail + chunk if self._tail else chunk
        lines = held.rfind(b"\n") + 1
        if self._prolog:
            text, begun, _ = held.partition(_RUN_BEGINS)
            self._printed |= printed_settings(text)
            self._prolog = not begun
        at = 0
        while (brace := held.find(b"{", at, lines)) >= 0:
            end = held.find(b"\n", brace + WINDOW, lines) + 1 or lines
            self._records(RECORD.findall(held, max(at, brace - LEAD), end))
            at = end
        self._tail = self._line(held[lines:], whole=False)

    def _records(self, records: list[tuple[bytes, ...]]) -> None:
        """Take the matches of RECORD in whole lines."""
        find_take = _TAKE.get
        for time, key, value, samples, metadata, rest in records:
            take = find_take(key)
            if take:
                if not take(self, int(time), value, float(samples) if samples else None, metadata):
                    self._dropped += 1
            elif time:
                self._runs.current.announce(key, value)
            else:
                self._line(MARKER + rest, whole=True)

    def _line(self, line: bytes, *, whole: bool) -> bytes:
        """Take the records of a line, or of its available part; return the bytes to hold for the next call."""
        start, at = START.search(line), 0
        while start:
            at = start.end()
            following = START.search(line, at)
            end = following.start() if following else len(line)
            usual = RECORD.match(line, start.start(), end)
            if usual and usual[1]:
                self._records([usual.groups(b"")])
            elif not self._take_json(line[at - 1 : end][:MAX_RECORD]):
                if not whole and following is None and end - at < MAX_RECORD:
                    return line[start.start() :]
                self._dropped += 1
            start = following
        return b"" if whole else line[max(at, len(line) - _KEPT) :]

    def run(self) -> RunLog:
        """The run of the last ``run_start``; before the first one, the data so far."""
        started = (run for run in reversed(self._runs.all()) if run.run_start is not None)
        last = next(started, self._runs.current)
        return self._run(last)

    def runs(self) -> tuple[RunLog, ...]:
        """Every run in the log, oldest first (at most the last 33)."""
        return tuple(map(self._run, self._runs.all()))

    def _run(self, builder: RunBuilder) -> RunLog:
        whole = builder.without(self.pauses, INSIDE_MS) if self.pauses else builder
        return whole.run(self._dropped, self._printed)

    def _take_json(self, text: bytes) -> bool:
        """Take a record in any other JSON form, ignoring text after it; return whether it was understood."""
        try:
            record, _ = decode(text.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return False
        if not isinstance(record, dict):
            return False
        time, key, value, metadata = map(record.get, ("time_ms", "key", "value", "metadata"))
        ms = as_number(time)
        if ms is None or not 0 <= ms < 1e14 or not isinstance(key, str):
            return False
        take = _TAKE.get(key.encode(errors="replace"))
        if take is None:
            self._runs.current.announce(key.encode(errors="replace"), value)
        elif not take(self, int(ms), value, None, metadata if isinstance(metadata, dict) else {}):
            return False
        return True

    def _samples(self, metadata: Metadata) -> float | None:
        """Training samples consumed at a record: samples_count, or step times batch size, or epochs.

        ``epoch_num`` of older stacks is epochs, or samples if it is at least one batch.
        """
        values = fields(metadata)
        batch = as_number(self._runs.current.hyperparameter(b"global_batch_size"))
        samples = as_number(values.get("samples_count"))
        if samples is None and batch is not None:
            step = as_number(values.get("step_num", values.get("step")))
            samples = None if step is None else step * batch
        if samples is None:
            samples = as_number(values.get("epoch_num"))
            epoch = as_number(self._runs.current.hyperparameter(b"train_samples"))
            if samples is not None and batch is not None and epoch is not None and samples < batch:
                samples *= epoch
        return samples if samples is not None and 0 <= samples < math.inf else None

    # Each method takes one record of one key and returns whether it was understood. In the usual form ``value`` is
    # undecoded and ``metadata`` is the text after samples_count; else both are decoded and ``samples`` is None.

    def _run_stop(self, ms: int, _value: object, _samples: float | None, metadata: Metadata) -> bool:
        current = self._runs.current
        if current.run_stop is None:
            current.run_stop = ms
            current.measured = max(current.measured, ms)
            if isinstance(metadata, bytes):
                match = STATUS.search(metadata)
                status: object = match[1].decode(errors="replace") if match else None
            else:
                status = metadata.get("status")
            current.status = status[:MAX_TEXT] if isinstance(status, str) else None
        return True

    def _eval_accuracy(self, ms: int, value: object, samples: float | None, metadata: Metadata) -> bool:
        if (point := self._point(value, samples, metadata)) is None:
            return False
        self._runs.progressed(point[0], trained=False).add_eval(*point, ms, metric_name(metadata))
        return True

    def _point(self, value: object, samples: float | None, metadata: Metadata) -> tuple[float, float] | None:
        """Samples and loss; None if the record lacks one of them."""
        loss = as_number(value)
        if samples is None:
            samples = self._samples(metadata)
        return None if loss is None or samples is None else (samples, loss)

    def _tracked_stats(self, ms: int, value: object, samples: float | None, metadata: Metadata) -> bool:
        """Take a speed, a memory peak, a training loss, or several in one record, as v6.0 prints them after steps."""
        if isinstance(value, bytes):
            stats: Mapping[str, object] = {name.decode(): number for name, number in STATED.findall(value)}
        else:
            stats = value if isinstance(value, dict) else {}
        taken = True
        loss = next((name for name in _LOSSES if name in stats), "")
        if loss:
            taken = _TAKE[loss.encode()](self, ms, stats[loss], samples, metadata)
        peak = as_number(stats.get(PEAK))
        if peak is not None:
            self._runs.current.add_peak(peak)
        name = next((name for name in SPEEDS if name in stats), "")
        speed = as_number(stats.get(name))
        if speed is not None:
            self._runs.current.add_stated(ms, speed, name == "train_step_time")
        return taken


_Take = Callable[[MllogReader, int, object, float | None, Metadata], bool]


def _begins(name: str, run_of: Callable[[RunSequence, int], RunBuilder]) -> _Take:
    """Returns a handler of a time at a run's beginning, of which the first printing counts."""

    def take(reader: MllogReader, ms: int, _value: object, _samples: float | None, _metadata: Metadata) -> bool:
        current = run_of(reader._runs, ms)
        if getattr(current, name) is None:
            setattr(current, name, ms)
        current.mark(ms)
        return True

    return take


def _train_loss(*, scaled: bool) -> _Take:
    """Returns a handler of a train loss. v6.0 prints the tensor that it differentiates, ``scaled``."""

    def take(reader: MllogReader, ms: int, value: object, samples: float | None, metadata: Metadata) -> bool:
        if (point := reader._point(value, samples, metadata)) is None:
            return False
        reader._runs.progressed(point[0], trained=True).add_train(*point, ms, scaled=scaled)
        return True

    return take


def _block(add: Callable[[RunBuilder, float | None, int], None], *, placed: bool) -> _Take:
    """Returns a handler of a block's end or start. placed: read its samples (not in block marks, see ``_TAKE``)."""

    def take(reader: MllogReader, ms: int, _value: object, samples: float | None, metadata: Metadata) -> bool:
        at = reader._samples(metadata) if placed and samples is None else samples
        add(reader._runs.current, at if placed else None, ms)
        return True

    return take


# The train loss was renamed from round to round (and once misspelt). In block marks, samples_count is cumulative up to
# v5.0 and the block's length from v5.1 on: it is not read.
_TAKE: dict[bytes, _Take] = {
    b"init_start": _begins("init_start", RunSequence.initialised),
    b"init_stop": _begins("init_stop", lambda runs, _: runs.current),
    b"run_start": _begins("run_start", RunSequence.started),
    b"run_stop": MllogReader._run_stop,
    b"eval_accuracy": MllogReader._eval_accuracy,
    b"eval_start": _block(RunBuilder.add_eval_start, placed=True),
    b"eval_stop": _block(RunBuilder.add_eval_stop, placed=True),
    b"block_start": _block(RunBuilder.add_eval_stop, placed=False),
    b"block_stop": _block(RunBuilder.add_eval_start, placed=False),
    b"train_loss": _train_loss(scaled=False),
    b"train_loss ": _train_loss(scaled=False),
    b"reduced_train_loss": _train_loss(scaled=True),
    b"tracked_stats": MllogReader._tracked_stats,
}


KIND = ReaderKind(make=lambda **_: MllogReader(), settings={})
"""``workload.log.kind = "mllog"``: lines carry time stamps, so no clock is needed."""
