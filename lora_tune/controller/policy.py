"""What happens to a trial next: pure functions of (study, records, job status, log, now)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lora_tune import curves
from lora_tune.config.study import Study
from lora_tune.controller import queueing
from lora_tune.launchers.base import JobState, JobStatus, launcher_kind
from lora_tune.logs.failures import Diagnosis, FailureKind
from lora_tune.logs.mllog import Eval, RunLog
from lora_tune.objectives import objective_of
from lora_tune.store.records import Attempt, StopKind, Trial, Verdict

GRACE_SECONDS = 30.0
"""How long a job whose log shows the target may take to end by itself."""

RETRIED = ("flaky", "infrastructure", "preempted", "held", "drained", "clock", "foreign", "unknown")
"""Classes of failure that say nothing about the parameters: a new attempt, never a word to the search."""

NO_FAILURE = Diagnosis()


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask the job to end. diagnosis: the class of failure that this is, where it is one."""

    kind: StopKind
    sentence: str
    diagnosis: Diagnosis = NO_FAILURE


@dataclass(frozen=True, slots=True)
class Kill:
    """The job was asked and did not end: kill it. sentence: what a person should know, "" while it is routine."""

    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Finish:
    """The trial is over."""

    verdict: Verdict
    sentence: str


@dataclass(frozen=True, slots=True)
class Retry:
    """A new attempt of the same trial."""

    sentence: str
    exclude_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """What the driver sees of a live attempt. ``grew_at``: epoch seconds of the log's last growth.

    begun: runs that its log shows so far, of those that the trial is to make one after another.
    ran_at: epoch seconds at which this driver first saw it run.
    unreadable: why the log cannot be read, "" while it can. unmatched: why nothing in the log is an eval, "" while
    some is or it is too early to say.
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


def unread(words: str) -> Diagnosis:
    """Why a log in which the study's reader finds nothing is nobody's fault but the study's; ``words`` say what."""
    remedy = "correct [workload.log]; python -m lora_tune.logs --study STUDY LOG shows what each line is read as"
    return Diagnosis(FailureKind.UNREAD, words, remedy, certain=True)


def watch(study: Study, look: JobSnapshot, now: float) -> Stop | Kill | None:
    """For a job that is queued or running: leave it alone, stop it, or kill it. The eval curve is judged elsewhere."""
    attempt, site = look.attempt, study.site
    if attempt.stop is not StopKind.NONE:
        overdue = attempt.stop_at is not None and now - (attempt.killed_at or attempt.stop_at) > site.kill_seconds
        return Kill(_undying(look) if attempt.killed_at else "") if overdue else None
    if look.status.state is JobState.QUEUED:
        return _queued(study, look, now)
    started = attempt.started_at or now
    limit = study.budget.trial_minutes * look.trial.replicates
    # A start is by the cluster's clock, and this driver's may be ahead of it: then only what the driver saw counts.
    lived = now - max(started, look.ran_at) if look.status.seconds is None else look.status.seconds
    # Of a trial that shares its node with others, its own share of the time counts.
    if lived * look.status.node_share > limit * 60:
        sentence = f"ran into the limit of {limit:g} min"
        found = Diagnosis(FailureKind.CONFIGURATION, sentence, "raise budget.trial_minutes")
        return Stop(StopKind.TIME_LIMIT, sentence, found)
    if look.unmatched:
        return Stop(StopKind.UNREAD, look.unmatched, unread(look.unmatched))
    if look.trial.probe and probed(look.run):
        return Stop(StopKind.PROBED, "a warm block and an eval are measured")
    silence = now - max(look.grew_at, started)
    last = look.begun >= look.trial.replicates
    if last and not look.trial.probe and (why := _nothing_more(study, look, silence)):
        return Stop(StopKind.REACHED, why)
    if silence > site.stall_minutes * 60:
        sentence = look.unreadable or f"its log has been silent for {silence / 60:.0f} min"
        remedy = "it hung, or its output goes elsewhere: it is run again on another node"
        return Stop(StopKind.SILENT, sentence, Diagnosis(FailureKind.INFRASTRUCTURE, sentence, remedy))
    return None


def _nothing_more(study: Study, look: JobSnapshot, silence: float) -> str:
    """Why a run whose job goes on has nothing more to show; "" while it has, and while it may end by itself."""
    objective, run = objective_of(study), look.run
    stop = objective.stop(run)
    if stop is None:
        return objective.over(look.trial, run)
    if silence > GRACE_SECONDS:
        return f"reached the target and did not end by itself: {study.eval_words(stop)}"
    if study.stops_at_target and (_trained_on(run, stop) or _went_on(run, stop) > GRACE_SECONDS):
        return f"reached the target and trains on: {study.eval_words(stop)}"
    return ""


