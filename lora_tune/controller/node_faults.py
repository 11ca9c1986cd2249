"""Which failures are a node's and not a trial's: pure functions of the records.

A machine fault (infrastructure, flaky) always counts as the node's. Any other failure does if it occurs only on that
node: other nodes run trials, and none of them fails like this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from lora_tune.config.space import Space
from lora_tune.config.study import Study
from lora_tune.controller import limits
from lora_tune.controller.changed_study import base_trial
from lora_tune.controller.conclusion import OF_SETUP, PLAUSIBLE_VERDICTS
from lora_tune.launchers.base import JobState
from lora_tune.logs.failures import FailureKind
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Attempt, Changes, StopKind, StudyRecords, Trial, TrialState, Verdict
from lora_tune.workloads.base import Start
from lora_tune.workloads.base_config import parameters_at

# Trials that failed by a fault of the set-up are run again once a user has fixed it. Pure functions of the records.
#
# A missing container, unmounted data, an option that Slurm's plugins reject: such a fault says nothing about the trial.
# When the same command is run again, the trial waits again under its own number, with its own point and parameters,
# before any new proposal. Its failed attempts count towards no budget. The same holds for trials that waited for an
# attempt when the budget was spent, once it is larger.


def nothing_measured(study: Study, sweep: StudyRecords) -> bool:
    """Whether all attempts of a sweep failed in the set-up, so that no result depends on its initial state."""
    return all(
        attempt.fixed_at is not None or _of_setup(study, sweep, attempt, measured=False)
        for attempt in sweep.attempts.values()
    )


def retryable_trials(study: Study, sweep: StudyRecords) -> list[Trial]:
    """The trials that failed by a fault of the set-up, by number, without replicates, which their race recreates."""
    measured = any(trial.verdict in _TELLING for trial in sweep.trials.values())
    ended = (t for _, t in sorted(sweep.trials.items()) if t.verdict is Verdict.FAILED and t.replicate_of is None)
    return [trial for trial in ended if _fails_of_setup(study, sweep, trial, measured=measured)]


def retry_after_fix(study: Study, sweep: StudyRecords, begin: Start | None, now: float) -> Changes:
    """The changes to the records after a user fixed the set-up at ``now`` (epoch seconds).

    begin: the machine's present config, None if the study names none. While nothing was measured, the fix may be in
    that config: then trial 0 measures the new one, and all others build on it.
    """
    back = {trial.number: _waiting(trial) for trial in retryable_trials(study, sweep)}
    attempts = [a for number in back for a in sweep.attempts_of(number) if a.fixed_at is None]
    back |= {trial.number: _waiting(trial) for trial in _unsubmitted(sweep) if not limits.spent(study, sweep, now)}
    base = base_trial(sweep)
    if begin is not None and base is not None and nothing_measured(study, sweep) and base.base_values != begin.values:
        unfinished = {t.number: t for t in sweep.trials.values() if t.state is not TrialState.FINISHED}
        back = {n: _on(begin, trial, study.search_space) for n, trial in (unfinished | back).items()}
    return Changes(tuple(back.values()), tuple(replace(attempt, fixed_at=now) for attempt in attempts))


def _unsubmitted(sweep: StudyRecords) -> list[Trial]:
    """The trials that waited for an attempt when the budget was spent, which continue if it is larger now."""
    ended = (t for t in sweep.trials.values() if t.verdict is Verdict.CANCELLED and t.replicate_of is None)
    return [trial for trial in ended if limits.UNSUBMITTED in trial.sentence]


_TELLING = (*PLAUSIBLE_VERDICTS, Verdict.INFEASIBLE)
"""Verdicts of trials whose programs ran."""


def _fails_of_setup(study: Study, sweep: StudyRecords, trial: Trial, *, measured: bool) -> bool:
    attempts = sweep.attempts_of(trial.number)
    if not attempts or attempts[-1].submitted_at is None:  # it requests more than the scheduler ever grants
        return False
    return _of_setup(study, sweep, attempts[-1], measured=measured) and not _persists(study, sweep, attempts)


def _of_setup(study: Study, sweep: StudyRecords, attempt: Attempt, *, measured: bool) -> bool:
    """Whether an ended attempt failed by something that is the same for every trial.

    measured: whether trials of this sweep have run; before that an unknown failure also counts as the set-up's.
    """
    over = attempt.ended_at is not None or (attempt.submitted_at is None and attempt.failure != "")
    if not over:
        return False
    if attempt.stop is StopKind.TIME_LIMIT:
        return _limit_raised(study, sweep.trials[attempt.trial], attempt)
    return attempt.failure in OF_SETUP or (not measured and attempt.failure == FailureKind.UNKNOWN)


def _limit_raised(study: Study, trial: Trial, attempt: Attempt) -> bool:
    """Whether the time limit that ended it is now longer than it ran."""
    lived = (attempt.ended_at or 0.0) - (attempt.started_at or attempt.ended_at or 0.0)
    return study.budget.trial_minutes * 60 * trial.replicates > lived + study.site.kill_seconds


def _persists(study: Study, sweep: StudyRecords, attempts: Sequence[Attempt]) -> bool:
    """Whether its failure recurred after a fix with which others ran, or too often: then it is the trial's own."""
    last = attempts[-1]
    cause = (last.failure, last.remedy)
    fixes = {a.fixed_at for a in attempts[:-1] if a.fixed_at is not None and (a.failure, a.remedy) == cause}
    if not fixes:
        return False
    others = any(t.verdict in _TELLING and (t.finished_at or 0.0) > max(fixes) for t in sweep.trials.values())
    return others or len(fixes) >= study.budget.attempts


