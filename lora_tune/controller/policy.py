"""The next action for a trial: pure functions of (study, records, job status, log, now)."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass

from lora_tune import curves
from lora_tune.base.text import duration
from lora_tune.config.study import Study
from lora_tune.controller import limits
from lora_tune.launchers.base import JobState, JobStatus
from lora_tune.logs.failures import Diagnosis, FailureKind
from lora_tune.logs.run import Eval, RunLog
from lora_tune.search.objectives import objective_of
from lora_tune.store.records import Attempt, StopKind, Trial

GRACE_SECONDS = 30.0
"""Time for a job to end by itself after its log shows the target."""


NO_FAILURE = Diagnosis()

SILENCE_SECONDS = 120.0
"""Silence of a log without any recognised line after which the user is warned."""

FLUSH = "flush each line (print(..., flush=True), python -u, stdbuf -oL COMMAND for other programs)"
"""Remedy for a program that buffers its output."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask the job to end. diagnosis: the failure class, if it is a failure."""

    kind: StopKind
    sentence: str
    diagnosis: Diagnosis = NO_FAILURE


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a job that was asked to end and did not. sentence: message to the user, "" if routine."""

    sentence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """The driver's view of a live attempt. ``grew_at``: epoch seconds of the log's last growth.

    begun: runs in its log so far, of those that the trial makes in sequence.
    ran_at: epoch seconds at which this driver first saw it run.
    unreadable: why the log cannot be read, "" if it can. unmatched: why nothing in the log is an eval, "" if something
    is or it is too early to say. log: its file.
    """

    attempt: Attempt
    status: JobStatus
    run: RunLog
    grew_at: float
    trial: Trial
    begun: int = 1
    ran_at: float = 0.0
    unreadable: str = ""
    unmatched: str = ""
    log: str = "LOG"


def unread(study: Study, sentence: str, log: str) -> Diagnosis:
    """The failure of a log in which the study's reader finds nothing, a fault of the study; ``sentence``: what."""
    show = f"python -m lora_tune.logs --study {study.name} {shlex.quote(log)}"
    remedy = f"correct [workload.log]; {show} shows what each line is read as"
    return Diagnosis(FailureKind.UNREAD, sentence, remedy, certain=True)


def missing_evals(study: Study, trial: Trial, run: RunLog) -> Diagnosis | None:
    """The failure of a log with more evals than a reader keeps, if the decisive one may be among the others."""
    objective = objective_of(study)
    if not run.missing_evals or not objective.judges_evals or objective.stop(run) or objective.over(trial, run):
        return None
    where = ": none of them at the target" if objective.has_target else ""
    what = f"the log has {run.printed_evals:,} evals, of which the first {len(run.evals):,} were kept{where}"
    return Diagnosis(FailureKind.UNREAD, what, "evaluate less often", certain=True)


def watch(study: Study, snapshot: JobSnapshot, now: float) -> Stop | Kill | None:
    """For a queued or running job: None, stop it, or kill it. The eval curve is judged elsewhere."""
    attempt, site = snapshot.attempt, study.site
    if attempt.stop is not StopKind.NONE:
        overdue = attempt.stop_at is not None and now - (attempt.killed_at or attempt.stop_at) > site.kill_seconds
        return Kill(_immortal(snapshot) if attempt.killed_at else "") if overdue else None
    if snapshot.status.state is JobState.QUEUED:
        return _queued(study, snapshot, now)
    if snapshot.status.paused:
        return None  # it is suspended, and the time does not count
    started = attempt.started_at or now
    limit = study.budget.trial_minutes * snapshot.trial.replicates
    # The start is by the cluster's clock; this driver's may be ahead, so only the time that it observed counts.
    lived = now - max(started, snapshot.ran_at) if snapshot.status.seconds is None else snapshot.status.seconds
    lived -= snapshot.status.standstill_seconds
    # For a trial that shares its node, its own share of the time counts.
    share = snapshot.status.share_seconds
    if (lived * snapshot.status.node_share if share is None else share) > limit * 60:
        sentence = f"ran into the limit of {limit:g} min"
        diagnosis = Diagnosis(FailureKind.CONFIGURATION, sentence, "raise budget.trial_minutes")
        return Stop(StopKind.TIME_LIMIT, sentence, diagnosis)
    if snapshot.unmatched:
        return Stop(StopKind.UNREAD, snapshot.unmatched, unread(study, snapshot.unmatched, snapshot.log))
    if snapshot.trial.probe and probed(snapshot.run):
        return Stop(StopKind.PROBED, "a warm block and an eval are measured")
    silence = now - max(snapshot.grew_at, started)
    last = snapshot.begun >= snapshot.trial.replicates
    if last and not snapshot.trial.probe and (why := _nothing_more(study, snapshot, silence)):
        return Stop(StopKind.REACHED, why)
    if missing := missing_evals(study, snapshot.trial, snapshot.run):
        return Stop(StopKind.UNREAD, missing.line, missing)  # further training would be useless
    if silence > site.stall_minutes * 60:
        sentence = snapshot.unreadable or f"its log has been silent for {silence / 60:.0f} min"
        remedy = f"it hung, its output goes elsewhere, or lies in a buffer ({FLUSH}); it is run again on another node"
        return Stop(StopKind.SILENT, sentence, Diagnosis(FailureKind.INFRASTRUCTURE, sentence, remedy))
    return None


