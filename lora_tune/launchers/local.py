"""Jobs on this machine, through submitit's local executor."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_tune.base.errors import LauncherError, SetupError
from lora_tune.base.files import create_json, write_json
from lora_tune.base.host import (
    VISIBLE,
    ancestor_pids,
    device_ids,
    gpus_of_command,
    gpus_of_machine,
    restricted_to,
    send_signal,
    steady,
    visible_in,
)
from lora_tune.base.paths import AttemptPaths
from lora_tune.config.study import Study
from lora_tune.launchers.base import JobState, JobStatus, Launcher, LauncherKind, Ticket
from lora_tune.launchers.files import pickle_folder, secret_values
from lora_tune.launchers.job_records import JobRecords, ProcessRecord, describe, read_pauses, read_records
from lora_tune.launchers.job_runner import Command, command_record, read_command, run_job
from lora_tune.launchers.processes import kill_strays
from lora_tune.store.leases import StaleLeaseDetector
from lora_tune.workloads.base import Job


class LocalLauncher(Launcher):
    """Starts each job as a process of this machine that outlives the driver.

    gpus: ids of the devices to assign, each to one job at a time. gpus_of_job: GPUs of each further job, out of those
    in ``visible`` (CUDA_VISIBLE_DEVICES; None: all GPUs of the machine). shared: the study does not set the GPUs per
    job, so each job gets as many as its command states, the least used first.
    """

    def __init__(
        self, gpus: Sequence[str] = (), gpus_of_job: int = 0, visible: str | None = None, *, shared: bool = False
    ) -> None:
        self._gpus, self._gpus_of_job, self._visible, self._shared = tuple(gpus), gpus_of_job, visible, shared
        self._busy: dict[str, tuple[str, ...]] = {}
        self._children: dict[str, Any] = {}
        self._stale = StaleLeaseDetector()

    def submit(self, job: Job) -> str:
        """Start the job; its id is the process id of submitit's controller."""
        from lora_tune.launchers.local_executor import ExecutorWithSecrets  # 0.3 s to import; needed only here

        attempt, secrets = AttemptPaths(job.folder), secret_values(job)
        devices = self._take_devices(job)
        environment = {**job.environment}
        if self._gpus:
            environment |= restricted_to(devices, os.environ)
        write_json(attempt.job, command_record(job, environment))
        executor = ExecutorWithSecrets(pickle_folder(attempt, job.name), secrets)
        limit = job.resources.minutes or 60 * 24 * 365
        executor.update_parameters(timeout_min=limit)
        try:
            with _terminal_signals_blocked():
                submitted = executor.submit(run_job, str(job.folder), job.token)
        except OSError as error:
            raise LauncherError(f"{job.name} cannot be started on this machine: {error}") from error
        self._busy[job.name] = devices
        self._children[job.name] = submitted
        return str(submitted.job_id)

    def widen(self, jobs: int) -> None:
        """Make the devices of ``jobs`` jobs available, as far as they exist."""
        self._gpus = tuple(dict.fromkeys((*self._gpus, *device_ids(jobs * self._gpus_of_job, self._visible))))

    def _take_devices(self, job: Job) -> tuple[str, ...]:
        if self._shared:
            busy = Counter(device for devices in self._busy.values() for device in devices)
            return tuple(sorted(self._gpus, key=lambda device: busy[device])[: gpus_of_command(job.argv)])
        requested = job.resources.gpus_per_node if self._gpus else 0
        taken = {device for devices in self._busy.values() for device in devices}
        free = [device for device in self._gpus if device not in taken]
        if len(free) < requested:
            raise LauncherError(f"{job.name} needs {requested} GPUs and {len(free)} are free; lower budget.parallel")
        return tuple(free[:requested])

    def poll(self, tickets: Sequence[Ticket]) -> Mapping[str, JobStatus]:
        """Read the records that the jobs wrote."""
        # Reap ended controllers: a zombie would look alive.
        self._children = {n: c for n, c in self._children.items() if c._process is None or c._process.poll() is None}
        statuses = {ticket.name: self._status(ticket) for ticket in tickets}
        for ticket in tickets:
            if not statuses[ticket.name].state.alive:
                self._busy.pop(ticket.name, None)
            elif self._gpus and ticket.name not in self._busy:  # from an earlier launcher
                self._busy[ticket.name] = _devices(read_command(AttemptPaths(ticket.folder).job))
        return statuses

    def _status(self, ticket: Ticket) -> JobStatus:
        attempt = AttemptPaths(ticket.folder)
        records = read_records(attempt, ticket.token)
        if records.ended is not None:
            return _ended(ticket, records)
        if _runs(records.started) or _runs(records.claim) or self._runs_elsewhere(attempt, records.claim):
            return JobStatus(state=JobState.RUNNING, **_begun(ticket, records))
        # A claim may be in the process of being written.
        if records.claim is None and records.started is None and _is_being_started(ticket.job_id, attempt):
            return JobStatus(state=JobState.QUEUED, job_id=ticket.job_id)
        records = read_records(attempt, ticket.token)  # it may have ended between the two checks
        if records.ended is not None:
            return _ended(ticket, records)
        if (records.claim or records.started) and kill_strays(attempt):
            # Its devices are free only when all its processes are gone.
            return JobStatus(state=JobState.RUNNING, **_begun(ticket, records))
        reason = records.problem or "no process and no exit record"
        return JobStatus(state=JobState.LOST, reason=reason, **_begun(ticket, records))

    def _runs_elsewhere(self, attempt: AttemptPaths, claim: ProcessRecord | None) -> bool:
        """Whether a job from another host or PID namespace shows signs of life: its runner touches the claim."""
        if claim is None or not claim.process.elsewhere:
            return False
        with contextlib.suppress(OSError):
            return not self._stale.dead(str(attempt.folder), attempt.claim.stat().st_mtime_ns, steady())
        return False

    def cancel(self, ticket: Ticket, *, force: bool = False) -> None:
        """Send SIGTERM to the trial's process group; with ``force`` SIGKILL to every process that it started.

        If its records are missing (with its folder) or not credible, its processes are found by their mark.
        """
        attempt = AttemptPaths(ticket.folder)
        number = signal.SIGKILL if force else signal.SIGTERM
        started = read_records(attempt, ticket.token).started
        if started is not None and _runs(started):
            send_signal(started.process.pid, number, group=True)
            if force:
                kill_strays(attempt)
        elif attempt.claim.exists() or not attempt.folder.exists():
            kill_strays(attempt, number)
        else:
            # Not started yet: claim it with process id 0, so that it never starts.
            with contextlib.suppress(FileExistsError):
                create_json(attempt.claim, {**describe(0, ticket.token), "start_ticks": None})


