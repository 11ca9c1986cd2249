"""What a sweep needs made before its first trial: run once, recorded, and taken up again after an interruption.

The record (``prepare/preparation.json``) is written before the job is submitted, as a trial's is. A preparation that
ended well is not repeated while its command stays the same.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_tune.base.errors import LauncherError, RefusedError, SetupError
from lora_tune.base.files import read_json, text_of, whole_of, write_json
from lora_tune.base.paths import SweepPaths
from lora_tune.controller.conclusion import RETRIED
from lora_tune.controller.event_file import EventFile
from lora_tune.controller.refusals import UNKNOWN_SECONDS
from lora_tune.launchers.base import JobState, JobStatus, Launcher, Ticket
from lora_tune.logs.failures import Diagnosis, diagnose
from lora_tune.workloads.base import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """How a preparation is made and watched.

    make: the job that runs in a folder. tick: called between two looks; waits, and keeps the sweep's lease.
    """

    make: Callable[[Path], Job | None]
    launcher: Launcher
    now: Callable[[], float]
    tick: Callable[[], None]
    say: Callable[[str], None]
    attempts: int = 3


def prepare(paths: SweepPaths, preparation: Preparation) -> None:
    """Run the sweep's preparation unless it is done. Raises SetupError with its remedy when it fails."""
    first = preparation.make(paths.preparation(0).folder)
    if first is None:
        return
    record = _record(paths, first)
    if record["state"] == "done":
        return
    journal = EventFile(paths.driver_log)
    last = record["attempt"] + preparation.attempts
    while record["state"] != "done":
        if record["state"] == "failed":
            record = {**record, "attempt": record["attempt"] + 1, "state": "running"}
        _write(paths, record)
        job = preparation.make(paths.preparation(record["attempt"]).folder)
        assert job is not None
        status = _run(job, preparation)
        diagnosis = _diagnosis(job, status)
        seconds = (status.ended_at or 0.0) - (status.started_at or status.ended_at or 0.0)
        record |= {
            "state": "failed" if diagnosis.kind else "done",
            "job_id": status.job_id,
            "started_at": status.started_at,
            "ended_at": status.ended_at,
            "node_hours": max(0.0, seconds) * job.resources.nodes / 3600,
        }
        _write(paths, record)
        journal.write(
            preparation.now(), "prepared" if not diagnosis.kind else "preparation failed", **record, line=diagnosis.line
        )
        if diagnosis.kind and (diagnosis.kind not in RETRIED or record["attempt"] + 1 >= last):
            raise SetupError(
                f"the preparation failed, so no trial was started: {diagnosis.line}; {diagnosis.remedy}; "
                f"its log is {job.log}; fix it and rerun the same command"
            )
        what = f"again: {diagnosis.line}" if diagnosis.kind else f"done in {seconds:.0f} s, job {status.job_id}"
        preparation.say(f"preparation: {what}")


def _run(job: Job, preparation: Preparation) -> JobStatus:
    """Submit the job, or take up the one that an earlier command submitted, and wait for its end.

    Raises RefusedError for what the scheduler refuses for good, or for too long.
    """
    ticket = Ticket(name=job.name, folder=job.folder)
    status = JobStatus(state=JobState.LOST)
    submitted = printed = ""
    refused_at = math.inf
    job.folder.mkdir(parents=True, exist_ok=True)
    while status.state.alive or status.state is JobState.LOST:
        try:
            status = preparation.launcher.poll([ticket])[job.name]
            if status.state is JobState.LOST:
                if submitted:
                    return status  # it was there, and vanished without a trace
                submitted = preparation.launcher.submit(job)
                ticket = Ticket(name=job.name, folder=job.folder, job_id=submitted, submitted_at=preparation.now())
                preparation.say(f"preparation: {job.name} is job {submitted}")
        except LauncherError as error:
            if isinstance(error, RefusedError):
                refused_at = min(refused_at, preparation.now())
                if error.lasting or preparation.now() - refused_at >= UNKNOWN_SECONDS:
                    raise
            if str(error) != printed:
                preparation.say(str(error))
            printed = str(error)
        preparation.tick()
    return status


def _diagnosis(job: Job, status: JobStatus) -> Diagnosis:
    """Its exit code decides: a preparation measures nothing."""
    if status.state is JobState.ENDED and not status.exit_code:
        return Diagnosis()
    log = job.log.read_bytes() if job.log.exists() else b""
    return diagnose(log, state=status.state.value, exit_code=status.exit_code, reason=status.reason)


def _record(paths: SweepPaths, job: Job) -> dict[str, Any]:
    """The record of this preparation; a new one where there is none, or where another command was prepared."""
    command = json.dumps([job.argv, sorted(job.environment.items()), str(job.cwd), job.resources.nodes])
    key = hashlib.sha256(command.encode()).hexdigest()[:12]
    record = read_json(paths.prepared).content or {}
    attempt = whole_of(record, "attempt")
    if attempt is None or attempt < 0:
        return {"key": key, "attempt": _last_attempt(paths) + 1, "state": "running"}
    if text_of(record, "key") != key or text_of(record, "state") not in ("running", "done", "failed"):
        return {"key": key, "attempt": attempt + 1, "state": "running"}
    return {**record, "attempt": attempt}


def _last_attempt(paths: SweepPaths) -> int:
    """The number of the last attempt that has a folder, -1 without any: its record is absent or damaged."""
    names = (folder.name.rpartition("-")[2] for folder in paths.prepared.parent.glob("attempt-*"))
    return max((int(number) for number in names if number.isdecimal()), default=-1)


def _write(paths: SweepPaths, record: dict[str, Any]) -> None:
    paths.prepared.parent.mkdir(parents=True, exist_ok=True)
    write_json(paths.prepared, record)