def _trained_on(run: RunLog, stop: Eval) -> bool:
    """Whether the log shows training beyond ``stop``: a program that knows no target only ends at its last step."""
    latest = [*(e.samples for e in run.evals[-1:]), *(p.samples for p in run.train[-1:])]
    return run.run_stop_ms is None and max(latest) > stop.samples


def _went_on(run: RunLog, stop: Eval) -> float:
    """Seconds for which the log of a run goes on after ``stop``."""
    if run.run_stop_ms is not None or run.run_start_ms is None or run.last_ms is None or math.isnan(stop.seconds):
        return 0.0
    return (run.last_ms - run.run_start_ms) / 1000 - stop.seconds


def _queued(study: Study, look: JobSnapshot, now: float) -> Stop | None:
    """For a job in the queue: give it up when it waited for too long, or can never start."""
    waited = now - (look.attempt.submitted_at or look.attempt.intended_at)
    found = queueing.too_long(study, look.status, waited)
    return None if found is None else Stop(StopKind.QUEUE, *found)


def _undying(look: JobSnapshot) -> str:
    nodes = ", ".join(look.attempt.nodes) or "its node"
    return f"job {look.attempt.job_id} refuses to die on {nodes}: tell the administrator"


def probed(run: RunLog) -> bool:
    """Whether a warm block and an eval are measured."""
    timing = curves.timing(run)
    return timing.warm and math.isfinite(timing.samples_per_second) and math.isfinite(timing.seconds_per_eval)


def conclude(
    study: Study,
    attempts: Sequence[Attempt],
    status: JobStatus,
    run: RunLog,
    diagnosis: Diagnosis,
    *,
    trial: Trial,
    node_at_fault: bool = False,
    far_over: bool = False,
) -> Finish | Retry:
    """For a job that is over: what its log and the driver's own stops make of the trial.

    far_over: by its layout it needs far more memory than a GPU has. node_at_fault: its failure may be its node's,
    whatever its class (``node_faults.may_be_the_nodes``).

    The log decides, not the exit code: a target in the log is success whatever the code, and a clean exit without
    evals is a failure.
    """
    attempt, objective = attempts[-1], objective_of(study)
    if far_over and diagnosis.kind is FailureKind.INFEASIBLE:
        diagnosis = replace(diagnosis, certain=True)
    if trial.probe and probed(run):
        timing = curves.timing(run)
        speed = f"{timing.samples_per_second:.4g} samples/s, {timing.seconds_per_eval:.3g} s an eval"
        return Finish(Verdict.CENSORED, f"a probe of the layout: {speed}")
    whole = not diagnosis.kind and status.state is JobState.ENDED and not status.exit_code
    own_end = whole and attempt.stop in (StopKind.NONE, StopKind.REACHED)
    measured = objective.measured(trial, run, ended=own_end)
    if measured and (objective.has_target or attempt.stop not in (StopKind.PRUNED, StopKind.CAPPED)):
        stop = objective.stop(run)
        if stop is not None and not math.isfinite(stop.seconds):  # a full disk, a truncated file
            lost = "the log shows the target and not when the run began: lines of it are lost"
            return _after_failure(study, attempts, status, Diagnosis(FailureKind.UNKNOWN, lost), node_at_fault)
        return Finish(Verdict.REACHED, measured)
    if attempt.stop is StopKind.PRUNED:
        return Finish(Verdict.PRUNED, attempt.stop_sentence)
    if attempt.stop is StopKind.CAPPED:
        return Finish(Verdict.CAPPED, attempt.stop_sentence)
    if attempt.stop is StopKind.USER:
        return Finish(Verdict.CANCELLED, attempt.stop_sentence or "cancelled by the user")
    if status.state is JobState.CANCELLED and attempt.stop is StopKind.NONE and not diagnosis.specific:
        return Finish(Verdict.CANCELLED, "somebody cancelled its job, outside of the sweep (scancel)")
    if run.evals and diagnosis.kind in _LIMITED and (limit := _time_limit(attempt, status, diagnosis)):
        return Finish(Verdict.CENSORED, f"{limit}; {_last_eval(study, run)}")
    if whole and run.evals:
        return Finish(Verdict.CENSORED, f"ended before the target; {_last_eval(study, run)}")
    return _after_failure(study, attempts, status, diagnosis, node_at_fault)


def of_training(status: JobStatus, run: RunLog) -> JobStatus:
    """The status without the exit code of another step, which the script survived, where the log states a run's end.

    ``mlperf-sysjson.sh`` fails in many a healthy job, and Slurm keeps the worst code of all steps.
    """
    return replace(status, exit_code=0) if status.step_failed and run.run_stop_ms is not None and run.evals else status


BELIEVED = (Verdict.REACHED, Verdict.CENSORED, Verdict.PRUNED, Verdict.CAPPED)
"""Ends that say something of the trial's parameters."""


