"""What a log states, whatever its format."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Eval(NamedTuple):
    """One evaluation of a run.

    samples: training samples consumed when it was made.
    loss: the eval loss (MLLOG's ``eval_accuracy``); may be NaN or infinite.
    seconds: since ``run_start``, from the log's own time stamps; NaN when ``run_start`` was not seen.
    """

    samples: float
    loss: float
    seconds: float


class TrainPoint(NamedTuple):
    """A training-loss reading: samples consumed, loss, seconds since ``run_start``."""

    samples: float
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """What a log says so far; a snapshot, never changed.

    Times ``*_ms`` are the log's own epoch milliseconds. ``status`` is what ``run_stop`` claims; only
    :meth:`reached` says whether the target was met. ``evals`` and ``train`` are in order of samples.

    throughput: samples/s of each training block in order, by the log's clock: samples between two evals over the
        seconds from the end of one eval to the start of the next. The first is the cold block (NaN if unknown);
        a later block whose time cannot be told is left out.
    stated_throughput: samples/s as the trial itself printed them (``tracked_stats``). They leave out what happens
        between steps: up to 60% too high for the first block of the public runs, up to 5% for warm ones.
    overall_throughput: samples/s of the whole run as the trial states it at its end, evals included.
    peak_gib: the most memory that a GPU held, as the trial prints it (``max_memory_usage``); our recipes mean GiB.
    eval_seconds: the length of each eval whose start the log shows.
    hyperparameters: every scalar that the trial announced, under its MLLOG key (``opt_base_learning_rate``, ...), and
        ``fp4``, ``fp8`` and ``healing_iter`` where it printed them.
    dropped_lines: records that were cut, malformed, or longer than the reader holds.
    missing_evals: how many evals were printed beyond those that the reader keeps: what they said is not known.
    paused_seconds: how long its job stood still, which is left out of all its times.
    resumed: the line that says that training goes on from a checkpoint, "" where none does; what such a program prints
        of its speed is not believed.
    other_values: how many evals were printed for progress that has one, with another loss: they do not count.
    again, lowest_again: how many evals were printed, and the lowest, after progress went back: a program that started
        again and did not say so. They do not count.
    metric: the name of what ``evals`` are of, where the log tells several apart (stable_diffusion's FID and CLIP).
    other_metrics: the evals of the others, by name.
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
        """The evals of a metric by its name; of the first where the log names none or that one."""
        return self.evals if metric in ("", self.metric) else self.other_metrics.get(metric, ())

    def reached(self, target: float) -> Eval | None:
        """The first eval with ``loss <= target`` (NaN never), or None."""
        return next((e for e in self.evals if e.loss <= target), None)

    @property
    def printed_evals(self) -> int:
        """How many evals the log shows, those included that the reader does not keep."""
        return len(self.evals) + self.missing_evals

    @property
    def init_seconds(self) -> float | None:
        """``init_stop - init_start``: paid for by the cluster, not scored. None until both are seen."""
        return _seconds_between(self.init_start_ms, self.init_stop_ms)

    @property
    def packed_seconds(self) -> float | None:
        """How long a run that shared its GPU really took: its times are those that it would have alone.

        None for a run that had its GPU for itself, and for one that was cut short.
        """
        return as_number(self.hyperparameters.get("packed_seconds"))

    @property
    def seconds(self) -> float | None:
        """``run_stop - run_start``: the scored time of a run that reached its target. None until both are seen."""
        return _seconds_between(self.run_start_ms, self.run_stop_ms)


class LogReader(Protocol):
    """Turns the bytes of one log, in pieces of any size, into a Run."""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log; a line may be cut anywhere."""
        ...

    def run(self) -> RunLog:
        """What the log says so far."""
        ...


@runtime_checkable
class LeavesOutPauses(Protocol):
    """A reader that can leave the pauses of its job out of the times that it states.

    pauses: spans in epoch milliseconds by the clock of its times, in rising order; set at any time.
    """

    pauses: Sequence[tuple[int, int]]


_FLOAT32 = re.compile(r"[-+]?\d+\.\d+f[-+]?\d+")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+\.\d+|[-+]?\d{1,3}(?:,\d{3}){2,}")


def as_number(value: Any) -> float | None:
    """The value as a float; None for what is no number. NaN, infinities, and digits in a text are numbers.

    So are Julia's ``0.5f0``, ``1,234.5`` and ``1,234,567``; ``1,234`` may have a decimal comma and is none.
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
    """As :func:`as_number`, for what counts steps, samples or epochs: ``1,234`` is a thousand and more."""
    grouped = isinstance(value, str) and _THOUSANDS.fullmatch(value)
    return as_number(value.replace(",", "") if grouped else value)


def _seconds_between(start: int | None, stop: int | None) -> float | None:
    return None if start is None or stop is None else (stop - start) / 1000


# What a trial announces of itself: values by name, held as printed and decoded when they are asked for.


MAX_TEXT = 1000
"""Characters of an announced text that are kept."""


class Announced(Mapping[str, object]):
    """Hyperparameters by name, decoded when they are asked for: most never are."""

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
    """The value; decoded where it is a JSON number, text or truth value in bytes."""
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