def _waiting(trial: Trial) -> Trial:
    """The trial reset to its proposal."""
    return replace(
        trial, state=TrialState.WAITING, verdict=None, sentence="", seconds=None, samples=None, finished_at=None,
        metrics=TrialMetrics(base=trial.metrics.base),
    )  # fmt: skip


def _on(begin: Start, trial: Trial, space: Space) -> Trial:
    """The trial on the machine's present config: unchanged, or with the trial's own point."""
    if trial.metrics.base is not None:
        tuned = space.conditions.present(begin.tuned or {})
        return replace(trial, tuned=tuned, parameters=begin.parameters, base_values=begin.values)
    if space.conditions.complete(trial.tuned).keys() != space.distributions().keys():
        return trial  # proposed in another space
    return replace(trial, parameters=parameters_at(begin, space, trial.tuned))


IN_A_ROW = 2
"""Consecutive failures of different trials after which a node is excluded."""

LEFT_OUT_SECONDS = 24 * 3600.0
"""How long a node is excluded; it may have been repaired since."""

MACHINE = ("infrastructure", "flaky")
"""Failure classes that a machine alone explains."""

ANY = (*MACHINE, "configuration", "unknown", "infeasible")
"""Failure classes that a machine explains if no other machine shows them."""


def suspect_nodes(sweep: StudyRecords, now: float) -> dict[str, str]:
    """Nodes to exclude for a while, each with the reason: their last trials all failed.

    Cancelled and lost jobs do not count. now: epoch seconds.
    """
    recent = _recent(sweep.attempts.values(), now)
    if not any(a.failure for a in recent):  # called before every submission: keep the common case fast
        return {}
    return {
        node: f"{len(failed)} trials in a row failed there, last: {list(failed.values())[-1].line}"
        for node, failed in _failed_in_a_row(recent).items()
        if len(failed) >= IN_A_ROW
        and (all(a.failure in MACHINE for a in failed.values()) or _sits_on(node, failed, recent, now))
    }


def may_be_the_nodes(sweep: StudyRecords, attempt: Attempt, now: float) -> bool:
    """Whether ``attempt``, which failed, should be tried on another node although its class blames the study.

    True while no other node has failed like this, and on a node that never ran a trial where others do.
    """
    if not attempt.nodes:
        return False
    of_attempt = set(attempt.nodes)
    others = [
        a for a in _recent(sweep.attempts.values(), now) if (a.trial, a.number) != (attempt.trial, attempt.number)
    ]
    elsewhere = [a for a in others if a.nodes and not of_attempt & set(a.nodes)]
    if not any(a.failure in ANY for a in elsewhere):
        return True
    lived = _seconds(attempt, now)
    worked_on_node = any(of_attempt & set(a.nodes) and _works(a, lived, now) for a in others)
    return not worked_on_node and any(_works(a, lived, now) for a in elsewhere)


def _recent(attempts: Iterable[Attempt], now: float) -> list[Attempt]:
    """Running attempts, and those that ended in the last day and were not fixed since; by their end."""
    known = (a for a in attempts if a.started_at and a.fixed_at is None)
    recent = [a for a in known if a.ended_at is None or now - a.ended_at < LEFT_OUT_SECONDS]
    return sorted(recent, key=lambda a: a.ended_at or now)


def _failed_in_a_row(recent: Sequence[Attempt]) -> dict[str, dict[int, Attempt]]:
    """Node -> the attempts, by trial, that failed on it since the last one there that did not."""
    failed: dict[str, dict[int, Attempt]] = {}
    for attempt in (a for a in recent if a.ended_at is not None):
        ended_by_itself = attempt.state not in (JobState.CANCELLED, JobState.LOST, JobState.PREEMPTED)
        if attempt.failure in ANY and (ended_by_itself or attempt.stop is StopKind.SILENT):
            for node in attempt.nodes:
                failed.setdefault(node, {})[attempt.trial] = attempt
        elif not attempt.failure and attempt.stop is not StopKind.USER:
            for node in attempt.nodes:
                failed.pop(node, None)
    return failed


def _sits_on(node: str, failed: Mapping[int, Attempt], recent: Collection[Attempt], now: float) -> bool:
    """Whether what failed on ``node`` runs elsewhere: other trials without such a failure, or one of these trials."""
    lived = max(_seconds(a, now) for a in failed.values())
    elsewhere = [a for a in recent if a.nodes and node not in a.nodes]
    working = [a for a in elsewhere if _works(a, lived, now)]
    only_node = not any(a.failure in ANY for a in elsewhere)
    return bool(working) and (only_node or any(a.trial in failed for a in working))


def _works(attempt: Attempt, lived: float, now: float) -> bool:
    """Whether an attempt ended well, or has run for twice as long as those that failed (``lived`` seconds)."""
    if attempt.ended_at is None:
        return _seconds(attempt, now) > 2 * lived
    return not attempt.failure and attempt.stop is not StopKind.USER


def _seconds(attempt: Attempt, now: float) -> float:
    end = now if attempt.ended_at is None else attempt.ended_at
    return max(0.0, end - attempt.started_at) if attempt.started_at is not None else 0.0
