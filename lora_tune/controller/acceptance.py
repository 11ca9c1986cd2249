"""Whether a result is plausible. Pure functions of (study, trial, job status, log): an impossible result is refused.

A log's claims are checked against the job's duration by monotonic clocks (the runner's, the kernel's, Slurm's elapsed
time), the order of its own points, the trial's values, and the possible range of a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise

import numpy as np

from lora_tune.base.paths import ATTEMPT_KEY, token_in
from lora_tune.base.text import counted, duration
from lora_tune.config.study import Study, goal_of
from lora_tune.controller.evidence import task
from lora_tune.controller.policy import FLUSH, missing_evals
from lora_tune.launchers.base import JobStatus
from lora_tune.logs.failures import Diagnosis, FailureKind
from lora_tune.logs.run import Eval, RunLog, TrainPoint
from lora_tune.mlperf.benchmark import benchmark_names
from lora_tune.search.objectives import objective_of
from lora_tune.search.pace import references, seconds_at, slowdown, timed
from lora_tune.search.recommendation import best_run
from lora_tune.store.records import Attempt, StudyRecords, Trial, Value, Verdict
from lora_tune.workloads.record import key_of

# Whether a run's progress began at zero. Pure functions of its log.
#
# A program that finds a checkpoint in a folder shared by trials trains only the rest, in a fraction of the time.

FASTER = 3.0
"""A pace up to the first point this many times the fastest later one is too fast, since compiling and warming up make
it slower. In 2,202 public runs that state both it is at most 1.04 times as fast (26 November 2026)."""

FARTHER = 2.0
"""The progress at the first point must be this many times the longest later interval between two points."""

MISSING_SECONDS = 2.0
"""A run that misses less time than this ranks about right; lines without stamps may be read so late."""


def begun_above_zero(run: RunLog, unit: str = "samples") -> Diagnosis | None:
    """Why a run's first point shows that training began from a checkpoint, or None. unit: unit of the log's progress.

    Evals take time, too, so only paces without them are compared: between train points, and of blocks whose evals the
    log marks. With evals alone, the intervals between evals are compared, each with one eval in it.
    """
    known: list[Eval | TrainPoint] = [*run.evals, *run.train]
    points = sorted((point.samples, point.seconds) for point in known if math.isfinite(point.seconds))
    fastest = _fastest_later(run)
    if len(points) < 3 or not 0 < fastest < math.inf:
        return None if run.train else _by_evals(run, unit)
    samples, seconds = points[0]
    farthest = max(after - before for (before, _), (after, _) in pairwise(points))
    missing = samples / fastest - seconds
    if seconds <= 0 or samples < FARTHER * farthest or missing <= MISSING_SECONDS:
        return None
    if samples / seconds <= FASTER * fastest:
        return None
    return _elsewhere(
        f"the log has {counted(samples, unit)} after {seconds:.1f} s, for which its own pace later needs "
        f"{samples / fastest:.1f} s"
    )


def _by_evals(run: RunLog, unit: str) -> Diagnosis | None:
    """A diagnosis if the first eval came sooner than any later one after its predecessor, although after ``FASTER``
    times the progress of each."""
    evals = sorted((e.samples, e.seconds) for e in run.evals if math.isfinite(e.seconds))
    if len(evals) < 3:
        return None
    (samples, seconds), later = evals[0], [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(evals)]
    farthest, shortest = max(done for done, _ in later), min(took for _, took in later)
    if samples < FASTER * farthest or seconds <= 0 or shortest - seconds <= MISSING_SECONDS:
        return None
    return _elsewhere(
        f"the log has {counted(samples, unit)} after {seconds:.1f} s, and {shortest:.1f} s or more before each later "
        f"eval, for {counted(farthest, unit)} at most"
    )


def _elsewhere(evidence: str) -> Diagnosis:
    return Diagnosis(
        FailureKind.CLOCK,
        evidence,
        "the trial is measured again; where its program goes on from another trial's checkpoint, give each trial a "
        "folder of its own ({folder} in the command), or tell it to begin anew",
    )


def _fastest_later(run: RunLog) -> float:
    """The highest pace after the first point, evals left out; 0 if unknown."""
    train = [point for point in run.train if math.isfinite(point.seconds)]
    between = ((b.samples - a.samples) / (b.seconds - a.seconds) for a, b in pairwise(train) if b.seconds > a.seconds)
    return max((pace for pace in (*run.throughput[1:], *between) if pace > 0), default=0.0)


# When a job was suspended: as noted by its runner, else by comparing the driver's polls with the scheduler's time.

UNPLACED_SECONDS = 4.0
"""Allowed total of pauses whose place in the run is unknown: schedulers count whole seconds, and polls are seconds
apart."""


class ObservedPauses:
    """Pauses of a job without our runner, from the driver's polls; never longer than the real ones."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self._goes_on = False

    def update(self, status: JobStatus, now: float) -> JobStatus:
        """The status with observed pauses, unless it states pauses itself. now: epoch seconds of the poll."""
        if status.paused:
            begin = self._spans.pop()[0] if self._goes_on else now
            self._spans.append((begin, now))
        self._goes_on = status.paused
        return status if status.pauses else replace(status, pauses=tuple(self._spans))


