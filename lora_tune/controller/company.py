"""How many trials may train beside one whose job was killed under it: pure functions of the records.

A job that several trials share dies with all of them, and nobody can tell which one took too much. So those that were
in it train again in smaller company, and in the end alone: then only the one that is to blame fails.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from lora_tune.config.study import Study
from lora_tune.controller.conclusion import made
from lora_tune.launchers.base import JobState
from lora_tune.logs.failures import FailureKind
from lora_tune.store.records import Attempt
from lora_tune.workloads.base import Job

FEWER = 4
"""Of so many side by side one is left after a job's first death for want of memory."""
CRASHES = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV)
"""Signals that end a program at once, for its own fault or by somebody's hand."""
_CODES = {code for number in CRASHES for code in (-number, 128 + number)}


def limited(study: Study, job: Job, earlier: Sequence[Attempt]) -> Job:
    """The job of a trial with these attempts before it, with the company that it may have."""
    if job.slot is None:
        return job
    slots, parallel = study.site.slots, study.budget.parallel
    together = min(slots, parallel) if isinstance(slots, int) else parallel
    return replace(job, slot=replace(job.slot, company=company(earlier, study.budget.attempts, together)))


def company(earlier: Sequence[Attempt], most: int, together: int) -> int:
    """How many may train side by side in the attempt that follows, itself counted; 0: any number.

    most: attempts that are allowed. together: trials that train side by side otherwise. The first death for want of
    memory leaves a quarter of them; any other may have been an accident. After a second one, and in the last attempt
    that is allowed, the trial is alone.
    """
    deaths = [attempt for attempt in earlier if _killed(attempt)]
    if not deaths:
        return 0
    if len(deaths) > 1 or made(earlier) + 1 >= most:
        return 1
    return max(1, together // FEWER) if deaths[0].failure == FailureKind.HOST_MEMORY else 0


def _killed(attempt: Attempt) -> bool:
    by_signal = attempt.state == JobState.PREEMPTED and attempt.exit_code in _CODES
    return by_signal or attempt.failure == FailureKind.HOST_MEMORY
