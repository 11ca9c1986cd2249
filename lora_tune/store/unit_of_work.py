"""The driver's memory of a sweep, and what of it is not written down yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lora_tune.logs.run import Eval
from lora_tune.store import Changes
from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState


class UnitOfWork:
    """Records by key, kept whole in memory; ``take_changes`` hands over what is new since the last call.

    ``sweep`` is a live view: the same object all along, showing every later change.
    """

    def __init__(self, sweep: StudyRecords) -> None:
        self._trials = dict(sweep.trials)
        self._attempts = dict(sweep.attempts)
        self._evals = dict(sweep.evals)
        self.sweep = replace(sweep, trials=self._trials, attempts=self._attempts, evals=self._evals)
        self._changed_trials: dict[int, Trial] = {}
        self._changed_attempts: dict[tuple[int, int], Attempt] = {}
        self._new_evals: list[tuple[int, int, int, Eval]] = []
        self._ended: dict[int, Trial] = {}
        self.by_job_name = {attempt.job_name: attempt for attempt in self._attempts.values()}
        """The attempts, by the names of their jobs; a live view."""

    def put_trial(self, trial: Trial) -> None:
        """Remember a trial in its new form."""
        self._trials[trial.number] = self._changed_trials[trial.number] = trial
        if trial.state is TrialState.FINISHED:
            self._ended[trial.number] = trial
            self.sweep.forget()

    def put_attempt(self, attempt: Attempt) -> None:
        """Remember an attempt in its new form; one that did not change costs nothing."""
        key = (attempt.trial, attempt.number)
        if self._attempts.get(key) != attempt:
            self._attempts[key] = self._changed_attempts[key] = self.by_job_name[attempt.job_name] = attempt

    def see_evals(self, attempt: Attempt, evals: Sequence[Eval]) -> Sequence[Eval]:
        """Remember the evals of an attempt so far; returns those that are new.

        A log that was truncated or started over replaces what was known from its first differing eval on.
        """
        key = (attempt.trial, attempt.number)
        known = self._evals.get(key, ())
        grown = known == tuple(evals[: len(known)])
        fresh = evals[len(known) :] if grown else evals
        if fresh:
            first = len(evals) - len(fresh)
            self._evals[key] = tuple(evals) if len(evals) >= len(known) else (*evals, *known[len(evals) :])
            self._new_evals += [(*key, first + i, e) for i, e in enumerate(fresh)]
        return fresh

    def take_changes(self) -> Changes:
        """What changed since the last call."""
        changes = Changes(
            tuple(self._changed_trials.values()), tuple(self._changed_attempts.values()), tuple(self._new_evals)
        )
        self._changed_trials, self._changed_attempts, self._new_evals = {}, {}, []
        return changes

    def open_trials(self) -> list[Trial]:
        """Trials that are not finished, by number."""
        return [t for t in self._trials.values() if t.state is not TrialState.FINISHED]

    def take_ended(self) -> list[Trial]:
        """Trials that have finished since the last call."""
        ended, self._ended = [*self._ended.values()], {}
        return ended
