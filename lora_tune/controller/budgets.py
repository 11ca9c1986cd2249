"""Whether a sweep goes on: its budgets, and trials that all fail alike. Pure functions of (study, records, now)."""

from __future__ import annotations

import math

from lora_tune.config.study import Study
from lora_tune.logs.failures import FailureKind
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict

SAME_FAILURES = 3
"""Trials in a row that fail for a reason of configuration before the whole sweep stops."""

ALIKE = f"{SAME_FAILURES} trials in a row failed"

UNSUBMITTED = "not submitted, "
"""Before the budget that ended a trial which waited for an attempt, in its sentence."""


def may_propose(study: Study, sweep: StudyRecords, now: float) -> str:
    """ "" when another trial may be proposed, otherwise the reason why not, in words.

    The budget is checked against what was spent and what runs, so it is exceeded by no more than what runs.
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
    """ "" while anything may be submitted, another attempt too; otherwise which budget is used up."""
    budget = study.budget
    if budget.node_hours is not None and sweep.charged_hours(now) >= budget.node_hours:
        return f"the budget of {budget.node_hours:g} node-hours is spent"
    if budget.wall_hours is not None and now - sweep.began_at >= budget.wall_hours * 3600:
        return f"the {budget.wall_hours:g} hours of the sweep are over"
    return ""


def hopeless(sweep: StudyRecords, fixed_at: float = -math.inf) -> Trial | None:
    """The newest of several trials in a row that failed alike for a reason of configuration, with none that ran.

    Or of one whose log the study cannot read: no other trial's log would be read either.
    Such a sweep would only burn its budget. fixed_at: epoch seconds; what failed before has been fixed since.
    """
    ended = sorted((t for t in sweep.trials.values() if t.verdict), key=lambda t: t.finished_at or 0.0)
    recent = [t for t in ended if (t.finished_at or 0.0) >= fixed_at][-SAME_FAILURES:]
    unread = [t for t in recent if any(a.failure == FailureKind.UNREAD for a in sweep.attempts_of(t.number)[-1:])]
    if unread and all(t.verdict is Verdict.FAILED for t in ended):
        return unread[-1]
    if len(recent) < SAME_FAILURES or any(t.verdict is not Verdict.FAILED for t in ended):
        return None
    return recent[-1]
