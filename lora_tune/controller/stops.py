"""Jobs that are asked to end: the wish on record first, then the launcher."""

from __future__ import annotations

from dataclasses import replace

from lora_tune.base.errors import LauncherError
from lora_tune.controller import policy
from lora_tune.controller.dependencies import Clock
from lora_tune.controller.jobs import Jobs
from lora_tune.controller.sweep_records import EventLog
from lora_tune.launchers.base import Launcher
from lora_tune.store.records import Attempt, StopKind
from lora_tune.store.unit_of_work import UnitOfWork


class JobStops:
    """Stops jobs of one sweep."""

    def __init__(self, launcher: Launcher, clock: Clock, work: UnitOfWork, jobs: Jobs, events: EventLog) -> None:
        self._launcher, self._clock, self._work, self._jobs, self._events = launcher, clock, work, jobs, events

    def stop(self, attempt: Attempt, action: policy.Stop) -> None:
        """Ask a job to end, for the reason that ``action`` gives."""
        why, now = action.diagnosis, self._clock.monotonic_now()
        stopped = replace(attempt, stop=action.kind, stop_sentence=action.sentence, stop_at=now)
        self._work.put_attempt(replace(stopped, failure=why.kind.value, line=why.line, remedy=why.remedy))
        self._cancel(attempt, force=False)

    def give_up(self, attempt: Attempt, sentence: str = "") -> None:
        """Ask a job to end because a person wants it; sentence: who, "" for who drives the sweep."""
        self.stop(attempt, policy.Stop(StopKind.USER, sentence))

    def kill(self, attempt: Attempt) -> None:
        """End a job that was asked to and has not."""
        self._events.log("kill", trial=attempt.trial, text=f"trial {attempt.trial} does not end: kill")
        self._work.put_attempt(replace(attempt, killed_at=self._clock.monotonic_now()))
        self._cancel(attempt, force=True)

    def _cancel(self, attempt: Attempt, *, force: bool) -> None:
        try:
            self._launcher.cancel(self._jobs.ticket(attempt), force=force)
        except LauncherError as error:
            self._events.trouble("cluster", str(error))  # the kill that follows tries again
