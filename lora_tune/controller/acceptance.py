"""Whether a result can be true. Pure functions of (study, trial, job status, log): a result that cannot is refused.

What a log claims is checked against what the job's own life allows: by the clocks that nobody sets (the runner's, the
kernel's, Slurm's elapsed time), by the order of its own points, by the values that the trial was given, and by what a
loss can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import Decimal

from lora_tune.base.paths import ATTEMPT_KEY, token_in
from lora_tune.base.text import counted
from lora_tune.config.objective import goal_of
from lora_tune.config.study import Study
from lora_tune.controller.beginnings import begun_above_zero
from lora_tune.controller.policy import FLUSH, lost_evals
from lora_tune.launchers.base import JobStatus
from lora_tune.logs.failures import Diagnosis, FailureKind
from lora_tune.logs.run import Eval, RunLog, TrainPoint
from lora_tune.mlperf.benchmark import benchmark_names
from lora_tune.search.objectives import objective_of
from lora_tune.store.records import Attempt, Trial, Value
from lora_tune.workloads.record import key_of

ORDER_SECONDS = 1.0
"""How far time stamps of several ranks may run backwards while samples grow; in 2,078 public logs they never do."""

LIFE_SECONDS = 2.0
"""How much longer than its job a run without time stamps may seem: its lines are seen late, one more than another."""

STEP_SECONDS = 0.5
"""A wall clock that was set by less than this while a job ran does not change its result by more."""

ROUNDING = 1e-3
"""Relative difference between a value and the same value as a program prints it."""

FEW_DIGITS = 0.0505
"""Share by which a value of two printed digits may differ. One digit says too little: 1e-4 may be another trial's."""

LARGEST_LOSS = 1e6
"""A loss below minus this many times the target (or 1) is no loss."""

STATED_AS_GIVEN = frozenset(
    {
        "opt_base_learning_rate", "global_batch_size", "opt_learning_rate_training_steps", "max_steps", "lora_rank",
        "lora_alpha",
    }
)  # fmt: skip
"""MLLOG keys under which programs state a parameter as it was given. Under others they state derived values."""


def why_untrue(
    study: Study,
    trial: Trial,
    attempt: Attempt,
    status: JobStatus,
    run: RunLog,
    *,
    written: Mapping[str, Value],
    stamped: bool,
    read_at_once: Callable[[float], float | None] = lambda _: None,
) -> Diagnosis | None:
    """Why the result of a job that is over cannot be true, or None.

    written: what its job was written with, by variable (``workloads.base.written``).
    stamped: its log has time stamps of its own. read_at_once: for a log without, how long nobody had looked when the
    run's first so many seconds came at one look, with the end of the log; None where they came at several.
    """
    return (
        _other_attempt(attempt, run)
        or _other_benchmark(study, run)
        or _other_values(study, trial, written, run)
        or _impossible_loss(study, run)
        or _no_training(study, trial, run)
        or lost_evals(study, trial, run)
        or impossible_times(run, status, stamped=stamped, unit=study.progress_unit)
        or _no_time(study, trial, status, run, read_at_once, stamped=stamped)
        or (None if _pace_alone(study, run) else begun_above_zero(run, study.progress_unit))
    )


def _pace_alone(study: Study, run: RunLog) -> bool:
    """Whether a run that says that it goes on from a checkpoint is compared by its pace, which that leaves alone."""
    return bool(run.resumed) and not objective_of(study).judges_evals


def other_log(attempt: Attempt, status: JobStatus, head: bytes, end: bytes, size: int) -> Diagnosis | None:
    """Why the file that lies there is not the log that the job wrote, or None, also where its runner did not say.

    head: its first bytes. end: its last ones: after a power cut a file may have its length, and zeros for what was not
    on the disk yet. size: its length in bytes, compared with what the runner wrote down at the end.
    """
    if status.log_bytes is None or not attempt.token:
        return None
    token = token_in(head)
    if token and token != attempt.token:
        return _foreign(token, attempt)
    zeros = end.endswith(b"\0\0")
    if token and size >= status.log_bytes and not zeros:
        return None
    cut = f"of the {status.log_bytes:,} bytes that its job wrote the log holds {size:,}{', zeros at its end' * zeros}"
    what = cut if token else "the line at the log's head that says whose it is is gone"
    remedy = "it was truncated, or its disk lost a part; the trial is run again"
    return Diagnosis(FailureKind.INFRASTRUCTURE, what, remedy)


