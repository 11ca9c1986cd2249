"""Jobs that wait in the queue: why, for how long they may, and what a person should know of it."""

from __future__ import annotations

from lora_tune.config.study import Study
from lora_tune.launchers.base import JobState, JobStatus, Waits
from lora_tune.logs.failures import Diagnosis, FailureKind

UNSATISFIABLE_SECONDS = 600.0
"""How long a job may wait that the cluster says it can never run: nodes that come back may yet change that."""

_WAITS = {
    Waits.NORMAL: (FailureKind.INFRASTRUCTURE, "raise site.queue_minutes, or ask for less"),
    Waits.HELD: (FailureKind.HELD, "scontrol release {job}, or ask the administrator why it is held"),
    Waits.DRAINED: (FailureKind.DRAINED, "sinfo --list-reasons; the administrator resumes the nodes"),
    Waits.UNSATISFIABLE: (
        FailureKind.UNSATISFIABLE,
        "scontrol show partition; then correct site.nodes, gpus_per_node, partition, account, or budget.trial_minutes",
    ),
}


def why_it_waits(status: JobStatus) -> Diagnosis:
    """The class of a wait, with its remedy."""
    kind, remedy = _WAITS[status.waits]
    return Diagnosis(kind, status.reason or "in the queue", remedy.format(job=status.job_id))


def waiting(status: JobStatus) -> str:
    """What a person should know of a job that waits for more than its turn; "" for all others."""
    if status.state is not JobState.QUEUED or status.waits is Waits.NORMAL:
        return ""
    reason = why_it_waits(status)
    return f"job {status.job_id} waits, {reason.kind.value}: {reason.line}; {reason.remedy}"


def too_long(study: Study, status: JobStatus, waited: float) -> tuple[str, Diagnosis] | None:
    """Why a job that has waited for so many seconds is given up, as a sentence and a class; None while it is not."""
    limit = study.site.queue_minutes * 60
    if status.waits is Waits.UNSATISFIABLE:
        limit = min(limit, UNSATISFIABLE_SECONDS)
    if waited <= limit:
        return None
    return f"waited {waited / 60:.0f} min in the queue; {status.reason}".rstrip("; "), why_it_waits(status)
