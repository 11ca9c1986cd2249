"""Log text in, a :class:`Run` out: the only channel from a trial to the sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


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

    Times ``*_ms`` are the log's own epoch milliseconds. ``throughput`` holds samples/s of each
    training block in order (the first is the cold one), ``eval_seconds`` the length of each eval.
    ``status`` is what ``run_stop`` claims; only :meth:`reached` says whether the target was met.
    """

    init_start_ms: int | None = None
    run_start_ms: int | None = None
    run_stop_ms: int | None = None
    last_ms: int | None = None
    status: str | None = None
    evals: tuple[Eval, ...] = ()
    throughput: tuple[float, ...] = ()
    eval_seconds: tuple[float, ...] = ()
    train: tuple[TrainPoint, ...] = ()
    hyperparameters: Mapping[str, object] = field(default_factory=dict)

    def reached(self, target: float) -> Eval | None:
        """The first eval with ``loss <= target`` (NaN never), or None."""
        return next((e for e in self.evals if e.loss <= target), None)


class LogReader(Protocol):
    """Turns the bytes of one log, in pieces of any size, into a Run."""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the log; a line may be cut anywhere."""
        ...

    def run(self) -> Run:
        """What the log says so far."""
        ...
