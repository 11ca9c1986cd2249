"""Jobs that wait in the queue or for nodes: why, for how long they may, and what to tell the user."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from lora_tune.config.study import Study
from lora_tune.launchers.base import JobState, JobStatus, Waits
from lora_tune.logs.failures import Diagnosis, FailureKind
from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState, Verdict

# Whether a sweep continues: its budgets, and trials that all fail alike. Pure functions of (study, records, now).

SAME_FAILURES = 3
"""Consecutive trials that fail for a configuration reason before the whole sweep stops."""

ALIKE = f"{SAME_FAILURES} trials in a row failed"

UNSUBMITTED = "not submitted, "
"""Marks, in a trial's sentence, that the budget ended it while it waited for an attempt."""


def may_propose(study: Study, sweep: StudyRecords, now: float) -> str:
    """ "" if another trial may be proposed, otherwise the reason why not.

    The budget is compared with what was spent and what runs, so it is exceeded by no more than what runs.
    """
    budget = study.budget
    open_trials = sum(t.state is not TrialState.FINISHED for t in sweep.trials.values())
    if budget.trials is not None and len(sweep.trials) >= budget.trials:
        return "its one trial is proposed" if budget.trials == 1 else f"all {budget.trials} trials are proposed"
    if reason := spent(study, sweep, now):
        return reason
    if open_trials >= budget.parallel:
        return f"{open_trials} of {budget.parallel} slots are taken"
    return ""


def spent(study: Study, sweep: StudyRecords, now: float) -> str:
    """ "" while anything may be submitted, another attempt included; otherwise which budget is spent."""
    budget = study.budget
    if budget.node_hours is not None and sweep.charged_hours(now) >= budget.node_hours:
        return f"the budget of {budget.node_hours:g} node-hours is spent"
    if budget.wall_hours is not None and now - sweep.began_at >= budget.wall_hours * 3600:
        return f"the {budget.wall_hours:g} hours of the sweep are over"
    return ""


def hopeless(sweep: StudyRecords, fixed_at: float = -math.inf) -> Trial | None:
    """The newest of several consecutive trials that failed alike for a configuration reason, if none ran.

    Or one whose log the study cannot read, because no other trial's log would be readable either. Such a sweep would
    only waste its budget. fixed_at: epoch seconds; earlier failures have been fixed since.
    """
    ended = sorted((t for t in sweep.trials.values() if t.verdict), key=lambda t: t.finished_at or 0.0)
    recent = [t for t in ended if (t.finished_at or 0.0) >= fixed_at][-SAME_FAILURES:]
    unread = [t for t in recent if any(a.failure == FailureKind.UNREAD for a in sweep.attempts_of(t.number)[-1:])]
    if unread and all(t.verdict is Verdict.FAILED for t in ended):
        return unread[-1]
    if len(recent) < SAME_FAILURES or any(t.verdict is not Verdict.FAILED for t in ended):
        return None
    return recent[-1]


UNSATISFIABLE_SECONDS = 600.0
"""How long a job may wait that the cluster reports as unsatisfiable, because nodes may come back."""

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 30.0, 900.0
"""Waiting time before resubmitting a job that got no nodes: the first time, doubled each time up to the longest."""

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
    """The failure class of a wait, with its remedy."""
    kind, remedy = _WAITS[status.waits]
    return Diagnosis(kind, status.reason or "in the queue", remedy.format(job=status.job_id))


def waiting(status: JobStatus) -> str:
    """A message about a job that waits for more than its turn; "" for all others."""
    if status.state is not JobState.QUEUED or status.waits is Waits.NORMAL:
        return ""
    reason = why_it_waits(status)
    return f"job {status.job_id} waits, {reason.kind.value}: {reason.line}; {reason.remedy}"


def too_long(study: Study, status: JobStatus, waited: float) -> tuple[str, Diagnosis] | None:
    """Why a job that has waited for so many seconds is given up, as a sentence and a class; None if it is not."""
    limit = study.site.queue_minutes * 60
    if status.waits is Waits.UNSATISFIABLE:
        limit = min(limit, UNSATISFIABLE_SECONDS)
    if waited <= limit:
        return None
    return f"waited {waited / 60:.0f} min in the queue; {status.reason}".rstrip("; "), why_it_waits(status)


def may_be_submitted(attempts: Sequence[Attempt], now: float) -> bool:
    """Whether the next attempt of a trial may be submitted at ``now`` (epoch seconds), or must wait for nodes."""
    if not (without := _without_nodes(attempts)):
        return True
    wait = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(len(without) - 1, 10))
    return abs(now - (without[0].ended_at or now)) >= wait  # abs: a clock change must not block submissions


def without_nodes(study: Study, attempts: Sequence[Attempt]) -> str:
    """How long a trial has got no nodes, in words, once that exceeds its limit; else ""."""
    without = _without_nodes(attempts)
    waited = max(a.ended_at or a.intended_at for a in without) - min(a.intended_at for a in without) if without else 0.0
    if waited <= study.site.queue_minutes * 60:
        return ""
    return f"no nodes could be had in {waited / 60:.0f} min (site.queue_minutes)"


def _without_nodes(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The newest attempts, newest first, that got no nodes, up to one that ran."""
    return list(itertools.takewhile(lambda a: a.failure == FailureKind.CAPACITY, reversed(attempts)))
