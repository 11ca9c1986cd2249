"""Jobs that wait, in the queue or for nodes to be had: why, for how long they may, what a person should know of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lora_tune.config.study import Study
from lora_tune.launchers.base import JobState, JobStatus, Waits
from lora_tune.logs.failures import Diagnosis, FailureKind
from lora_tune.store.records import Attempt

UNSATISFIABLE_SECONDS = 600.0
"""How long a job may wait that the cluster says it can never run: nodes that come back may yet change that."""

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 30.0, 900.0
"""Before a job whose nodes could not be had is submitted again: the first time; twice as long each further time."""

NO_NODES = (
    "no nodes can be had: jobs ended before they began, since their nodes did not come up (sinfo --list-reasons); "
    f"they are submitted again after {FIRST_WAIT_SECONDS:g} s, then after twice as long, at most "
    f"{LONGEST_WAIT_SECONDS / 60:g} min, and spend no attempt"
)

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


def may_be_submitted(attempts: Sequence[Attempt], now: float) -> bool:
    """Whether the next attempt of a trial may be submitted at ``now`` (epoch seconds), or waits for nodes to be had."""
    if not (without := _without_nodes(attempts)):
        return True
    wait = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(len(without) - 1, 10))
    return abs(now - (without[0].ended_at or now)) >= wait  # a clock that was set keeps nobody waiting


def without_nodes(study: Study, attempts: Sequence[Attempt]) -> str:
    """For how long a trial has been given no nodes, in words, once that is longer than it may wait; else ""."""
    without = _without_nodes(attempts)
    waited = max(a.ended_at or a.intended_at for a in without) - min(a.intended_at for a in without) if without else 0.0
    if waited <= study.site.queue_minutes * 60:
        return ""
    return f"no nodes could be had in {waited / 60:.0f} min (site.queue_minutes)"


def _without_nodes(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The newest attempts, the newest first, that could be given no nodes, up to one that ran."""
    return list(itertools.takewhile(lambda a: a.failure == FailureKind.CAPACITY, reversed(attempts)))
