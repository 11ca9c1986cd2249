"""Builds a :class:`RunLog` from the values in a log, in bounded memory."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import Any, TypeVar

from lora_tune.logs.run import MAX_TEXT, Announced, Eval, RunLog, TrainPoint, as_number, plain

_Point = TypeVar("_Point", Eval, TrainPoint)

MAX_EVALS = 32768
"""Maximum evals stored per run; later ones are counted. Real runs have hundreds."""

MAX_POINTS = 4096
"""Maximum train points and marks stored per run (when full, every second train point is dropped)."""

MAX_METRICS = 8
"""Maximum metrics per run in addition to the first."""

MAX_HYPERPARAMETERS = 512
INSIDE_BLOCK_MS = 50
"""An eval result this soon after block_stop was computed before it: the stack includes evals in blocks."""


@dataclass(slots=True, eq=False)
class RunBuilder:
    """Collects the values of one run, in bounded memory, and builds the :class:`RunLog`. Times are epoch milliseconds.

    Several ranks may report the same value: the first report of a time, eval, train loss or hyperparameter counts.
    """

    ceiling: float | None = None  # of maximised metrics, stored as ceiling minus value
    metric: str | None = None
    others: dict[str, dict[float, tuple[float, int]]] = field(default_factory=dict)
    init_start: int | None = None
    init_stop: int | None = None
    run_start: int | None = None
    restarted: int | None = None  # the latest start after which this run continued
    run_stop: int | None = None
    status: str | None = None
    measured: int = -1  # the latest eval, train point or run_stop
    last: int = -1  # the latest start or stop of anything else
    evals: dict[float, tuple[float, int]] = field(default_factory=dict)
    missing_evals: int = 0
    other_values: int = 0
    again: int = 0  # evals after progress went back: of a program that restarted without a message
    lowest_again: float = math.inf
    train: dict[float, tuple[float, int]] = field(default_factory=dict)
    scaled: dict[float, tuple[float, int]] = field(default_factory=dict)  # times CP over the micro-batches of a step
    eval_start: dict[float, int] = field(default_factory=dict)
    eval_stop: dict[float, int] = field(default_factory=dict)
    paused: list[int] = field(default_factory=list)  # ends of training blocks with an unknown number of samples
    resumed: list[int] = field(default_factory=list)
    resumed_line: str = ""  # first line that states that training continues from a checkpoint
    paused_ms: int = 0  # excluded from the times, see ``without``
    overall: float | None = None
    peak: float | None = None
    stated: list[tuple[int, float, bool]] = field(default_factory=list)  # ms, samples/s; or ms, seconds per step, True
    announced: dict[bytes, object] = field(default_factory=dict)

    def add_eval(self, samples: float, loss: float, ms: int, metric: str = "") -> None:
        """Add an eval. metric: its name if the log has several, of which the first to appear counts."""
        loss = loss if self.ceiling is None else self.ceiling - loss
        if self.metric is None:
            self.metric = metric
        if metric != self.metric:
            others = self.others.setdefault(metric, {}) if len(self.others) < MAX_METRICS else {}
            if len(others) < MAX_EVALS:
                others.setdefault(samples, (loss, ms))
            return
        if samples in self.evals:
            self.other_values += self.evals[samples][0] != loss and not math.isnan(loss)
            went_back = self.again or samples < next(reversed(self.evals))
            if went_back and ms >= self.measured + self._first_eval_ms() / 2:
                self.again, self.lowest_again = self.again + 1, min(self.lowest_again, loss)
            return
        if len(self.evals) == MAX_EVALS:
            self.missing_evals += 1
            return
        self.evals[samples] = loss, ms
        if ms > self.measured:
            self.measured = ms

    def _first_eval_ms(self) -> float:
        """Time until the first eval; lines of another rank, and summaries, arrive sooner after the last eval."""
        _, ms = next(iter(self.evals.values()))
        return ms - self.run_start if self.run_start is not None else math.inf

    def add_train(self, samples: float, loss: float, ms: int, *, scaled: bool = False) -> None:
        """Add a train loss. scaled: printed times CP over the micro-batches of a step, see ``_train_points``."""
        train = self.scaled if scaled else self.train
        if samples not in train:
            if len(train) == MAX_POINTS:
                for old in [*train][::2]:
                    del train[old]
            train[samples] = loss, ms
            if ms > self.measured:
                self.measured = ms

    def _train_points(self, printed: Mapping[bytes, object]) -> dict[float, tuple[float, int]]:
        """The train losses, scaled ones corrected: MLPerf v6.0's implementation prints what Megatron scaled in place.

        loss = printed * gradient_accumulation_steps / CP. CP is in the log by its disclosure (6.1) or in a setting that
        the program prints. If either is unknown, finite values are meaningless and are omitted.
        """
        if not self.scaled:
            return self.train
        micro_batches = as_number(self.hyperparameter(b"gradient_accumulation_steps"))
        names = (b"context_parallelism", b"context_parallel_size", b"cp")
        stated = (self.hyperparameter(name) or plain(printed.get(name)) for name in names)
        cp = next((number for number in map(as_number, stated) if number), None)
        factor = micro_batches / cp if micro_batches and cp else math.nan
        points = {
            samples: (loss * factor, ms)
            for samples, (loss, ms) in self.scaled.items()
            if 0 < factor < math.inf or not math.isfinite(loss)
        }
        return {**points, **self.train}

    def add_eval_start(self, samples: float | None, ms: int) -> None:
        """Add the end of a training block, with its number of samples if known."""
        self._add_mark(self.paused, self.eval_start, samples, ms)

    def add_eval_stop(self, samples: float | None, ms: int) -> None:
        """Add the start of a training block, with its number of samples if known."""
        self._add_mark(self.resumed, self.eval_stop, samples, ms)

    def _add_mark(self, unplaced: list[int], placed: dict[float, int], samples: float | None, ms: int) -> None:
        self.mark(ms)
        if samples is None:
            if len(unplaced) < MAX_POINTS:
                unplaced.append(ms)
        elif samples not in placed and len(placed) < MAX_POINTS:
            placed[samples] = ms

    def add_stated(self, ms: int, number: float, is_step_time: bool) -> None:
        """Add a block's speed as the trial prints it: samples/s, or seconds per optimizer step."""
        self.mark(ms)
        if len(self.stated) < MAX_POINTS:
            self.stated.append((ms, number, is_step_time))

    def add_peak(self, gib: float) -> None:
        """Add the peak memory of a GPU so far, as a rank prints it."""
        if 0 < gib < math.inf:
            self.peak = max(gib, self.peak or 0.0)

    def mark(self, ms: int) -> None:
        """Record the time of any log entry."""
        if ms > self.last:
            self.last = ms

    def announce(self, name: bytes, value: object) -> None:
        """Add a hyperparameter: a plain value, or JSON bytes that are decoded on access."""
        announced = self.announced
        if name not in announced and len(announced) < MAX_HYPERPARAMETERS and len(name) <= MAX_TEXT:
            if isinstance(value, str):
                value = value[:MAX_TEXT]
            if not name.isascii():
                name = name.decode(errors="replace").encode()
            if isinstance(value, (bytes, int, float, str)) and value != b"null":
                announced[name] = value

    def hyperparameter(self, name: bytes) -> object:
        """The number, text or boolean announced under this name, or None."""
        return plain(self.announced.get(name))

    def without(self, pauses: Sequence[tuple[int, int]], late_ms: int) -> RunBuilder:
        """The same run without its job's pauses.

        pauses: spans in epoch milliseconds, in ascending order. A span with a measurement more than ``late_ms`` after
        its begin did not pause the training and is not subtracted.
        """
        points = sorted(
            ms for kept in (self.evals, self.train, self.scaled, *self.others.values()) for _, ms in kept.values()
        )
        spans = [(a, b) for a, b in pauses if bisect_right(points, a + late_ms) >= bisect_left(points, b)]
        if not spans:
            return self

        def before(ms: int) -> int:
            return ms - sum(min(max(ms - a, 0), b - a) for a, b in spans)

        times = {name: _shifted(getattr(self, name), before) for name in _TIMES}
        return replace(self, **times, paused_ms=sum(b - a for a, b in spans))

    def run(self, dropped_lines: int = 0, printed: Mapping[bytes, object] = MappingProxyType({})) -> RunLog:
        """Build the RunLog. printed: settings that the log states outside its records."""
        start, last = self.run_start, max(self.last, self.measured)
        throughput, eval_seconds = self._timing()
        # Speeds printed by a resumed program may include the samples of earlier sessions.
        overall = None if self.resumed_line else self.overall
        shown = {name: printed[name] for name in (b"fp4", b"fp8", b"healing_iter") if name in printed}
        return RunLog(
            init_start_ms=self.init_start,
            init_stop_ms=self.init_stop,
            run_start_ms=start,
            run_stop_ms=self.run_stop,
            last_ms=last if last >= 0 else None,
            status=self.status,
            evals=_since(start, self.evals, Eval),
            throughput=throughput,
            stated_throughput=() if self.resumed_line else self._stated_throughput(),
            overall_throughput=overall,
            peak_gib=self.peak,
            eval_seconds=eval_seconds,
            train=_since(start, self._train_points(printed), TrainPoint),
            hyperparameters=Announced({**shown, **self.announced}),
            dropped_lines=dropped_lines,
            paused_seconds=self.paused_ms / 1000,
            resumed=self.resumed_line,
            missing_evals=self.missing_evals,
            other_values=self.other_values,
            again=self.again,
            lowest_again=self.lowest_again,
            metric=self.metric or "",
            other_metrics={name: _since(start, evals, Eval) for name, evals in self.others.items()},
        )

    def _timing(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Samples/s of each block and seconds of each eval; see :class:`RunLog`.

        An eval begins at its eval_start, else where the block before it stopped, and ends at its eval_stop, else where
        the next block starts. Two public stacks print both block marks after the eval: the eval's duration is then
        unknown, and a block's speed is the median over its train points.
        """
        throughput: list[float] = []
        eval_seconds: list[float] = []
        paused, resumed = sorted(self.paused), sorted(self.resumed)
        printed = sorted((samples, ms) for samples, (_, ms) in {**self.scaled, **self.train}.items())
        if not (printed or paused or resumed or self.eval_start or self.eval_stop):
            return (math.nan,) * bool(self.evals), ()  # evals alone do not show when training continued
        ended, done = self.run_start, 0.0
        for samples, (_, ms) in sorted(self.evals.items()):
            began = self.eval_start.get(samples)
            if began is None:
                stops = bisect_left(paused, ms - INSIDE_BLOCK_MS)
                began = paused[stops - 1] if stops and (ended is None or paused[stops - 1] > ended) else None
            stopped = self.eval_stop.get(samples)
            if stopped is None:
                starts = bisect_left(resumed, ms)
                stopped = resumed[starts] if starts < len(resumed) else ms
            if began is not None:
                eval_seconds.append((stopped - began) / 1000)
            # The start of a run that resumed from a checkpoint is unknown.
            whole = began is not None and not (self.resumed_line and not done)
            rate = _rate(samples - done, ended, began) if whole else _train_rate(printed, done, samples)
            if not math.isnan(rate) or not throughput:
                throughput.append(rate)
            ended, done = stopped, samples
        return tuple(throughput), tuple(eval_seconds)

    def _stated_throughput(self) -> tuple[float, ...]:
        """The first printed speed after each eval in samples/s; seconds per step need the global batch size."""
        evals = sorted([ms for _, ms in self.evals.values()])
        blocks: dict[int, float] = {}
        batch = None
        if any(is_step_time for _, _, is_step_time in self.stated):
            batch = as_number(self.hyperparameter(b"global_batch_size"))
        for ms, number, is_step_time in self.stated:
            if not is_step_time:
                blocks.setdefault(bisect_left(evals, ms), number)
            elif batch is not None and number > 0:
                blocks.setdefault(bisect_left(evals, ms), batch / number)
        return tuple([rate for _, rate in sorted(blocks.items())])


_TIMES = frozenset(
    {
        "init_start", "init_stop", "run_start", "restarted", "run_stop", "measured", "last", "evals", "others", "train",
        "scaled", "eval_start", "eval_stop", "paused", "resumed", "stated",
    }
)  # fmt: skip
"""Attributes of a builder that contain times."""


def _shifted(kept: Any, at: Callable[[int], int]) -> Any:
    """Apply ``at`` to the times in a time, (loss, time), times by samples, a list of either, or such by metric."""
    if isinstance(kept, dict):
        return {name: _shifted(value, at) for name, value in kept.items()}
    if isinstance(kept, list):
        return [_shifted(value, at) for value in kept]
    if isinstance(kept, tuple):  # (loss, ms), or (ms, speed, whether per step)
        return (at(kept[0]), *kept[1:]) if len(kept) == 3 else (kept[0], at(kept[1]))
    return kept if kept is None or kept < 0 else at(kept)


def _since(start: int | None, points: Mapping[float, tuple[float, int]], kind: type[_Point]) -> tuple[_Point, ...]:
    """The points with seconds since ``start``, in order of samples."""
    zero = math.nan if start is None else start
    new = tuple.__new__  # half the time of calling the NamedTuple
    return tuple([new(kind, (samples, loss, (ms - zero) / 1000)) for samples, (loss, ms) in sorted(points.items())])


def _train_rate(printed: Sequence[tuple[float, int]], after: float, until: float) -> float:
    """Median samples/s between consecutive train points in ``(after, until)``; NaN for fewer than two points.

    printed: samples and time of every train point, in order of samples.
    """
    begin, end = bisect_right(printed, (after, math.inf)), bisect_left(printed, (until, -math.inf))
    rates = [_rate(b - a, a_ms, b_ms) for (a, a_ms), (b, b_ms) in pairwise(printed[begin:end])]
    rates = [rate for rate in rates if not math.isnan(rate)]
    return median(rates) if rates else math.nan


def _rate(samples: float, start: int | None, stop: int | None) -> float:
    """Samples/s between two times in ms; NaN unless stop is after start."""
    return samples / ((stop - start) / 1000) if start is not None and stop is not None and stop > start else math.nan


# The runs of a log: where the next one begins, and where the same one continues.


MAX_EARLIER_RUNS = 32

_OF_A_RUN = (b"opt_base_learning_rate", b"global_batch_size")
"""Runs with different values of these are distinct, wherever their progress begins."""


class RunSequence:
    """The runs of one log; ``current`` is the one to which the next record belongs. Times are epoch milliseconds.

    A program that restarts inside its job prints its start again. If the run before it did not stop, and the next eval
    or train point is beyond the first one of that run, training resumed from a checkpoint: it is one run, timed from
    its first start. Training that begins again with the first point is a new run.
    """

    def __init__(self) -> None:
        self._earlier: list[RunBuilder] = []
        self.current = RunBuilder()

    def read_shortfall(self, ceiling: float) -> None:
        """Store maximised metrics as ``ceiling`` minus the value."""
        self.current.ceiling = ceiling

    def all(self) -> list[RunBuilder]:
        """Every run, oldest first (at most the last 33)."""
        return [*self._earlier, self.current]

    def initialised(self, ms: int) -> RunBuilder:
        """The run to which an ``init_start`` at this time belongs."""
        current = self.current
        started = current.init_stop if current.run_start is None else current.run_start
        began = started if current.restarted is None else current.restarted
        return self._next() if began is not None and ms > began else current

    def started(self, ms: int) -> RunBuilder:
        """The run to which a ``run_start`` at this time belongs."""
        return self._next() if 0 <= self.current.measured < ms else self.current

    def progressed(self, samples: float, *, trained: bool) -> RunBuilder:
        """The run to which a train point or eval at so many samples belongs."""
        if self._earlier and self.current.measured < 0:
            self._go_on(samples, trained=trained)
        return self.current

    def _next(self) -> RunBuilder:
        self._earlier = [*self._earlier, self.current][-MAX_EARLIER_RUNS:]
        self.current = RunBuilder(ceiling=self.current.ceiling)
        return self.current

    def _go_on(self, samples: float, *, trained: bool) -> None:
        """Before its first point, merge the current run into the last measured run if it continues that one."""
        at = next((at for at in reversed(range(len(self._earlier))) if self._earlier[at].measured >= 0), None)
        if at is not None and _goes_on(self._earlier[at], self.current, samples, trained=trained):
            later, self.current = self.current, self._earlier[at]
            del self._earlier[at:]
            _join(self.current, later)


def _goes_on(run: RunBuilder, later: RunBuilder, samples: float, *, trained: bool) -> bool:
    """Whether the first point of ``later``, a train point or eval, continues ``run`` rather than starting again."""
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
    """Add to ``run`` the records of its continuation ``later``, which has no point yet."""
    run.restarted = later.init_start if later.run_start is None else later.run_start
    run.last = max(run.last, later.last)
    # If the end interrupted an eval, its start is in the next session.
    run.eval_start = {samples: ms for samples, ms in run.eval_start.items() if samples in run.evals}
    run.eval_start = later.eval_start | run.eval_start
    run.eval_stop = later.eval_stop | run.eval_stop
    run.paused = [*run.paused, *later.paused][:MAX_POINTS]
    run.resumed = [*run.resumed, *later.resumed][:MAX_POINTS]
    run.stated = [*run.stated, *later.stated][:MAX_POINTS]
    run.add_peak(later.peak or 0.0)
    for name, value in later.announced.items():
        run.announce(name, value)


# Lines in which programs state that training continues from a checkpoint.


_NOTHING = (
    r"(?!\W*(?:(?:the )?checkpoint\W+)?(?:none|null|false|no |''|\"\"|(?:global )?(?:step|epoch|iteration|iter)\W*0\b))"
)
_GOES_ON = re.compile(
    rf"(?i)\bcontinuing training from {_NOTHING}(?:a |the |global |checkpoint|step|epoch|iter)"
    rf"|\bresum(?:ing|ed) (?:the )?(?:training |run |optimizer )?(?:from|at) {_NOTHING}"
    r"|\bcheckpoint detected, resuming\b"
    r"|\brestored all states from the checkpoint\b"
    r"|\bwill skip the first [1-9]\d* (?:epochs|batches)"
)
"""Messages of transformers' Trainer and its examples, Lightning, and usual scripts. Loading a base model's weights
("Loading checkpoint shards") does not match."""

LONGEST = 400
"""Characters of a line that are examined."""


def states_resume(line: str) -> bool:
    """Whether a line states that training continues from a checkpoint after its beginning."""
    if "esum" not in line and "ontinuing" not in line and "estored" not in line and "ill skip" not in line:
        return False  # nearly all lines; a word search takes a tenth of the patterns' time
    return _GOES_ON.search(line[:LONGEST]) is not None
