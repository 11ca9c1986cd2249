"""Overhead of shared jobs: the time that they held nodes without training, for start-up, measuring and waiting.

Each trial has its share of a job's time. The rest belongs to no trial, but is paid for: it is booked as overhead of the
attempt for which the job was started, so that the sweep's node-hours equal those of its jobs. Only open trials of a job
are re-examined; the usage of ended ones is added up once.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lora_tune.base.errors import LauncherError
from lora_tune.config.study import Study
from lora_tune.controller.conclusion import counted_attempts
from lora_tune.controller.sweep_records import EventLog
from lora_tune.launchers.base import JobState, Launcher, SharedJob
from lora_tune.logs.failures import FailureKind
from lora_tune.store.records import Attempt, UnitOfWork
from lora_tune.workloads.base import Job

# How many trials may share a job with one whose job was killed: pure functions of the records.
#
# A job shared by several trials dies with all of them, and the culprit is unknown. So its trials are retried in smaller
# packs, and finally alone: then only the culprit fails.

FEWER = 4
"""Factor by which a pack shrinks after a job's first death for lack of memory."""
CRASHES = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV)
"""Signals of crashes and kills."""
_CODES = {code for number in CRASHES for code in (-number, 128 + number)}


def with_packing_limit(study: Study, job: Job, earlier: Sequence[Attempt]) -> Job:
    """The job of a trial after the attempts ``earlier``, with its limit of trials per pack."""
    if job.slot is None:
        return job
    slots, parallel = study.site.slots, study.budget.parallel
    slots_used = min(slots, parallel) if isinstance(slots, int) else parallel
    return replace(job, slot=replace(job.slot, company=max_packed_trials(earlier, study.budget.attempts, slots_used)))


def max_packed_trials(earlier: Sequence[Attempt], most: int, slots_used: int) -> int:
    """How many trials, including itself, may share a pack in the next attempt; 0: any number.

    most: allowed attempts. slots_used: normal pack size. After the first death for lack of memory a quarter of that;
    any other first death may have been an accident. After a second one, and in the last allowed attempt, alone.
    """
    deaths = [attempt for attempt in earlier if _killed(attempt)]
    if not deaths:
        return 0
    if len(deaths) > 1 or counted_attempts(earlier) + 1 >= most:
        return 1
    return max(1, slots_used // FEWER) if deaths[0].failure == FailureKind.HOST_MEMORY else 0


def _killed(attempt: Attempt) -> bool:
    by_signal = attempt.state == JobState.PREEMPTED and attempt.exit_code in _CODES
    return by_signal or attempt.failure == FailureKind.HOST_MEMORY


RELEASE_SECONDS = 30.0
"""How long a finished sweep waits for shared jobs to end after it released them."""
LEAST_SECONDS = 1.0
"""Smallest change of a running job's overhead that is recorded."""


@dataclass(slots=True)
class _Account:
    """Usage of one shared job.

    bearer: job name of the attempt that bears its overhead, "" while none of its trials is recorded. known: number of
    its trials seen. open: those that have not ended. used: node-seconds of the others.
    """

    bearer: str = ""
    known: int = 0
    open: list[str] = field(default_factory=list)
    used: float = 0.0

    def overhead(self, job: SharedJob, attempts: Mapping[str, Attempt], now: float) -> float:
        """Seconds up to ``now`` in which the job held its nodes without training. attempts: by job name."""
        new = job.trials[self.known :]
        self.known, using, waiting = len(job.trials), 0.0, [*self.open, *(name for name in new if name in attempts)]
        self.bearer = self.bearer or next((name for name in (job.first, *waiting) if name in attempts), "")
        self.open = []
        for attempt in (attempts[name] for name in waiting):
            if attempt.ended_at is None:
                self.open.append(attempt.job_name)
                using += attempt.node_hours(now) * 3600
            else:
                self.used += attempt.node_hours(now) * 3600
        held = (now if job.ended_at is None else job.ended_at) - job.started_at
        nodes = attempts[self.bearer].node_count if self.bearer else 1
        return max(0.0, held - (self.used + using) / nodes)


class SharedJobs:
    """Books the overhead of the launcher's shared jobs, and releases the jobs at the end."""

    def __init__(self, launcher: Launcher, work: UnitOfWork, events: EventLog) -> None:
        self._launcher, self._work, self._events = launcher, work, events
        self._released_at: float | None = None
        self._accounts: dict[str, _Account] = {}
        self._borne: dict[str, dict[str, float]] = {}  # bearer -> seconds by job

    def charge(self, now: float) -> None:
        """Book the jobs' overhead up to ``now``, while trials run."""
        self._released_at = None
        self._charge(now)

    def _charge(self, now: float) -> bool:
        """As :meth:`charge`; returns whether anything changed."""
        over: dict[str, bool] = {}  # bearer -> whether one of its jobs has ended
        for job in self._launcher.shared_jobs():
            account = self._accounts.setdefault(job.name, _Account())
            seconds = account.overhead(job, self._work.by_job_name, now)
            if account.bearer:
                self._borne.setdefault(account.bearer, {})[job.name] = seconds
                over[account.bearer] = over.get(account.bearer, False) or job.ended_at is not None
        changed = [self._bear(name, sum(self._borne[name].values()), at_once=ended) for name, ended in over.items()]
        return any(changed)

    def _bear(self, name: str, seconds: float, *, at_once: bool) -> bool:
        """Record the overhead with the attempt that bears it; returns whether it changed."""
        bearer, seconds = self._work.by_job_name[name], round(seconds, 3)
        change = abs(seconds - bearer.overhead_seconds)
        if change == 0 or (change < LEAST_SECONDS and not at_once):
            return False
        self._work.put_attempt(replace(bearer, overhead_seconds=seconds))
        return True

    def let_go(self, now: float) -> bool:
        """Release jobs that only wait for more trials; True once they have ended and are booked, or on time-out."""
        self._released_at = now if self._released_at is None else self._released_at
        try:
            alive = self._launcher.let_go()
        except LauncherError as error:
            self._events.warn_once("cluster", str(error))
            alive = True
        changed = self._charge(now)
        return now - self._released_at > RELEASE_SECONDS or not (alive or changed)
