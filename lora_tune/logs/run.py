"""Contents of a parsed log, independent of its format."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Eval(NamedTuple):
    """One evaluation of a run.

    samples: training samples consumed before it. loss: the eval loss (MLLOG's ``eval_accuracy``); may be NaN or
    infinite. seconds: since ``run_start``, by the log's time stamps; NaN without ``run_start``.
    """

    samples: float
    loss: float
    seconds: float


class TrainPoint(NamedTuple):
    """One training loss: samples consumed, loss, seconds since ``run_start``."""

    samples: float
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """Immutable snapshot of a parsed log.

    Times ``*_ms`` are epoch milliseconds of the log. ``status`` is the claim of ``run_stop``; only :meth:`reached`
    tells whether the target was met. ``evals`` and ``train`` are in order of samples.

    throughput: samples/s of each training block in order, by the log's clock: samples between two evals over the
        seconds from the end of one eval to the start of the next. The first is the cold block (NaN if unknown);
        later blocks with unknown times are omitted.
    stated_throughput: samples/s as printed by the trial (``tracked_stats``). They exclude time between steps: up to
        60% too high for the first block of the public runs, up to 5% for warm ones.
    overall_throughput: samples/s of the whole run as the trial states it at its end, including evals.
    peak_gib: peak memory of a GPU, as the trial prints it (``max_memory_usage``); GiB in the built-in recipes.
    eval_seconds: duration of each eval whose start is logged.
    hyperparameters: every scalar that the trial announced, by MLLOG key (``opt_base_learning_rate``, ...), and
        ``fp4``, ``fp8`` and ``healing_iter`` if printed.
    dropped_lines: records that were cut, malformed, or too long for the reader.
    missing_evals: number of evals beyond those that the reader stores; their values are unknown.
    paused_seconds: total pause of the job, which is excluded from all times.
    resumed: the line that states that training continues from a checkpoint, or ""; such a program's own speeds are
        ignored.
    other_values: number of evals at the progress of an earlier one with another loss; they are ignored.
    again, lowest_again: number and minimum of evals after progress went back, i.e. of a program that restarted
        without a message. They are ignored.
    metric: name of the metric of ``evals``, if the log has several (stable_diffusion's FID and CLIP).
    other_metrics: evals of the other metrics, by name.
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
    overall_throughput: float | None = None
    peak_gib: float | None = None
    eval_seconds: tuple[float, ...] = ()
    train: tuple[TrainPoint, ...] = ()
    hyperparameters: Mapping[str, object] = field(default_factory=dict)
    dropped_lines: int = 0
    paused_seconds: float = 0.0
    resumed: str = ""
    missing_evals: int = 0
    other_values: int = 0
    again: int = 0
    lowest_again: float = math.inf
    metric: str = ""
    other_metrics: Mapping[str, tuple[Eval, ...]] = field(default_factory=dict)

    def evals_of(self, metric: str) -> tuple[Eval, ...]:
        """The evals of a metric by name; of the first metric for "" or its own name."""
        return self.evals if metric in ("", self.metric) else self.other_metrics.get(metric, ())

    def reached(self, target: float) -> Eval | None:
        """The first eval with ``loss <= target`` (NaN never), or None."""
        return next((e for e in self.evals if e.loss <= target), None)

    @property
    def printed_evals(self) -> int:
        """Number of evals in the log, including those that the reader does not store."""
        return len(self.evals) + self.missing_evals

    @property
    def init_seconds(self) -> float | None:
        """``init_stop - init_start``: uses node-hours, but is not scored. None until both are known."""
        return _seconds_between(self.init_start_ms, self.init_stop_ms)

    @property
    def packed_seconds(self) -> float | None:
        """Actual duration of a run that shared its GPU, whose times are those of an unshared run.

        None for a run on an unshared GPU, and for one that was cut short.
        """
        return as_number(self.hyperparameters.get("packed_seconds"))

    @property
    def seconds(self) -> float | None:
        """``run_stop - run_start``: the scored time of a run that reached its target. None until both are known."""
        return _seconds_between(self.run_start_ms, self.run_stop_ms)


class LogReader(Protocol):
    """Parses the bytes of one log, in pieces of any size, into a RunLog."""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log; a line may be cut anywhere."""
        ...

    def run(self) -> RunLog:
        """The run so far."""
        ...


@runtime_checkable
class ExcludesPauses(Protocol):
    """A reader that can exclude its job's pauses from its times.

    pauses: spans in epoch milliseconds by the clock of its times, in ascending order; can be set at any time.
    """

    pauses: Sequence[tuple[int, int]]


_FLOAT32 = re.compile(r"[-+]?\d+\.\d+f[-+]?\d+")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+\.\d+|[-+]?\d{1,3}(?:,\d{3}){2,}")


def as_number(value: Any) -> float | None:
    """Convert to float; None if it is not a number. NaN, infinities and numeric text are numbers.

    So are Julia's ``0.5f0``, ``1,234.5`` and ``1,234,567``; ``1,234`` may have a decimal comma and is None.
    """
    if isinstance(value, str) and "," in value and _GROUPED.fullmatch(value):
        value = value.replace(",", "")
    elif isinstance(value, str) and "f" in value and _FLOAT32.fullmatch(value):
        value = value.replace("f", "e")
    try:
        return None if value is True or value is False else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def as_count(value: Any) -> float | None:
    """Like :func:`as_number`, for counts of steps, samples or epochs: ``1,234`` is 1234."""
    grouped = isinstance(value, str) and _THOUSANDS.fullmatch(value)
    return as_number(value.replace(",", "") if grouped else value)


def _seconds_between(start: int | None, stop: int | None) -> float | None:
    return None if start is None or stop is None else (stop - start) / 1000


# Values that a trial announces: stored as printed, decoded on access.


MAX_TEXT = 1000
"""Characters of an announced text that are kept."""


class Announced(Mapping[str, object]):
    """Hyperparameters by name, decoded on access, since most are never read."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[bytes, object]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> object:
        return plain(self._values[name.encode(errors="replace")])

    def __iter__(self) -> Iterator[str]:
        return (name.decode(errors="replace") for name in self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(dict(self))


def plain(value: object) -> object:
    """The value; bytes of a JSON number, text or boolean are decoded."""
    if not isinstance(value, bytes):
        return value
    if value.isdigit() and len(value) < 19:
        return int(value)
    if value[:1] == b'"':
        return value[1:-1].decode(errors="replace")[:MAX_TEXT]
    try:
        return float(value)
    except ValueError:
        return {b"true": True, b"false": False}.get(value)
