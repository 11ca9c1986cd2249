"""A scheduler that takes no more jobs: for how long a sweep asks again, and what becomes of the trial."""

from __future__ import annotations

from dataclasses import replace

from lora_tune.base.errors import RefusedError
from lora_tune.config.study import Study
from lora_tune.launchers.base import JobState
from lora_tune.logs.failures import FailureKind
from lora_tune.store.records import Attempt, Trial, Verdict

UNKNOWN_SECONDS = 600.0
"""For how long a refusal that nobody knows is tried again before it counts as one that lasts."""


LIMIT_SECONDS = 60.0
"""The longest pause before a scheduler that takes no further job for now is asked again."""


class Refusal:
    """Remembers what a scheduler said since it last took a job. final: why nothing more is submitted, None: go on."""

    def __init__(self) -> None:
        self.final: RefusedError | None = None
        self._since: float | None = None
        self._limited_since: float | None = None
        self._asked_at = 0.0

    def taken(self) -> None:
        """A job was accepted."""
        self._since = self._limited_since = None

    def limited(self, now: float) -> None:
        """At ``now`` (epoch seconds) no further job was taken beside those that are there: one of them must end first.

        However long that is, it is no refusal that lasts.
        """
        self._since = None
        self._limited_since = now if self._limited_since is None else self._limited_since
        self._asked_at = now

    def may_ask(self, now: float) -> bool:
        """Whether it is time to try again at ``now``: under a limit less and less often, once a minute in the end."""
        if self._limited_since is None:
            return True
        wait = min(LIMIT_SECONDS, (self._asked_at - self._limited_since) / 4)
        return abs(now - self._asked_at) >= wait  # a clock that was set keeps nobody waiting

    def heard(
        self, study: Study, trial: Trial, attempt: Attempt, error: RefusedError, now: float
    ) -> tuple[Trial, Attempt]:
        """The trial and its attempt after a refusal at ``now`` (epoch seconds).

        A trial that asks for too much where others ask for less has failed. All others stay open, and no budget is
        spent on them: once a person has fixed what was refused, the same attempt is submitted.
        """
        refused = replace(attempt, failure=FailureKind.CONFIGURATION.value, line=error.answer, remedy=error.remedy)
        if error.by_size and study.search_space.varies_nodes:
            ended = replace(refused, state=JobState.LOST.value, ended_at=now)
            return trial.finished(Verdict.FAILED, f"configuration: {error.answer}", now), ended
        if error.lasting:
            self.final = error
        self.delayed(error, now)
        return replace(trial, sentence=str(error)), refused

    def delayed(self, error: RefusedError, now: float) -> None:
        """Nothing can be submitted at ``now``; ``error``, which may go away, is final when it lasts."""
        self._since = now if self._since is None else self._since
        if now - self._since >= UNKNOWN_SECONDS:
            self.final = self.final or error
