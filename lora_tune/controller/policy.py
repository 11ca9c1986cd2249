"""What happens to a trial next: pure functions of (study, records, job status, log, now)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lora_tune import curves
from lora_tune.config.study import Study
from lora_tune.launchers.base import JobState, JobStatus, Waits, launcher_kind
from lora_tune.logs.failures import Diagnosis, FailureKind
from lora_tune.logs.mllog import Eval, RunLog
from lora_tune.store.records import Attempt, StopKind, Verdict

GRACE_SECONDS = 30.0
"""How long a job whose log shows the target may take to end by itself."""

UNSATISFIABLE_SECONDS = 600.0
"""How long a job may wait that the cluster says it can never run: nodes that come back may yet change that."""

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

    replicates: runs that the job is to make, one after another. begun: runs that its log shows so far.
    unreadable: why the log cannot be read, "" while it can. unmatched: why nothing in the log is an eval, "" while
    some is or it is too early to say. probe: only the layout's speed is wanted.
    """

    attempt: Attempt
    status: JobStatus
    run: RunLog
    grew_at: float
    replicates: int = 1
    begun: int = 1
    unreadable: str = ""
    unmatched: str = ""
    probe: bool = False


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
    limit = study.budget.trial_minutes * look.replicates
    # Of a trial that shares its node with others, its own share of the time counts.
    if (now - started) * look.status.node_share > limit * 60:
        sentence = f"ran into the limit of {limit:g} min"
        found = Diagnosis(FailureKind.CONFIGURATION, sentence, "raise budget.trial_minutes")
        return Stop(StopKind.TIME_LIMIT, sentence, found)
    if look.unmatched:
        return Stop(StopKind.UNREAD, look.unmatched, unread(look.unmatched))
    if look.probe and probed(look.run):
        return Stop(StopKind.PROBED, "a warm block and an eval are measured")
    silence = now - max(look.grew_at, started)
    last = look.begun >= look.replicates
    stop = look.run.reached(study.target) if last and not study.maximise else None
    if stop is not None and max(silence, _went_on(look.run, stop)) > GRACE_SECONDS:
        return Stop(StopKind.REACHED, "reached the target and did not end by itself")
    if silence > site.stall_minutes * 60:
        sentence = look.unreadable or f"its log has been silent for {silence / 60:.0f} min"
        remedy = "it hung, or its output goes elsewhere: it is run again on another node"
        return Stop(StopKind.SILENT, sentence, Diagnosis(FailureKind.INFRASTRUCTURE, sentence, remedy))
    return None


def _went_on(run: RunLog, stop: Eval) -> float:
    """Seconds for which a run trained on after ``stop``: a program that knows no target only ends at its last step."""
    if run.run_stop_ms is not None or run.run_start_ms is None or run.last_ms is None or math.isnan(stop.seconds):
        return 0.0
    return (run.last_ms - run.run_start_ms) / 1000 - stop.seconds


_WAITS = {
    Waits.NORMAL: (FailureKind.INFRASTRUCTURE, "raise site.queue_minutes, or ask for less"),
    Waits.HELD: (FailureKind.HELD, "scontrol release {job}, or ask the administrator why it is held"),
    Waits.DRAINED: (FailureKind.DRAINED, "sinfo --list-reasons; the administrator resumes the nodes"),
    Waits.UNSATISFIABLE: (
        FailureKind.UNSATISFIABLE,
        "scontrol show partition; then correct site.nodes, gpus_per_node, partition, account, or budget.trial_minutes",
    ),
}


def _queued(study: Study, look: JobSnapshot, now: float) -> Stop | None:
    """For a job in the queue: give it up when it waited for too long, or can never start."""
    waited, status = now - (look.attempt.submitted_at or look.attempt.intended_at), look.status
    limit = study.site.queue_minutes * 60
    if status.waits is Waits.UNSATISFIABLE:
        limit = min(limit, UNSATISFIABLE_SECONDS)
    if waited <= limit:
        return None
    sentence = f"waited {waited / 60:.0f} min in the queue; {status.reason}".rstrip("; ")
    return Stop(StopKind.QUEUE, sentence, _why_it_waits(status))


def _why_it_waits(status: JobStatus) -> Diagnosis:
    kind, remedy = _WAITS[status.waits]
    return Diagnosis(kind, status.reason or "in the queue", remedy.format(job=status.job_id))


def waiting(status: JobStatus) -> str:
    """What a person should know of a job that waits for more than its turn; "" for all others."""
    if status.state is not JobState.QUEUED or status.waits is Waits.NORMAL:
        return ""
    found = _why_it_waits(status)
    return f"job {status.job_id} waits, {found.kind.value}: {found.line}; {found.remedy}"


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
    probe: bool = False,
    node_at_fault: bool = False,
) -> Finish | Retry:
    """For a job that is over: what its log and the driver's own stops make of the trial. probe: it was a short run.

    node_at_fault: its failure may be its node's, whatever its class (``node_faults.may_be_the_nodes``).

    The log decides, not the exit code: a target in the log is success whatever the code, and a clean exit without
    evals is a failure.
    """
    attempt = attempts[-1]
    target = study.target
    if probe and probed(run):
        timing = curves.timing(run)
        speed = f"{timing.samples_per_second:.4g} samples/s, {timing.seconds_per_eval:.3g} s an eval"
        return Finish(Verdict.CENSORED, f"a probe of the layout: {speed}")
    if study.maximise and attempt.stop is not StopKind.CAPPED:
        if curves.measured_throughput(run):
            return Finish(Verdict.REACHED, f"measured {curves.measured_throughput(run):.4g} samples/s")
    elif not study.maximise and (stop := run.reached(target)) is not None:
        if not math.isfinite(stop.seconds):  # the line with run_start is lost: a full disk, a truncated file
            lost = "the log shows the target and not when the run began: lines of it are lost"
            return _after_failure(study, attempts, status, Diagnosis(FailureKind.UNKNOWN, lost), node_at_fault)
        return Finish(
            Verdict.REACHED, f"eval loss {stop.loss:.4f} at {stop.samples:g} samples, {_time_told(run, stop)}"
        )
    if attempt.stop is StopKind.PRUNED:
        return Finish(Verdict.PRUNED, attempt.stop_sentence)
    if attempt.stop is StopKind.CAPPED:
        return Finish(Verdict.CAPPED, attempt.stop_sentence)
    if attempt.stop is StopKind.USER:
        return Finish(Verdict.CANCELLED, "cancelled by the user")
    if run.evals and diagnosis.kind in _LIMITED and (limit := _time_limit(attempt, status, diagnosis)):
        return Finish(Verdict.CENSORED, f"{limit}; {_last_eval(run, target)}")
    if not diagnosis.kind and run.evals and status.state is JobState.ENDED and not status.exit_code:
        return Finish(Verdict.CENSORED, f"ended before the target; {_last_eval(run, target)}")
    return _after_failure(study, attempts, status, diagnosis, node_at_fault)


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


def _time_told(run: RunLog, stop: Eval) -> str:
    """The time to the target; of a trial that shared its GPU, as it would be alone, and as it was."""
    packed = run.packed_seconds
    return f"{stop.seconds:.1f} s" + ("" if packed is None else f" alone ({packed:.1f} s in its pack)")


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


def _last_eval(run: RunLog, target: float) -> str:
    last = run.evals[-1]
    return f"eval loss {last.loss:.4f} at {last.samples:g} samples, target {target:g}"


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
