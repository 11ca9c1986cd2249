"""Fills free slots: asks the search for proposals, records them as trials, and submits them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lora_tune.base.errors import SetupError
from lora_tune.config.study import Study
from lora_tune.controller import eval_schedule, limits
from lora_tune.controller.commits import parameters_of
from lora_tune.controller.dependencies import Dependencies, Discards
from lora_tune.controller.doomed import MOST, refused_before, why_doomed
from lora_tune.controller.jobs import proposal as proposal_of
from lora_tune.controller.submissions import Submissions
from lora_tune.controller.sweep_records import EventLog
from lora_tune.logs.failures import FailureKind
from lora_tune.search.no_effect import no_effect
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.port import Request
from lora_tune.store.records import Attempt, Trial, TrialState, UnitOfWork, Value
from lora_tune.workloads.base_config import parameters_at

if TYPE_CHECKING:
    from lora_tune.search.session import SearchPoint

FILL_SECONDS = 0.5
"""Time limit of proposals per tick, so that filling a thousand slots does not delay running trials."""


class Proposals:
    """Fills the slots of one sweep.

    Parameters
    ----------
    may_ask : callable
        Whether the search may be asked now; False does not end the sweep.
    save : callable
        Saves all changes.
    fixed_at : float
        Epoch seconds when a user fixed what made trials fail before.
    requests : callable
        Users' requests, from which a trial takes its commit.
    """

    def __init__(
        self,
        dependencies: Dependencies,
        work: UnitOfWork,
        submissions: Submissions,
        events: EventLog,
        *,
        may_ask: Callable[[], bool],
        save: Callable[[], bool],
        fixed_at: float,
        requests: Callable[[], Sequence[Request]],
    ) -> None:
        self._dependencies, self._work, self._submissions, self._events = dependencies, work, submissions, events
        self._may_ask, self._save, self._fixed_at, self._requests = may_ask, save, fixed_at, requests
        self.unfilled = False
        """Whether slots were left free only for lack of time."""
        self._in_a_row = 0
        """Consecutive doomed proposals since the last one that was run, counted over ticks."""

    def refill(self, study: Study, interrupted: Callable[[], bool]) -> str:
        """Propose until the slots are full; returns why no more, which ends the sweep once nothing runs.

        Raises SetupError if trials fail one after another for a configuration reason and none runs.
        """
        self.unfilled = False
        if reason := self._start_refusal():
            return reason
        clock, sweep = self._dependencies.clock, self._work.sweep
        idle = no_effect(study, sweep)
        self._events.warn_once("effect", idle.sentence if idle else "", kind=" ".join(idle.names) if idle else "")
        until = clock.now() + FILL_SECONDS
        while not interrupted() and self._submissions.refused is None and clock.now() <= until:
            if reason := limits.may_propose(study, sweep, clock.monotonic_now()):
                return reason
            if not self._may_ask():
                return ""
            proposal = self._dependencies.session.ask()
            if isinstance(proposal, str):
                return proposal
            trial = self._new_trial(study, proposal)
            if sentence := self._doomed(study, trial):
                self._in_a_row += 1
                if self._in_a_row >= MOST:
                    return f"the last {self._in_a_row} proposals would all fail: {sentence}"
                continue
            self._in_a_row = 0
            self._work.put_trial(trial)
            self._submissions.submit(trial)
        self.unfilled = self._submissions.refused is None
        return ""

    def hopeless(self) -> Trial | None:
        """The newest of the trials that show that every trial fails alike; None if they do not."""
        return limits.hopeless(self._work.sweep, self._fixed_at)

    def _start_refusal(self) -> str:
        """Why no trial should be started while others run, "" if one may."""
        if (failed := self.hopeless()) is None:
            return ""
        unread = self._newest(failed).failure == FailureKind.UNREAD
        count = "a trial's log cannot be read" if unread else limits.ALIKE
        if any(trial.state is TrialState.RUNNING for trial in self._work.open_trials()):
            sentence = f"{count}: no more are started while the others run"
            self._events.warn_once("failures", sentence)
            return sentence
        self._save()
        remedy = self._newest(failed).remedy or "see the job logs"
        raise SetupError(f"{count}: {failed.sentence}; {remedy}; fix it and rerun the same command")

    def _doomed(self, study: Study, trial: Trial) -> str:
        """Why a proposed trial is doomed and not run; "" if it is run.

        Users' requests and the machine's own config are always run.
        """
        search = self._dependencies.session
        was_requested = trial.metrics.base is not None or trial.request is not None or trial.replicate_of is not None
        if was_requested or not isinstance(search, Discards):
            return ""
        sweep = self._work.sweep
        sentence = refused_before(study, sweep, trial.tuned)
        sentence = sentence or why_doomed(self._dependencies.workload, sweep, proposal_of(trial, 0))
        if sentence:
            search.discard(trial.number)
            self._events.warn_once(
                "doomed", f"{' '.join(f'{n}={v}' for n, v in trial.tuned.items())} is not run: {sentence}"
            )
        return sentence

    def _new_trial(self, study: Study, proposal: SearchPoint) -> Trial:
        begin, space = self._dependencies.workload.start(), study.search_space
        parameters = proposal.parameters or parameters_at(begin, space, proposal.tuned)
        schedule, why = ({}, "") if proposal.parameters else eval_schedule.chosen(study, self._work.sweep, parameters)
        return Trial(
            number=proposal.number,
            seed=study.trial_seed(proposal.number),
            tuned=space.conditions.present(proposal.tuned),
            parameters={**parameters, **schedule, **self._commit(proposal.request)},
            why="; ".join(filter(None, (proposal.why, why))),
            proposed_at=self._dependencies.clock.now(),
            replicate_of=proposal.replicate_of,
            replicates=proposal.replicates,
            probe=proposal.probe,
            metrics=TrialMetrics(base=proposal.base or None),
            base_values=begin.values if begin is not None and proposal.base else {},
            request=proposal.request,
            point=proposal.point,
            sampler_attributes=proposal.sampler_attributes,
        )

    def _commit(self, number: int | None) -> dict[str, Value]:
        """The commit parameters of a request."""
        return parameters_of(next((r for r in self._requests() if r.number == number), None))

    def _newest(self, trial: Trial) -> Attempt:
        return self._work.sweep.attempts_of(trial.number)[-1]
