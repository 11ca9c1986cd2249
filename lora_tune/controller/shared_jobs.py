"""What jobs that trials share held while they trained nobody: their start, measuring, and waiting for more trials.

Of a job's time each trial has its share. The rest is no trial's, but it is paid for: it is booked as overhead with the
attempt for which the job was started, so that the sweep's node-hours are those of its jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lora_tune.base.errors import LauncherError
from lora_tune.controller.event_log import EventLog
from lora_tune.launchers.base import Launcher, SharedJob, SharesJobs
from lora_tune.store.records import Attempt
from lora_tune.store.unit_of_work import UnitOfWork

RELEASE_SECONDS = 30.0
"""How long a sweep that is over waits for the ends of jobs that it lets go."""


def with_overhead(attempts: Mapping[str, Attempt], jobs: Sequence[SharedJob], now: float) -> list[Attempt]:
    """The attempts for which ``jobs`` were started, with the overhead of these. attempts: of the sweep, by job name.

    A job that also trained for another sweep is left out: whose its overhead is, nobody can say.
    """
    bearers = []
    for job in jobs:
        own = [attempts[name] for name in job.trials if name in attempts]
        if len(own) < len(job.trials):
            continue
        bearer = attempts[job.first]
        held = (now if job.ended_at is None else job.ended_at) - job.started_at
        used = sum(attempt.node_hours(now) for attempt in own) * 3600 / bearer.node_count
        bearers.append(replace(bearer, overhead_seconds=round(max(0.0, held - used), 3)))
    return bearers


class SharedJobs:
    """Books the overhead of the launcher's jobs, and lets them go at the end."""

    def __init__(self, launcher: Launcher, work: UnitOfWork, events: EventLog) -> None:
        self._launcher, self._work, self._events = launcher, work, events
        self._released_at: float | None = None

    def book(self, now: float) -> None:
        """Book what the jobs have held up to ``now``, while trials run."""
        self._released_at = None
        self._book(now)

    def _book(self, now: float) -> bool:
        """Whether that changed anything."""
        if not isinstance(self._launcher, SharesJobs):
            return False
        attempts = {attempt.job_name: attempt for attempt in self._work.sweep.attempts.values()}
        bearers = with_overhead(attempts, self._launcher.shared_jobs(), now)
        changed = [bearer for bearer in bearers if bearer != attempts[bearer.job_name]]
        for bearer in changed:
            self._work.put_attempt(bearer)
        return bool(changed)

    def let_go(self, now: float) -> bool:
        """Let jobs end that only wait for more trials; True once they have and all is booked, or it took too long."""
        if not isinstance(self._launcher, SharesJobs):
            return True
        self._released_at = now if self._released_at is None else self._released_at
        try:
            alive = self._launcher.let_go()
        except LauncherError as error:
            self._events.trouble("cluster", str(error))
            alive = True
        changed = self._book(now)
        return now - self._released_at > RELEASE_SECONDS or not (alive or changed)
