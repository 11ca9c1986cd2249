"""Jobs on this machine, through submitit's local executor."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_tune.base.process import start_ticks
from lora_tune.errors import LauncherError
from lora_tune.launchers.base import JobState, JobStatus, Ticket
from lora_tune.launchers.command import alive, read_json, run_job, write_json
from lora_tune.launchers.descendants import kill_strays
from lora_tune.launchers.folders import pickle_folder
from lora_tune.paths import AttemptPaths
from lora_tune.workloads.base import Job


class LocalLauncher:
    """Starts each job as a process of this machine that outlives the driver.

    gpus: device ids that may be handed out, each to one job at a time.
    """

    def __init__(self, gpus: Sequence[int] = ()) -> None:
        self._gpus = tuple(gpus)
        self._busy: dict[str, tuple[int, ...]] = {}
        self._children: dict[str, Any] = {}

    def submit(self, job: Job) -> str:
        """Start the job; its id is the process id of submitit's controller."""
        from submitit import LocalExecutor

        attempt = AttemptPaths(job.folder)
        devices = self._take_devices(job)
        environment = {**job.environment}
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        write_json(attempt.job, command_record(job, environment))
        executor = LocalExecutor(folder=pickle_folder(attempt))
        limit = job.resources.minutes or 60 * 24 * 365
        executor.update_parameters(timeout_min=limit, signal_delay_s=0)
        try:
            with _deaf_to_the_terminal():
                submitted = executor.submit(run_job, str(job.folder))
        except OSError as error:
            raise LauncherError(f"{job.name} cannot be started on this machine: {error}") from error
        self._busy[job.name] = devices
        self._children[job.name] = submitted
        return str(submitted.job_id)

    def _take_devices(self, job: Job) -> tuple[int, ...]:
        wanted = job.resources.gpus_per_node if self._gpus else 0
        taken = {device for devices in self._busy.values() for device in devices}
        free = [device for device in self._gpus if device not in taken]
        if len(free) < wanted:
            raise LauncherError(f"{job.name} needs {wanted} GPUs and {len(free)} are free; lower budget.parallel")
        return tuple(free[:wanted])

    def poll(self, tickets: Sequence[Ticket]) -> Mapping[str, JobStatus]:
        """Read the records that the jobs wrote."""
        # Reap controllers that ended: a zombie would look alive.
        self._children = {n: c for n, c in self._children.items() if c._process is None or c._process.poll() is None}
        found = {ticket.name: self._status(ticket) for ticket in tickets}
        for ticket in tickets:
            if not found[ticket.name].state.alive:
                self._busy.pop(ticket.name, None)
            elif self._gpus and ticket.name not in self._busy:  # adopted from an earlier launcher
                record = read_json(AttemptPaths(ticket.folder).job) or {}
                devices = record.get("environment", {}).get("CUDA_VISIBLE_DEVICES", "")
                self._busy[ticket.name] = tuple(int(d) for d in devices.split(",") if d)
        return found

    def _status(self, ticket: Ticket) -> JobStatus:
        attempt = AttemptPaths(ticket.folder)
        ended, started, claim = read_json(attempt.ended), read_json(attempt.started), _claim(attempt.claim)
        begun = (started or claim or {}).get("at")
        common: dict[str, Any] = {"job_id": ticket.job_id, "started_at": begun}
        if started or claim:
            common["nodes"] = ((started or claim or {})["host"],)
        if ended is not None:
            return JobStatus(state=JobState.ENDED, ended_at=ended["at"], exit_code=ended["exit_code"], **common)
        if alive(started) or alive(claim):
            return JobStatus(state=JobState.RUNNING, **common)
        # A claim is empty for a moment between its making and its writing.
        unclaimed = claim is None or claim["pid"] == 0
        if unclaimed and ticket.job_id and start_ticks(int(ticket.job_id)) is not None:
            return JobStatus(state=JobState.QUEUED, job_id=ticket.job_id)
        ended = read_json(attempt.ended)  # it may have ended between the two looks
        if ended is not None:
            return JobStatus(state=JobState.ENDED, ended_at=ended["at"], exit_code=ended["exit_code"], **common)
        if claim is not None and kill_strays(attempt):
            return JobStatus(state=JobState.RUNNING, **common)  # its devices are free when its last process is gone
        return JobStatus(state=JobState.LOST, reason="no process and no exit record", **common)

    def cancel(self, ticket: Ticket, *, force: bool = False) -> None:
        """SIGTERM to the trial's process group; with ``force`` SIGKILL to every process that it started."""
        attempt = AttemptPaths(ticket.folder)
        number = signal.SIGKILL if force else signal.SIGTERM
        started = read_json(attempt.started)
        if alive(started):
            assert started is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started["pid"], number)
            if force:
                kill_strays(attempt)
        elif not attempt.claim.exists():
            # Not started yet: take the claim ourselves, so that it never starts.
            with contextlib.suppress(FileExistsError):
                Path(attempt.claim).touch(exist_ok=False)


def command_record(job: Job, environment: Mapping[str, str]) -> dict[str, Any]:
    """What ``run_job`` needs of a job, as JSON."""
    return {
        "name": job.name,
        "argv": list(job.argv),
        "environment": dict(environment),
        "cwd": str(job.cwd) if job.cwd else None,
        "log": str(job.log),
    }


def _claim(path: Path) -> dict[str, Any] | None:
    """The claim record; an empty one (the claimer was killed in between, or a cancellation) has no process."""
    try:
        return read_json(path)
    except ValueError:
        return {"pid": 0, "start_ticks": -1, "host": "", "at": path.stat().st_mtime}


@contextlib.contextmanager
def _deaf_to_the_terminal() -> Iterator[None]:
    """Children started inside inherit a signal mask under which Ctrl-C and a closed terminal do not reach them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