def impossible_times(run: RunLog, status: JobStatus, *, stamped: bool, unit: str = "samples") -> Diagnosis | None:
    """Why a run's times cannot be true, or None; also for one that goes on.

    A log without time stamps is timed by a monotonic clock, so steps of the wall clock do not touch it. A
    packed trial's log counts its own time alone, and its launcher says nothing of its job's. unit: what the log counts.
    """
    points: list[Eval | TrainPoint] = [*run.evals, *run.train]
    points.sort(key=lambda point: point.samples)
    known = [point for point in points if math.isfinite(point.seconds)]
    if known and (first := min(known, key=lambda point: point.seconds)).seconds < 0:
        return _clock(f"the log has {counted(first.samples, unit)} {-first.seconds:.1f} s before its run began")
    if (pair := _backwards(known)) is not None:
        before, after = pair
        return _clock(
            f"the log has {counted(after.samples, unit)} {before.seconds - after.seconds:.1f} s before "
            f"{counted(before.samples, unit)}"
        )
    longest = max((point.seconds for point in known), default=0.0)
    inexact = STEP_SECONDS + status.seconds_error + _unit(known) if stamped else LIFE_SECONDS
    if status.seconds is not None and longest > status.seconds + inexact:
        return _clock(f"the log spans {longest:.1f} s, and its job ran for {status.seconds:.1f} s")
    steps = [step for step in status.clock_steps if abs(step) >= STEP_SECONDS]
    if stamped and steps:
        return _clock(f"the wall clock was set or slewed by {steps[0]:+.1f} s while the job ran")
    return None


def _clock(evidence: str) -> Diagnosis:
    return Diagnosis(
        FailureKind.CLOCK,
        evidence,
        "the time stamps cannot be true: the trial is measured again; check the host's clock",
    )


def _unit(points: list[Eval | TrainPoint]) -> float:
    """Seconds by which a difference of two time stamps may be off: one where stamps count whole seconds."""
    return 1.0 if all(point.seconds % 1 == 0 for point in points) else 0.0


def _backwards(points: list[Eval | TrainPoint]) -> tuple[Eval | TrainPoint, Eval | TrainPoint] | None:
    """A point, and one with more samples that claims to be earlier; None where none is. Evals come from one rank."""
    evals: list[Eval | TrainPoint] = [point for point in points if isinstance(point, Eval)]
    return _earlier(evals, STEP_SECONDS) or _earlier(points, ORDER_SECONDS)


def _earlier(points: list[Eval | TrainPoint], allowed: float) -> tuple[Eval | TrainPoint, Eval | TrainPoint] | None:
    latest: Eval | TrainPoint | None = None
    for point in points:
        if latest is not None and point.samples > latest.samples and point.seconds < latest.seconds - allowed:
            return latest, point
        if latest is None or point.seconds > latest.seconds:
            latest = point
    return None


def _no_time(
    study: Study,
    trial: Trial,
    status: JobStatus,
    run: RunLog,
    read_at_once: Callable[[float], float | None],
    *,
    stamped: bool,
) -> Diagnosis | None:
    """A target whose time nobody knows: all lines came at once, or at one time by their stamps.

    Where the job outlived the look that brought them, they lay in a buffer, and would again. Others were over too soon
    to be told apart: that is chance on a busy machine, and says nothing of the next attempt.
    """
    stop = _stop(study, trial, run)
    if stop is None:
        return None
    unseen = read_at_once(stop.seconds)
    outlived = unseen is not None and status.seconds is not None and status.seconds > unseen + LIFE_SECONDS
    what = f"the log has the target {stop.seconds:.1f} s after its run began"
    remedy = f"its lines came all at once and have no time stamps: {FLUSH}, or print the seconds"
    if outlived:
        what = f"{what}, though its job ran for {status.seconds:.0f} s"
        return Diagnosis(FailureKind.CONFIGURATION, what, remedy)
    if stop.seconds > 0:
        return None
    return _clock(what) if stamped else Diagnosis(FailureKind.CLOCK, what, f"the trial is measured again; {remedy}")