def unplaced(status: JobStatus, run: RunLog, *, left_out: bool) -> Diagnosis | None:
    """Why the times of a run may include a pause of its job, or None. left_out: known pauses are already subtracted."""
    known = max(status.paused_seconds, status.standstill_seconds)
    rest = status.paused_seconds - run.paused_seconds if left_out else known
    if rest <= UNPLACED_SECONDS:
        return None
    return Diagnosis(
        FailureKind.CLOCK,
        f"its job stood still for {duration(known)} (suspended, or processes of it stopped), of which {duration(rest)} "
        "cannot be told from its training",
        "the trial is measured again; ask who suspends jobs there (scontrol suspend, preemption, gang scheduling, "
        "kill -STOP)",
    )


def suspended_text(status: JobStatus) -> str:
    """A message about a job that is suspended now; "" for all others."""
    return (
        f"job {status.job_id} is suspended ({status.reason}): it goes on when it is resumed, and the time in between "
        "does not count"
        if status.paused
        else ""
    )


# A best time that is suspiciously good compared with the other trials is confirmed by another run. Pure functions.
#
# One log cannot show it, but the others can: a program that resumes from a checkpoint shared by trials, or that
# restarted inside its job, finishes in a fraction of every other trial's time.

FAR_OFF = 3.0
"""A progress, time or length below every other trial's by this factor is suspicious."""

LIFE_SECONDS = 60.0
"""Part of a job's life outside its run that needs no explanation."""

ALIKE = 1.5
"""Two runs of one configuration confirm each other if the seconds of their first evals agree within this factor."""

SAME_LOSS = 0.03
"""Allowed difference of two first evals of one configuration and seed, relative to their lead over the others."""

REMEDY = (
    "the trial is measured again, and believed where both runs agree; where its program goes on from a checkpoint, "
    "give each trial a folder of its own ({folder} in the command), or tell it to begin anew"
)


def implausibility(
    study: Study, sweep: StudyRecords, trial: Trial, status: JobStatus, run: RunLog, last: int
) -> Diagnosis | None:
    """Why a run that would be the best is not accepted yet, or None. last: number of its attempt.

    A run that two attempts agree on is accepted; a second attempt that resumes where the first ended is not.
    """
    single = trial.probe or trial.replicates > 1 or trial.replicate_of is not None
    if single or not run.evals or not objective_of(study).judges_evals or not _would_be_best(study, sweep, trial, run):
        return None
    usual = _usual_level(sweep, trial, run.evals[0])
    low = run.evals[0].loss < usual < math.inf
    what = _too_low(study, run.evals[0]) if low else _too_soon(study, sweep, trial, run)
    what = what or _unaccounted(sweep, trial, status, run)
    if not what:
        return None
    if low and run.resumed:
        return Diagnosis(FailureKind.CONFIGURATION, f"its log says {run.resumed[:80]!r}, and {what}", REMEDY)
    earlier = _refused(sweep, trial, last)
    if study.budget.attempts == 1 or (earlier and _agree(earlier[0], run.evals[0], usual if low else math.inf)):
        return None
    if low and earlier and run.evals[0].loss <= earlier[-1].loss:
        what = f"its first eval goes on where its attempt before ended ({study.eval_text(earlier[-1])}): {what}"
        return Diagnosis(FailureKind.CONFIGURATION, what, REMEDY)
    return Diagnosis(FailureKind.CLOCK, f"too good beside the others: {what}", REMEDY)