def refuse(study: Study, attempts: Sequence[Attempt], untrue: Diagnosis) -> Finish | Retry:
    """For a result that cannot be true: measured again where another attempt may tell, else a named failure."""
    if untrue.kind not in RETRIED:
        return Finish(Verdict.FAILED, f"{untrue.kind}: {untrue.told}")
    if len(attempts) >= study.budget.attempts:
        return Finish(Verdict.FAILED, f"{untrue.kind}, {len(attempts)} attempts: {untrue.told}")
    return Retry(f"{untrue.kind}: {untrue.told}")


_LIMITED = (FailureKind.NONE, FailureKind.CONFIGURATION)
"""What a diagnosis says of a run that only its time limit ended: any other class was there before the limit."""


def _time_limit(attempt: Attempt, status: JobStatus, diagnosis: Diagnosis) -> str:
    """Which limit ended the job: the driver's own, the job's, or that of a step in it; "" for none."""
    if attempt.stop is StopKind.TIME_LIMIT:
        return attempt.stop_sentence
    if status.state is JobState.TIME_LIMIT:
        return "ran into the job's time limit"
    return "ran into its step's time limit" if "DUE TO TIME LIMIT" in diagnosis.line else ""


def _after_failure(
    study: Study, attempts: Sequence[Attempt], status: JobStatus, diagnosis: Diagnosis, node_at_fault: bool
) -> Finish | Retry:
    attempt = attempts[-1]
    kind = diagnosis.kind or "unknown"
    what = attempt.stop_sentence or diagnosis.told or f"job {status.state.value}, exit code {status.exit_code}"
    if kind == "infeasible":
        before = any(a.failure == "infeasible" for a in attempts[:-1])
        last = diagnosis.certain or before or len(attempts) >= study.budget.attempts
        if last or launcher_kind(study.site).one_machine:
            return Finish(Verdict.INFEASIBLE, what)
        return Retry(f"{what}; once more on another node, memory failures can be flaky", status.nodes)
    if kind == "diverged":
        return Finish(Verdict.PRUNED, what)
    spent = len(attempts) >= study.budget.attempts
    if kind not in RETRIED:
        elsewhere = node_at_fault and not (diagnosis.certain or spent or _by_limit(attempt, status, diagnosis))
        if elsewhere and not launcher_kind(study.site).one_machine:
            node = ", ".join(status.nodes)
            return Retry(f"{kind}: {what}; once more on another node than {node}", status.nodes)
        return Finish(Verdict.FAILED, f"{kind}: {what}")
    if spent:
        tried = f", {len(attempts)} attempts" if len(attempts) > 1 else ""
        return Finish(Verdict.FAILED, f"{kind}{tried}: {what}")
    return Retry(f"{kind}: {what}", status.nodes if kind in ("infrastructure", "flaky", "unknown") else ())


def _by_limit(attempt: Attempt, status: JobStatus, diagnosis: Diagnosis) -> bool:
    """Whether a limit of time or of the queue ended it: another node does not change that."""
    return attempt.stop is StopKind.QUEUE or bool(_time_limit(attempt, status, diagnosis))


def _last_eval(study: Study, run: RunLog) -> str:
    target = study.objective.target
    return study.eval_words(run.evals[-1]) + ("" if target is None else f", target {target:g}")


def found(attempt: Attempt, status: JobStatus, seen: Diagnosis, *, log_cut: bool = False) -> Diagnosis:
    """Why an attempt failed: what its log and the cluster say (``seen``), or why it was given up.

    A job that was given up always shows that it was cancelled; only another cause in its log is more telling. What the
    log names besides is told with it. Of a log that was cut while the job ran (``log_cut``) the end is missing, where
    the cause stands: what is left is no reason to fail a trial for good.
    """
    if log_cut and seen.specific and seen.kind in (FailureKind.CONFIGURATION, FailureKind.INFEASIBLE):
        remedy = "its log was cut or replaced while it ran, so the cause is unknown; the trial is run again"
        seen = replace(seen, kind=FailureKind.INFRASTRUCTURE, remedy=remedy, certain=False)
    certain, also = attempt.stop is StopKind.UNREAD, seen.line if seen.specific else seen.also
    given_up = Diagnosis(FailureKind(attempt.failure), attempt.line, attempt.remedy, certain, also)
    if attempt.stop in (StopKind.QUEUE, StopKind.TIME_LIMIT, StopKind.UNREAD):
        return given_up
    little = seen.kind in (FailureKind.NONE, FailureKind.UNKNOWN, FailureKind.INFRASTRUCTURE) and not seen.specific
    if attempt.stop is StopKind.SILENT and little and status.state is not JobState.NODE_FAILED:
        return given_up
    return seen