def _other_attempt(attempt: Attempt, run: RunLog) -> Diagnosis | None:
    token = run.hyperparameters.get(ATTEMPT_KEY)
    if not attempt.token or token is None or token == attempt.token:
        return None
    return _foreign(str(token), attempt)


def _foreign(token: str, attempt: Attempt) -> Diagnosis:
    what = f"the log is of another attempt (token {token[:32]}), not of this one (token {attempt.token})"
    return Diagnosis(FailureKind.FOREIGN, what, "another log was put in its place; the trial is run again")


def _other_benchmark(study: Study, run: RunLog) -> Diagnosis | None:
    """The log is of another MLPerf benchmark than the one whose target the study goes by."""
    goal, announced = goal_of(study), run.hyperparameters.get("submission_benchmark")
    if not goal or announced == goal or announced not in benchmark_names():
        return None
    return Diagnosis(
        FailureKind.MISMATCH,
        f"the log announces {announced}, and the target {study.objective.target:g} is that of {goal}",
        f'set benchmark = "{announced}" where the study names its benchmark ([workload] or [objective])',
    )


def _other_values(study: Study, trial: Trial, written: Mapping[str, Value], run: RunLog) -> Diagnosis | None:
    """The log announces other hyperparameters than the job was written with."""
    benchmark = study.benchmark.name if study.benchmark else ""
    for name in trial.parameters:
        key = key_of(benchmark, name)
        values = {n: value for n, value in written.items() if key_of(benchmark, n) == key}
        if key not in STATED_AS_GIVEN or key not in run.hyperparameters or not values:
            continue
        came = run.hyperparameters[key]
        if not any(_same(value, came) for value in values.values()):
            stated = " and ".join(f"{n} {value}" for n, value in values.items())
            return Diagnosis(
                FailureKind.MISMATCH,
                f"the log announces {key} = {came}, and the job was written with {stated}",
                f"either the log is another run's, or the program does not use {' and '.join(values)} as it is written,"
                " or announces something else under this key: check the program",
            )
    return None


def _same(proposed: Value, announced: object) -> bool:
    """Whether a number was announced as it was given, as far as its printed digits tell; other values say nothing."""
    numbers = isinstance(proposed, int | float) and isinstance(announced, int | float)
    if not numbers or isinstance(proposed, bool) or isinstance(announced, bool):
        return True
    assert isinstance(proposed, int | float)
    assert isinstance(announced, int | float)
    if not math.isfinite(announced) or announced == 0:
        return True  # the start of a warm-up, or nothing
    exponent = Decimal(repr(announced)).normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    last_digit = 0.501 * 10.0 ** min(exponent, 0) if isinstance(announced, float) else 0.0
    return abs(proposed - announced) <= max(ROUNDING * abs(proposed), min(last_digit, FEW_DIGITS * abs(proposed)))


def _impossible_loss(study: Study, run: RunLog) -> Diagnosis | None:
    """The eval that meets the target states what no loss can be."""
    target = study.target
    stop = objective_of(study).stop(run)
    if stop is None:
        return None
    if stop.loss >= -LARGEST_LOSS * max(1.0, abs(target)) and not stop.loss < 0 < target:
        return None
    what = f"the log states an eval loss of {stop.loss:g} at {study.counted(stop.samples)}, which no loss can be"
    return Diagnosis(FailureKind.IMPLAUSIBLE, what, f"the target is {target:g}: see what the program prints as loss")


def _no_training(study: Study, trial: Trial, run: RunLog) -> Diagnosis | None:
    stop = _stop(study, trial, run)
    if stop is None or stop.samples > 0:
        return None
    what = f"the target {study.target:g} is met at step 0, before any training"
    return Diagnosis(FailureKind.CONFIGURATION, what, "give a lower objective.target")


def _stop(study: Study, trial: Trial, run: RunLog) -> Eval | None:
    return None if trial.probe else objective_of(study).stop(run)
