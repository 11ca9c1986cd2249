"""The runs of a log, one after another: where the next one begins, and where the same one goes on."""

from __future__ import annotations

import math

from lora_tune.logs.run_builder import MAX_POINTS, RunBuilder

MAX_EARLIER_RUNS = 32

_OF_A_RUN = (b"opt_base_learning_rate", b"global_batch_size")
"""Runs that announce other values of these are not one, wherever their progress begins."""


class RunSequence:
    """The runs of one log, ``current`` the one that its next record belongs to. Times are epoch milliseconds.

    A program that starts again inside its job prints its start again. Where the run before it did not stop, and the
    first eval or train point that follows lies beyond the first of that run, training went on from a checkpoint: it is
    one run, timed from its first start. Training that begins again with the first point is a run of its own.
    """

    __slots__ = ("_ceiling", "_earlier", "current")

    def __init__(self) -> None:
        self._ceiling: float | None = None
        self._earlier: list[RunBuilder] = []
        self.current = RunBuilder()

    def read_shortfall(self, ceiling: float) -> None:
        """Keep evals that rise as what they lack of ``ceiling``."""
        self._ceiling = self.current.ceiling = ceiling

    def all(self) -> list[RunBuilder]:
        """Every run, oldest first (the last 33 at most)."""
        return [*self._earlier, self.current]

    def initialised(self, ms: int) -> RunBuilder:
        """The run that an ``init_start`` at this time belongs to."""
        current = self.current
        started = current.init_stop if current.run_start is None else current.run_start
        began = started if current.restarted is None else current.restarted
        return self._next() if began is not None and ms > began else current

    def started(self, ms: int) -> RunBuilder:
        """The run that a ``run_start`` at this time belongs to."""
        return self._next() if 0 <= self.current.measured < ms else self.current

    def progressed(self, samples: float, *, trained: bool) -> RunBuilder:
        """The run that a train point or an eval at so many samples belongs to."""
        if self._earlier and self.current.measured < 0:
            self._go_on(samples, trained=trained)
        return self.current

    def _next(self) -> RunBuilder:
        self._earlier = [*self._earlier, self.current][-MAX_EARLIER_RUNS:]
        self.current = RunBuilder(ceiling=self._ceiling)
        return self.current

    def _go_on(self, samples: float, *, trained: bool) -> None:
        """Make the current run, before its first point, a part of the last one that measured something, or not."""
        at = next((at for at in reversed(range(len(self._earlier))) if self._earlier[at].measured >= 0), None)
        if at is not None and _goes_on(self._earlier[at], self.current, samples, trained=trained):
            later, self.current = self.current, self._earlier[at]
            del self._earlier[at:]
            _join(self.current, later)


def _goes_on(run: RunBuilder, later: RunBuilder, samples: float, *, trained: bool) -> bool:
    """Whether the first point of ``later``, a train point or an eval, is progress of ``run`` and no new beginning."""
    if run.run_start is None or run.run_stop is not None:
        return False
    for name in _OF_A_RUN:
        before, now = run.hyperparameter(name), later.hyperparameter(name)
        if before is not None and now is not None and before != now:
            return False
    train = run.train or run.scaled
    of_its_kind = train if trained else run.evals
    beyond = next(iter(of_its_kind)) if of_its_kind else max(train or run.evals, default=math.inf)
    return samples > beyond


def _join(run: RunBuilder, later: RunBuilder) -> None:
    """Add what a run says that goes on with ``run``; ``later`` has no point yet."""
    run.restarted = later.init_start if later.run_start is None else later.run_start
    run.last = max(run.last, later.last)
    # Of an eval that the end cut off, the next attempt says when it began.
    run.eval_start = {samples: ms for samples, ms in run.eval_start.items() if samples in run.evals}
    for samples, ms in later.eval_start.items():
        run.eval_start.setdefault(samples, ms)
    for samples, ms in later.eval_stop.items():
        run.eval_stop.setdefault(samples, ms)
    run.paused = [*run.paused, *later.paused][:MAX_POINTS]
    run.resumed = [*run.resumed, *later.resumed][:MAX_POINTS]
    run.stated = [*run.stated, *later.stated][:MAX_POINTS]
    run.add_peak(later.peak or 0.0)
    for name, value in later.announced.items():
        run.announce(name, value)
