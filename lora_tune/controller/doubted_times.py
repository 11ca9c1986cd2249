"""A best time that is too good beside the other trials' is confirmed by another run before it counts. Pure functions.

What one log cannot show the others can: a program that goes on from a checkpoint which trials share, or that started
again inside its job, does in no time what takes every other trial long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from lora_tune.base.text import duration
from lora_tune.config.study import Study
from lora_tune.controller.beginnings import MISSING_SECONDS
from lora_tune.controller.evidence import task
from lora_tune.controller.pauses import placed
from lora_tune.launchers.base import JobStatus
from lora_tune.logs.failures import Diagnosis, FailureKind
from lora_tune.logs.run import Eval, RunLog
from lora_tune.search.objectives import objective_of
from lora_tune.search.pace import references, seconds_at, slowdown, timed
from lora_tune.store.records import StudyRecords, Trial, Verdict

FAR = 3.0
"""How many times less than every other trial's a progress, a time or a length is doubted."""

LIFE_SECONDS = 60.0
"""Of a job's life beside its run that need no account."""

ALIKE = 1.5
"""Two runs of one configuration whose first evals came within so many times each other's seconds confirm each other."""

SAME_LOSS = 0.03
"""Of what their first eval is ahead of the others', two runs of one configuration and seed may differ."""

REMEDY = (
    "the trial is measured again, and believed where both runs agree; where its program goes on from a checkpoint, "
    "give each trial a folder of its own ({folder} in the command), or tell it to begin anew"
)


def why_doubted(
    study: Study, sweep: StudyRecords, trial: Trial, status: JobStatus, run: RunLog, last: int
) -> Diagnosis | None:
    """Why a run that would be the best so far is not believed yet, or None. last: number of its attempt.

    One that two attempts agree on is believed; a second that goes on where the first ended never began at zero.
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
        what = f"its first eval goes on where its attempt before ended ({study.eval_words(earlier[-1])}): {what}"
        return Diagnosis(FailureKind.CONFIGURATION, what, REMEDY)
    return Diagnosis(FailureKind.CLOCK, f"too good beside the others: {what}", REMEDY)


def _would_be_best(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> bool:
    objective, best = objective_of(study), sweep.best()
    if objective.has_target:
        stop = objective.stop(run)
        known = None if best is None else best.reference_seconds
        return stop is not None and (known is None or stop.seconds < known * slowdown(study, sweep, trial, run))
    lowest = min((e.loss for evals in _others(sweep, trial).values() for e in evals), default=math.inf)
    return min(e.loss for e in run.evals) < lowest


def _others(sweep: StudyRecords, trial: Trial) -> Mapping[int, Sequence[Eval]]:
    """Evals of the other ended trials of the same batch size."""
    ended = sweep.once("ended evals", lambda: _ended(sweep))
    return {n: evals for n, evals in ended.items() if n != trial.number and task(sweep.trials[n]) == task(trial)}


def _ended(sweep: StudyRecords) -> dict[int, Sequence[Eval]]:
    ended = (t for t in sweep.trials.values() if t.finished_at and not t.probe and t.verdict is not Verdict.FAILED)
    known = {trial.number: sweep.last_evals(trial.number) for trial in ended}
    return {number: evals for number, evals in known.items() if evals}


def _usual_level(sweep: StudyRecords, trial: Trial, first: Eval) -> float:
    """The lowest loss that any other trial had after ``FAR`` times the progress of a first eval; inf: nobody was."""
    others = [evals for evals in _others(sweep, trial).values() if evals[-1].samples >= FAR * first.samples > 0]
    return min((e.loss for evals in others for e in evals if e.samples <= FAR * first.samples), default=math.inf)


def _too_low(study: Study, first: Eval) -> str:
    where = f"its first eval is {study.eval_words(first)}"
    return f"{where}, and no other trial was there after {FAR:g} times as much training"


def _too_soon(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> str:
    """That the first eval came in a part of the time of every trial of equal work; "" where it did not."""
    first, others = timed(run.evals[:1]), references(study, sweep, trial)
    if not first or not others:
        return ""
    samples, seconds = first[0]
    usual = min(float(seconds_at(np.array([samples]), points)[0]) for points in others.values())
    if usual < FAR * seconds or usual - seconds <= MISSING_SECONDS:
        return ""
    return (
        f"its first eval, at {study.counted(samples)}, came after {duration(seconds)}, which took {duration(usual)} or "
        "more in every trial of equal work"
    )


def _unaccounted(sweep: StudyRecords, trial: Trial, status: JobStatus, run: RunLog) -> str:
    """That the job lived far longer than its run, unlike those of other trials; "" where that is not so."""
    points = timed(run.evals)
    others = [rest for t in sweep.trials.values() if t.number != trial.number and (rest := _rest(sweep, t)) is not None]
    if status.seconds is None or not points or not others:
        return ""
    logged = max([seconds for _, seconds in points] + [run.seconds or 0.0])
    rest = status.seconds - placed(status) - logged
    if rest <= logged or rest <= LIFE_SECONDS + FAR * max(others):
        return ""
    return (
        f"its job ran for {duration(status.seconds)}, of which its log accounts for {duration(logged)}; those of other "
        f"trials had {duration(max(others))} beside their runs at most"
    )


def _rest(sweep: StudyRecords, trial: Trial) -> float | None:
    """Seconds that the job of a trial lived beside its run, of one that ran to its end; else None."""
    attempts, points = sweep.attempts_of(trial.number), timed(sweep.last_evals(trial.number))
    ran = trial.verdict in (Verdict.REACHED, Verdict.CENSORED) and attempts and points
    if not ran or attempts[-1].started_at is None or attempts[-1].ended_at is None:
        return None
    paused = trial.metrics.paused_seconds or 0.0
    return max(0.0, attempts[-1].ended_at - attempts[-1].started_at - paused - max(s for _, s in points))


def _refused(sweep: StudyRecords, trial: Trial, last: int) -> Sequence[Eval]:
    """The evals of the newest attempt before the last that was refused for its times; none where there is none."""
    for attempt in reversed(sweep.attempts_of(trial.number)):
        evals = sweep.evals.get((trial.number, attempt.number), ())
        if attempt.number < last and attempt.failure == FailureKind.CLOCK and evals:
            return evals
    return ()


def _agree(one: Eval, other: Eval, usual: float) -> bool:
    """Whether two first evals are those of one configuration that began at zero twice. usual: the others' level.

    A program that goes on from a checkpoint goes further each time; the same seed comes to the same loss.
    """
    low, high = sorted((one.seconds, other.seconds))
    if math.isfinite(usual):
        near = abs(one.loss - other.loss) <= SAME_LOSS * (usual - max(one.loss, other.loss))
    else:
        near = math.isclose(one.loss, other.loss, rel_tol=0.1)
    return near and one.samples == other.samples and (high <= ALIKE * low or high - low <= MISSING_SECONDS)