def _would_be_best(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> bool:
    objective, best = objective_of(study), best_run(study, sweep)
    if objective.has_target:
        stop = objective.stop(run)
        known = None if best is None else best.reference_seconds
        return stop is not None and (known is None or stop.seconds < known * slowdown(study, sweep, trial, run))
    lowest = min((e.loss for evals in _others(sweep, trial).values() for e in evals), default=math.inf)
    return min(e.loss for e in run.evals) < lowest


def _others(sweep: StudyRecords, trial: Trial) -> Mapping[int, Sequence[Eval]]:
    """Evals of the other finished trials of the same batch size."""
    ended = sweep.once("ended evals", lambda: _ended(sweep))
    return {n: evals for n, evals in ended.items() if n != trial.number and task(sweep.trials[n]) == task(trial)}


def _ended(sweep: StudyRecords) -> dict[int, Sequence[Eval]]:
    ended = (t for t in sweep.trials.values() if t.finished_at and not t.probe and t.verdict is not Verdict.FAILED)
    known = {trial.number: sweep.last_evals(trial.number) for trial in ended}
    return {number: evals for number, evals in known.items() if evals}


def _usual_level(sweep: StudyRecords, trial: Trial, first: Eval) -> float:
    """The lowest loss of any other trial at up to ``FAR_OFF`` times the progress of a first eval; infinite if none."""
    others = [evals for evals in _others(sweep, trial).values() if evals[-1].samples >= FAR_OFF * first.samples > 0]
    return min((e.loss for evals in others for e in evals if e.samples <= FAR_OFF * first.samples), default=math.inf)


def _too_low(study: Study, first: Eval) -> str:
    where = f"its first eval is {study.eval_text(first)}"
    return f"{where}, and no other trial was there after {FAR_OFF:g} times as much training"


def _too_soon(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> str:
    """The message that the first eval came in a fraction of the time of every trial of equal work; "" if not."""
    first, others = timed(run.evals[:1]), references(study, sweep, trial)
    if not first or not others:
        return ""
    samples, seconds = first[0]
    usual = min(float(seconds_at(np.array([samples]), points)[0]) for points in others.values())
    if usual < FAR_OFF * seconds or usual - seconds <= MISSING_SECONDS:
        return ""
    return (
        f"its first eval, at {study.counted(samples)}, came after {duration(seconds)}, which took {duration(usual)} or "
        "more in every trial of equal work"
    )


def _unaccounted(sweep: StudyRecords, trial: Trial, status: JobStatus, run: RunLog) -> str:
    """The message that the job lived far longer than its run, unlike those of other trials; "" if not."""
    points = timed(run.evals)
    others = [rest for t in sweep.trials.values() if t.number != trial.number and (rest := _rest(sweep, t)) is not None]
    if status.seconds is None or not points or not others:
        return ""
    logged = max([seconds for _, seconds in points] + [run.seconds or 0.0])
    rest = status.seconds - status.standstill_seconds - logged
    if rest <= logged or rest <= LIFE_SECONDS + FAR_OFF * max(others):
        return ""
    return (
        f"its job ran for {duration(status.seconds)}, of which its log accounts for {duration(logged)}; those of other "
        f"trials had {duration(max(others))} beside their runs at most"
    )


def _rest(sweep: StudyRecords, trial: Trial) -> float | None:
    """Seconds of a trial's job outside its run, if it ran to its end; else None."""
    attempts, points = sweep.attempts_of(trial.number), timed(sweep.last_evals(trial.number))
    ran = trial.verdict in (Verdict.REACHED, Verdict.CENSORED) and attempts and points
    if not ran or attempts[-1].started_at is None or attempts[-1].ended_at is None:
        return None
    paused = trial.metrics.paused_seconds or 0.0
    return max(0.0, attempts[-1].ended_at - attempts[-1].started_at - paused - max(s for _, s in points))


def _refused(sweep: StudyRecords, trial: Trial, last: int) -> Sequence[Eval]:
    """The evals of the newest attempt before ``last`` that was refused for its times; empty if there is none."""
    for attempt in reversed(sweep.attempts_of(trial.number)):
        evals = sweep.evals.get((trial.number, attempt.number), ())
        if attempt.number < last and attempt.failure == FailureKind.CLOCK and evals:
            return evals
    return ()


def _agree(one: Eval, other: Eval, usual: float) -> bool:
    """Whether two first evals are of one configuration that began at zero twice. usual: the other trials' level.

    A program that resumes from a checkpoint gets further each time; the same seed gets to the same loss.
    """
    low, high = sorted((one.seconds, other.seconds))
    if math.isfinite(usual):
        equal = abs(one.loss - other.loss) <= SAME_LOSS * (usual - max(one.loss, other.loss))
    else:
        equal = math.isclose(one.loss, other.loss, rel_tol=0.1)
    return equal and one.samples == other.samples and (high <= ALIKE * low or high - low <= MISSING_SECONDS)


ORDER_SECONDS = 1.0
"""How far time stamps of several ranks may run backwards while samples grow; in 2,078 public logs they never do."""

LATE_READ_SECONDS = 2.0
"""How much longer than its job a run without time stamps may seem, because its lines are read late, unequally so."""

STEP_SECONDS = 0.5
"""A clock change smaller than this during a job is ignored, as it changes the result by no more."""

ROUNDING = 1e-3
"""Relative rounding difference between a value and its printed form."""

FEW_DIGITS = 0.0505
"""Largest relative rounding of a value, that of two printed digits: with one digit, 1e-4 may be another trial's."""

LARGEST_LOSS = 1e6
"""A loss below minus this many times the target (or 1) is impossible."""

STATED_BY_CONFIG = frozenset(
    {
        "opt_base_learning_rate", "global_batch_size", "opt_learning_rate_training_steps", "max_steps", "lora_rank",
        "lora_alpha", "healing_iter",
    }
)  # fmt: skip
"""MLLOG keys, and printed settings, under which programs log a parameter unchanged. Other keys hold derived values."""


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
    """Why the result of a job that has ended cannot be true, or None.

    written: the values that its job received, by variable (``Workload.written``).
    stamped: its log has its own time stamps. read_at_once: for a log without, the time since the previous poll if the
    first so many seconds of the run and the end of the log came in one poll; None if they came in several.
    """
    return (
        _other_attempt(attempt, run)
        or _other_benchmark(study, run)
        or _other_values(study, trial, written, run)
        or _impossible_loss(study, run)
        or _no_training(study, trial, run)
        or missing_evals(study, trial, run)
        or impossible_times(run, status, stamped=stamped, unit=study.progress_unit)
        or _no_time(study, trial, status, run, read_at_once, stamped=stamped)
        or (None if _only_pace(study, run) else begun_above_zero(run, study.progress_unit))
    )


def _only_pace(study: Study, run: RunLog) -> bool:
    """Whether a run that reports a checkpoint is compared by its pace alone, which a checkpoint does not affect."""
    return bool(run.resumed) and not objective_of(study).judges_evals


def other_log(attempt: Attempt, status: JobStatus, head: bytes, end: bytes, size: int) -> Diagnosis | None:
    """Why the file is not the log that the job wrote, or None; also None if its runner recorded nothing.

    head: its first bytes. end: its last ones: after a power failure a file may have its full length, with zeros for
    unwritten data. size: its length in bytes, compared with the runner's record.
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
    """Why a run's times cannot be true, or None; also for a running job.

    A log without time stamps is timed by a monotonic clock, so changes of the wall clock do not matter. A packed
    trial's log has simulated times, which are not compared with its job's. unit: unit of the log's progress.
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
    inexact = STEP_SECONDS + status.seconds_error + _unit(known) if stamped else LATE_READ_SECONDS
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
    """Rounding error of a difference of two time stamps in seconds: 1 if stamps are whole seconds."""
    return 1.0 if all(point.seconds % 1 == 0 for point in points) else 0.0


def _backwards(points: list[Eval | TrainPoint]) -> tuple[Eval | TrainPoint, Eval | TrainPoint] | None:
    """A point, and one with more samples but an earlier time; None if there is none. Evals come from one rank."""
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
    """A target whose time is unknown, because all lines were read at once, or have one time stamp.

    If the job outlived the poll that read them, they were buffered, and would be again. Otherwise the run was too
    short to time: that is chance on a busy machine, and another attempt may succeed.
    """
    stop = _stop(study, trial, run)
    if stop is None:
        return None
    unseen = read_at_once(stop.seconds)
    outlived = unseen is not None and status.seconds is not None and status.seconds > unseen + LATE_READ_SECONDS
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
    """The log is of another MLPerf benchmark than the study's target."""
    goal, announced = goal_of(study), run.hyperparameters.get("submission_benchmark")
    if not goal or announced == goal or announced not in benchmark_names():
        return None
    return Diagnosis(
        FailureKind.MISMATCH,
        f"the log announces {announced}, and the target {study.objective.target:g} is that of {goal}",
        f'set benchmark = "{announced}" where the study names its benchmark ([workload] or [objective])',
    )


def _other_values(study: Study, trial: Trial, written: Mapping[str, Value], run: RunLog) -> Diagnosis | None:
    """The log states other hyperparameters than the job received."""
    benchmark = study.benchmark.name if study.benchmark else ""
    for name in trial.parameters:
        key = key_of(benchmark, name) or name.lower()
        values = {n: value for n, value in written.items() if (key_of(benchmark, n) or n.lower()) == key}
        if key not in STATED_BY_CONFIG or key not in run.hyperparameters or not values:
            continue
        logged_value = run.hyperparameters[key]
        if not any(_same(value, logged_value) for value in values.values()):
            stated = " and ".join(f"{n} {value}" for n, value in values.items())
            return Diagnosis(
                FailureKind.MISMATCH,
                f"the log announces {key} = {logged_value}, and the job was written with {stated}",
                f"either the log is another run's, or the program does not use {' and '.join(values)} as it is written,"
                " or announces something else under this key: check the program",
            )
    return None


def _same(proposed: Value, announced: object) -> bool:
    """Whether a logged number equals the given one, within its printed digits; True for other types."""
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
    """The eval that meets the target has an impossible value."""
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