def _runs(record: ProcessRecord | None) -> bool:
    """Whether a record's process lives and can be a job's.

    A trial can write anything in its folder, so this process and its ancestors are excluded.
    """
    return record is not None and record.process.alive and record.process.pid not in ancestor_pids()


def _is_being_started(job_id: str, attempt: AttemptPaths) -> bool:
    """Whether process ``job_id`` is submitit's controller of the attempt; ids are reused, and differ between hosts."""
    with contextlib.suppress(OSError, ValueError):
        return os.fsencode(attempt.submitit) in Path(f"/proc/{int(job_id)}/cmdline").read_bytes().split(b"\0")
    return False


def _begun(ticket: Ticket, records: JobRecords) -> dict[str, Any]:
    """Status fields on a job's start and run time so far."""
    process = records.started or records.claim
    if process is None:
        return {"job_id": ticket.job_id}
    known = {"job_id": ticket.job_id, "started_at": process.at, "nodes": (process.process.host,)}
    known |= read_pauses(AttemptPaths(ticket.folder), ticket.token)
    if process.steady is not None and process.process.alive:
        known["seconds"] = max(0.0, steady() - process.steady)
    return known


def _ended(ticket: Ticket, records: JobRecords) -> JobStatus:
    """Status of a job with an end record; the end time is the start plus the monotonic run time."""
    ended, begun = records.ended, _begun(ticket, records)
    assert ended is not None
    known = {**begun, "seconds": ended.seconds, "clock_steps": ended.clock_steps, "exit_code": ended.exit_code}
    at = ended.at if ended.seconds is None else begun.get("started_at", ended.at - ended.seconds) + ended.seconds
    why = ended.short_of_host_memory
    state = JobState.HOST_MEMORY if why else JobState.ENDED
    return JobStatus(state=state, ended_at=at, log_bytes=ended.log_bytes, reason=why, **known)


def _devices(command: Command | str) -> tuple[str, ...]:
    """The GPUs assigned to a job; none if its command cannot be read."""
    visible = "" if isinstance(command, str) else command.environment.get(VISIBLE, "")
    return device_ids(len(visible), visible)


@contextlib.contextmanager
def _terminal_signals_blocked() -> Iterator[None]:
    """Children started inside inherit a signal mask that blocks Ctrl-C and the hang-up of a closed terminal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _on_this_machine(study: Study, jobs: int) -> LocalLauncher:
    """Raises SetupError if this process may use too few GPUs."""
    site = study.site
    gpus_of_job = site.packs * site.gpus_per_node
    visible = visible_in({**os.environ, **site.environment})
    if study.workload.kind == "command" and "gpus_per_node" not in site.model_fields_set:
        return LocalLauncher(gpus_of_machine(visible), shared=True)
    # If the machine's GPUs cannot be counted, trust the study's number.
    visible_gpus = gpus_of_machine(visible) if gpus_of_job else ()
    have = visible_gpus or device_ids(gpus_of_job * jobs, visible)
    gpus = have[: gpus_of_job * jobs]
    if len(gpus) < gpus_of_job * jobs:
        remedy = "lower budget.parallel" if len(gpus) >= gpus_of_job else "lower site.gpus_per_node"
        where = "this machine has" if visible is None else f"{VISIBLE}={visible} names"
        raise SetupError(
            f"{where} {len(gpus)} GPUs, and {jobs} jobs of {gpus_of_job} at a time need {gpus_of_job * jobs}; "
            f"{remedy}{'' if visible is None else ', or name more GPUs'}"
        )
    return LocalLauncher(gpus, gpus_of_job, ",".join(visible_gpus) if visible_gpus and visible is None else visible)


KIND = LauncherKind(make=_on_this_machine, period=0.25, submit_grace_seconds=0.0, one_machine=True)
"""``site.launcher = "local"``."""