def silence_warning(study: Study, snapshot: JobSnapshot, now: float) -> str:
    """A warning about a running job that has printed nothing since its start; "" for all others.

    Given long before such a job is stopped, because a script with buffered output looks like one that hangs.
    """
    limit = study.site.stall_minutes * 60
    silence = now - max(snapshot.grew_at, snapshot.attempt.started_at or now, snapshot.ran_at)
    if snapshot.status.state is not JobState.RUNNING or snapshot.run.evals or snapshot.run.train:
        return ""
    if silence <= min(SILENCE_SECONDS, limit / 2):
        return ""
    return (
        f"nothing that is read was printed yet, and nothing at all for {duration(min(SILENCE_SECONDS, limit / 2))}: "
        f"if it trains, {FLUSH}; given up after {limit / 60:g} min of silence (site.stall_minutes)"
    )


def _nothing_more(study: Study, snapshot: JobSnapshot, silence: float) -> str:
    """Why a running job has nothing more to show; "" while it has, or may still end by itself."""
    objective, run = objective_of(study), snapshot.run
    stop = objective.stop(run)
    if stop is None:
        return objective.over(snapshot.trial, run)
    if silence > GRACE_SECONDS:
        return f"reached the target and did not end by itself: {study.eval_text(stop)}"
    if study.stops_at_target and (_trained_on(run, stop) or _overrun(run, stop) > GRACE_SECONDS):
        return f"reached the target and trains on: {study.eval_text(stop)}"
    return ""


def _trained_on(run: RunLog, stop: Eval) -> bool:
    """Whether the log shows training beyond ``stop``: a program without a target ends only at its last step."""
    latest = [*(e.samples for e in run.evals[-1:]), *(p.samples for p in run.train[-1:])]
    return run.run_stop_ms is None and max(latest) > stop.samples


def _overrun(run: RunLog, stop: Eval) -> float:
    """Seconds for which a run's log continues after ``stop``."""
    if run.run_stop_ms is not None or run.run_start_ms is None or run.last_ms is None or math.isnan(stop.seconds):
        return 0.0
    return (run.last_ms - run.run_start_ms) / 1000 - stop.seconds


def _queued(study: Study, snapshot: JobSnapshot, now: float) -> Stop | None:
    """For a queued job: stop it if it waited for too long, or can never start."""
    waited = now - (snapshot.attempt.submitted_at or snapshot.attempt.intended_at)
    overdue = limits.too_long(study, snapshot.status, waited)
    return None if overdue is None else Stop(StopKind.QUEUE, *overdue)


def _immortal(snapshot: JobSnapshot) -> str:
    nodes = ", ".join(snapshot.attempt.nodes) or "its node"
    return f"job {snapshot.attempt.job_id} refuses to die on {nodes}: tell the administrator"


def probed(run: RunLog) -> bool:
    """Whether a warm block and an eval are measured."""
    timing = curves.timing(run)
    return timing.warm and math.isfinite(timing.samples_per_second) and math.isfinite(timing.seconds_per_eval)
