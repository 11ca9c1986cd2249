"""Trials that run outside the tuner: ``site.launcher = "outside"``, for ask-and-tell loops.

Nothing is started here. A job is offered through its folder. The caller of ``ask`` claims it (``claim.json``, created
exclusively), and the caller of ``tell`` writes the log and ``ended.json``, like a job's runner. So the driver judges
such a trial by its log like any other, and either side may be killed in between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from lora_tune.base.files import create_json, read_json, text_of, write_json, write_text
from lora_tune.base.paths import AttemptPaths, log_head
from lora_tune.config.study import Study
from lora_tune.launchers.base import JobState, JobStatus, Launcher, LauncherKind, Ticket
from lora_tune.launchers.job_records import describe, read_records
from lora_tune.launchers.job_runner import command_record
from lora_tune.workloads.base import Job

CANCELLED_EXIT = -15
"""Exit code of an attempt that the sweep cancelled."""


class OutsideLauncher(Launcher):
    """Offers jobs, and reports their state from the records of the processes that took them."""

    def submit(self, job: Job) -> str:
        """Offer the job; its id is its token."""
        write_json(AttemptPaths(job.folder).job, command_record(job, job.environment))
        return job.token

    def poll(self, tickets: Sequence[Ticket]) -> Mapping[str, JobStatus]:
        """Status of each job from its records."""
        return {ticket.name: _status(ticket) for ticket in tickets}

    def cancel(self, ticket: Ticket, *, force: bool = False) -> None:
        """Cancel the job; results reported later are refused."""
        attempt = AttemptPaths(ticket.folder)
        if read_records(attempt, ticket.token).ended is None:
            end(attempt, ticket.token, CANCELLED_EXIT)


def _status(ticket: Ticket) -> JobStatus:
    attempt = AttemptPaths(ticket.folder)
    records = read_records(attempt, ticket.token)
    taken = records.claim.at if records.claim is not None else None
    if records.ended is not None:
        state = JobState.CANCELLED if records.ended.exit_code == CANCELLED_EXIT else JobState.ENDED
        return JobStatus(
            state=state, job_id=ticket.job_id, started_at=taken, ended_at=records.ended.at,
            exit_code=records.ended.exit_code, seconds=records.ended.seconds, log_bytes=records.ended.log_bytes,
        )  # fmt: skip
    if taken is not None:
        return JobStatus(state=JobState.RUNNING, job_id=ticket.job_id, started_at=taken)
    if text_of(read_json(attempt.job).content or {}, "token") == ticket.token:
        return JobStatus(state=JobState.QUEUED, job_id=ticket.job_id)
    return JobStatus(state=JobState.LOST, reason="it was never offered", job_id=ticket.job_id)


def take(attempt: AttemptPaths, token: str, sweep: str) -> bool:
    """Claim an offered job for the caller; False if it is already claimed."""
    try:
        create_json(attempt.claim, describe(os.getpid(), token, sweep))
    except FileExistsError:
        return False
    return True


def write_log(attempt: AttemptPaths, token: str, sweep: str, text: str) -> None:
    """Write the whole log so far, below a line with its owner. Raises OSError."""
    write_text(attempt.log, log_head(sweep, token).decode("ascii") + text)


def end(attempt: AttemptPaths, token: str, exit_code: int, result: str = "") -> None:
    """Record the job's end. result: the reported result as text, to recognise a repeated report. Raises OSError."""
    claim, now = read_records(attempt, token).claim, time.time()
    size = attempt.log.stat().st_size if attempt.log.exists() else None
    seconds = None if claim is None else max(0.0, now - claim.at)
    write_json(
        attempt.ended,
        {"token": token, "exit_code": exit_code, "at": now, "seconds": seconds, "log_bytes": size, "result": result},
    )


def ended_with(attempt: AttemptPaths, token: str) -> str | None:
    """The result reported at the end of a job; None while it runs, "" if it was cancelled."""
    content = read_json(attempt.ended).content
    return None if content is None or text_of(content, "token") != token else text_of(content, "result")


def of_study(study: Study, jobs: int) -> OutsideLauncher:
    """Return the launcher; ``jobs`` is ignored, since nothing runs here."""
    return OutsideLauncher()


KIND = LauncherKind(make=of_study, submit_grace_seconds=0.0)
"""``site.launcher = "outside"``."""
