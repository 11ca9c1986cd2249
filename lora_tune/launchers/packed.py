"""Trials that share jobs: a launcher around another one, whose jobs are packs of up to K trials.

A pack is a job of the inner launcher that runs a packed trainer, which watches its folder (:mod:`pack_folder`). A job
may hold several packs, one per GPU, that share its folder; they live and end together, and "pack" below means all of
them. Each trial keeps its folder, log, and records of claim, start and end: the pack writes them as a job would, and
makes the claim exclusively, so that a trial is trained at most once. A free slot takes the next trial while the others
train. When a pack ends, every trial in it without an end record is reported as interrupted.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_tune.base.errors import LauncherError
from lora_tune.base.files import number_of, open_regular, read_json, text_of, whole_of, write_json
from lora_tune.base.paths import ATTEMPT_VARIABLE, AttemptPaths
from lora_tune.launchers.base import JobState, JobStatus, Launcher, SharedJob, Ticket
from lora_tune.launchers.job_records import JobRecords, read_records
from lora_tune.launchers.pack_folder import PackFolder, PackState, pack_of
from lora_tune.workloads.base import Job

# State of a trial that shares a job: from its records, else from the state of its pack.


SIGNALS = 128
"""Exit codes from this one on are 128 plus the signal that ended a process."""
EVENT_BYTES = 1 << 16
"""Bytes read from the end of a pack's log, to show why its trials failed."""


@dataclass(frozen=True, slots=True)
class KnownPack:
    """A pack with its job's status in the inner launcher, and its folder.

    room: capacity of a job of several packs, as passed to them at their start; None if none was passed. first: name of
    the trial for which it was started, "" if an earlier release started it. trials: names of all trials ever requested;
    it grows.
    """

    ticket: Ticket
    status: JobStatus
    folder: PackFolder
    room: int | None
    first: str
    trials: list[str]


def telling(name: str, states: Sequence[PackState]) -> list[PackState]:
    """State of the pack that trains the trial, among the packs of a job; [] if none does."""
    return [state for state in states if name in state.shares]


def trial_status(ticket: Ticket, pack: KnownPack | None, home: PackFolder, states: Sequence[PackState]) -> JobStatus:
    """A trial's status from its records, else from the state of its pack."""
    # Check the request before the records: the pack takes the request first, then writes the records.
    waits = home.asked(ticket.name)
    records = read_records(AttemptPaths(ticket.folder), ticket.token)
    known = _begun(ticket, pack, records, states)
    if records.ended is not None:
        end = records.ended
        # No ``seconds``: the log's clock counts this trial alone, which the job's run time says nothing about.
        known["node_share"] = end.node_share
        # Start plus monotonic run time, if both are known.
        whole = records.started is not None and end.seconds is not None
        ended_at = known["started_at"] + end.seconds if whole else end.at
        return JobStatus(state=JobState.ENDED, ended_at=ended_at, exit_code=end.exit_code, **known)
    if pack is None or not pack.status.state.alive:
        if pack is None:
            return JobStatus(state=JobState.LOST, reason="the folder of its pack is gone", **known)
        displaced = _displaced(pack, known) if waits else None
        return displaced or _failed_to_begin(pack, known) or _interrupted(pack, known)
    if records.started is not None:
        return JobStatus(state=JobState.RUNNING, **known)
    if waits or records.claim is not None or (home.paths.taken / f"{ticket.name}.json").exists():
        status = pack.status
        return JobStatus(state=JobState.QUEUED, reason=status.reason, waits=status.waits, job_id=known["job_id"])
    return JobStatus(state=JobState.LOST, reason=f"pack {pack.ticket.name} was not asked for it", **known)


def _begun(ticket: Ticket, pack: KnownPack | None, records: JobRecords, states: Sequence[PackState]) -> dict[str, Any]:
    """Status fields on a trial's start and its share of the node so far."""
    known: dict[str, Any] = {"job_id": pack.ticket.job_id if pack else ticket.job_id}
    process = records.started or records.claim
    if process is not None:
        # The cluster's node name, by which a node can be excluded; the host name may differ.
        known["nodes"] = (pack.status.nodes if pack else ()) or (process.process.host,)
    if records.started is not None:
        known["started_at"] = records.started.at
        for state in telling(ticket.name, states):
            known["share_seconds"] = state.shares[ticket.name]
            steadily = state.steady > 0 and records.started.steady is not None  # False for packs of earlier releases
            begun, now = (records.started.steady, state.steady) if steadily else (records.started.at, state.at)
            if (lived := now - (begun or 0.0)) > 0:
                known["node_share"] = min(1.0, state.shares[ticket.name] / lived)
    return known


def _failed_to_begin(pack: KnownPack, known: Mapping[str, Any]) -> JobStatus | None:
    """Status of a trial whose pack failed by itself before it took any trial: it ends like the pack. Else None.

    The cause is the command, its libraries or its GPUs, so the trial would fail in a separate job too.
    """
    below = pack.status
    by_itself = below.state is JobState.ENDED and 0 < (below.exit_code or 0) < SIGNALS
    if not by_itself or pack.folder.gone or not pack.folder.untouched:
        return None
    reason = f"its pack {pack.ticket.name} failed before it took a trial"
    output = _end_of(AttemptPaths(pack.ticket.folder).log)
    known = {**known, "nodes": below.nodes, "ended_at": below.ended_at, "exit_code": below.exit_code}
    return JobStatus(state=JobState.ENDED, reason=reason, output=output, **known)


def _end_of(log: Path) -> bytes:
    """The last ``EVENT_BYTES`` of a log; b"" if it cannot be read."""
    with contextlib.suppress(OSError), os.fdopen(open_regular(log), "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - EVENT_BYTES))
        return file.read(EVENT_BYTES)
    return b""


def _displaced(pack: KnownPack, known: Mapping[str, Any]) -> JobStatus | None:
    """Status of a trial that waited until its pack ended; None if the pack took no trial at all.

    So each ended pack has used up an attempt of at least one trial, and requests end eventually.
    """
    if pack.folder.untouched:
        return None
    why = f"its pack {pack.ticket.name} ended before it took the trial: {pack.status.state.value}"
    return JobStatus(state=JobState.DISPLACED, ended_at=pack.status.ended_at, reason=why, **known)


def _interrupted(pack: KnownPack, known: Mapping[str, Any]) -> JobStatus:
    """Status of a trial whose pack ended without an end record for it; it runs again, as another trial may be the
    cause."""
    below = pack.status
    node_states = (JobState.HOST_MEMORY, JobState.NODE_FAILED, JobState.NOT_BEGUN)
    state = below.state if below.state in node_states else JobState.PREEMPTED
    code = "" if below.exit_code is None else f", exit code {below.exit_code}"
    how = below.reason if below.state is JobState.HOST_MEMORY else f"{below.state.value}{code}"
    why = f"its pack {pack.ticket.name} ended before it: {how}"
    reason = why if how == below.reason else "; ".join(filter(None, (why, below.reason)))
    ended_by_itself = (
        below.exit_code if below.state in (JobState.ENDED, JobState.HOST_MEMORY) else None
    )  # preemption sets no exit code
    return JobStatus(state=state, ended_at=below.ended_at, exit_code=ended_by_itself, reason=reason, **known)


SILENCE_SECONDS = 120.0
"""A pack that is asked to kill a trial but has not written its state for this long hangs, and is killed."""
FRESH_SECONDS = 5.0
"""Maximum age of the packs' states when a trial is assigned to one."""
TERMINATED = 143
"""Exit code of a trial withdrawn before its pack took it: that of a process ended by SIGTERM."""


class PackedLauncher(Launcher):
    """Assigns trials that can share a job to packs of at most ``slots``; other jobs go to ``below`` unchanged.

    folder: parent of the packs' folders. packs: number of packs per job.
    """

    def __init__(self, below: Launcher, slots: int, folder: Path, packs: int = 1) -> None:
        self._below, self._most, self._place, self._number = below, slots, folder, packs
        self._slots = slots
        self._packs: dict[Path, KnownPack] = {}
        self._reported: set[Path] = set()  # ended packs that ``shared_jobs`` has already listed
        self._homes: set[Path] = set()  # packs of polled trials, including those with removed folders
        self._queried_at = float("-inf")

    def submit(self, job: Job) -> str:
        """Assign the trial to a pack with room, or to a new one; return the id of the pack's job."""
        if job.slot is None:
            return self._below.submit(job)
        if pack_of(job.folder, job.token) is not None:
            known = self.poll([Ticket(name=job.name, folder=job.folder, token=job.token)])[job.name]
            if known.state is not JobState.LOST:
                return known.job_id
        if time.monotonic() - self._queried_at > FRESH_SECONDS:
            self._ask()
        for pack in [pack for pack in self._packs.values() if pack.status.state.alive and not pack.folder.gone]:
            room = pack.room or self._number * self._slots
            if pack.folder.occupied() < room and _ask_for(pack, job):
                return pack.ticket.job_id
        pack = self._start_pack(job)
        if not _ask_for(pack, job):
            raise LauncherError(f"{job.name}: pack {pack.ticket.name} ended before it took a trial; it is tried again")
        return pack.ticket.job_id

    def widen(self, jobs: int) -> None:
        """Make room for ``jobs`` concurrent trials: in living packs, and by further jobs."""
        if self._number > 1:  # the first pack of a job must not take all trials of the others
            self._slots = min(self._most, -(-jobs // self._number))
        of_job = self._number * self._slots
        for place, pack in self._packs.items():
            if pack.status.state.alive and pack.room is not None and pack.room < of_job:
                with contextlib.suppress(OSError):  # full disk or removed folder: the next call tries again
                    # Before the capacity is recorded: a pack must not be assigned trials that it does not take.
                    pack.folder.widen(self._slots)
                    _write_down(pack.ticket, of_job, pack.first)
                    self._packs[place] = replace(pack, room=of_job)
        self._below.widen(-(-jobs // of_job))

    def _start_pack(self, job: Job) -> KnownPack:
        """Start a pack for trials with the same command and resources as ``job``."""
        assert job.slot is not None
        known = {*self._place.glob("[0-9]*"), *self._packs, *self._homes}
        number = 1 + max((int(folder.name) for folder in known), default=-1)
        folder = self._place / f"{number:04d}"
        place = PackFolder(folder)
        place.make()
        name = f"{job.name.rsplit('-', 2)[0]}-pack-{number:04d}"
        several = () if self._number == 1 else ("--packs", str(self._number), "--slots", str(self._slots))
        room = self._number * self._slots if several else None
        pack_job = Job(
            name=name,
            folder=folder,
            argv=(*job.slot.argv, str(folder), *several),
            sweep=job.sweep,
            # The pack is no attempt of a trial: its trials' logs carry their own owners.
            environment={k: v for k, v in job.environment.items() if k != ATTEMPT_VARIABLE},
            log=AttemptPaths(folder).log,
            # A trial's time limit does not apply to the pack, which continues with the next trials.
            resources=replace(job.resources, minutes=0.0, gpus_per_node=self._number * job.resources.gpus_per_node),
            exclude_nodes=job.exclude_nodes,
        )
        ticket = Ticket(name=name, folder=folder, submitted_at=time.time())
        _write_down(ticket, room, job.name)
        try:
            ticket = replace(ticket, job_id=self._below.submit(pack_job))
        except LauncherError:
            place.close()
            raise
        _write_down(ticket, room, job.name)
        queued = JobStatus(state=JobState.QUEUED, job_id=ticket.job_id)
        self._packs[folder] = KnownPack(ticket, queued, place, room, job.name, [])
        return self._packs[folder]

    def poll(self, tickets: Sequence[Ticket]) -> Mapping[str, JobStatus]:
        """Status of each trial from its records and from its pack's status in the inner launcher."""
        homes = {ticket.name: pack_of(ticket.folder, ticket.token) for ticket in tickets}
        plain = [ticket for ticket in tickets if homes[ticket.name] is None]
        statuses = dict(self._below.poll(plain)) if plain else {}
        if len(plain) < len(tickets):
            self._ask()
        states: dict[Path, list[PackState]] = {}
        for ticket in tickets:
            if (home := homes[ticket.name]) is not None:
                place = home.paths.folder
                if place not in states:
                    states[place] = home.states(self._number)
                    self._homes.add(place)
                statuses[ticket.name] = trial_status(ticket, self._packs.get(place), home, states[place])
        return statuses

    def _ask(self) -> None:
        """Update the status of the packs on disk; ended ones are not polled again."""
        unknown = [_recorded(folder) for folder in sorted(self._place.glob("[0-9]*")) if folder not in self._packs]
        # Includes a pack whose folder was removed: its job may still run.
        polled = [*(pack for pack in self._packs.values() if pack.status.state.alive), *unknown]
        statuses = self._below.poll([pack.ticket for pack in polled]) if polled else {}
        for pack in polled:
            self._packs[pack.ticket.folder] = replace(pack, status=statuses[pack.ticket.name])
        self._queried_at = time.monotonic()

    def cancel(self, ticket: Ticket, *, force: bool = False) -> None:
        """Ask the pack to end the trial while the others train on; kill a pack that hangs."""
        home = pack_of(ticket.folder, ticket.token)
        if home is None:
            self._below.cancel(ticket, force=force)
            return
        with _reported_once(f"{ticket.name} is not ended yet"):
            self._withdraw_or_stop(home, ticket, force=force)

    def _withdraw_or_stop(self, home: PackFolder, ticket: Ticket, *, force: bool) -> None:
        attempt = AttemptPaths(ticket.folder)
        if attempt.ended.exists():
            return
        if home.withdraw(ticket.name):
            write_json(attempt.ended, {"token": ticket.token, "exit_code": TERMINATED, "at": time.time()})
            return
        home.stop(ticket.name, force=force)
        states = home.states(self._number)
        # Which pack of the job has a trial that is not training yet is unknown: assume the quietest one.
        latest = min(state.at for state in telling(ticket.name, states) or states)
        hangs = time.time() - latest > SILENCE_SECONDS
        if force and hangs and (pack := self._packs.get(home.paths.folder)) is not None:
            self._below.cancel(pack.ticket, force=True)

    def shared_jobs(self) -> Sequence[SharedJob]:
        """Jobs of packs that have started, as of the last poll; an ended one is listed once."""
        jobs = []
        for place, pack in self._packs.items():
            status = pack.status
            if status.started_at is None or place in self._reported:
                continue
            ended_at = None if status.state.alive else status.ended_at
            if not status.state.alive:
                self._reported.add(place)
                if ended_at is None:  # lost, with an unknown end time
                    continue
            jobs.append(
                SharedJob(
                    name=pack.ticket.name, first=pack.first, trials=pack.trials,
                    started_at=status.started_at, ended_at=ended_at,
                )
            )  # fmt: skip
        return jobs

    def let_go(self) -> bool:
        """Let packs end that are queued or only wait for further trials; return whether any is alive."""
        self._ask()
        alive = [pack for pack in self._packs.values() if pack.status.state.alive]
        for pack in alive:
            if any(pack.folder.open_requests()):
                continue
            with _reported_once(f"{pack.ticket.name} is not let go yet"):
                pack.folder.let_go()
            if pack.status.state is JobState.QUEUED:
                self._below.cancel(pack.ticket)
        return bool(alive)

    def jobs_below(self, folder: Path) -> Sequence[Ticket]:
        """Trials in living packs whose folders are below ``folder``."""
        self._ask()
        return [
            Ticket(name=request.name, folder=Path(request.folder), token=request.token, job_id=pack.ticket.job_id)
            for pack in self._packs.values()
            if pack.status.state.alive
            for request in pack.folder.open_requests()
            if Path(request.folder).is_relative_to(folder)
        ]


@contextlib.contextmanager
def _reported_once(action: str) -> Iterator[None]:
    """Raise LauncherError if a message cannot be written, e.g. on a full disk; the message is then sent again."""
    try:
        yield
    except OSError as error:
        raise LauncherError(f"{action}: {error}") from error


def _write_down(ticket: Ticket, room: int | None, first: str) -> None:
    """Record the pack's job and its capacity, to find it after a restart."""
    known = {"name": ticket.name, "job_id": ticket.job_id, "submitted_at": ticket.submitted_at, "first": first}
    write_json(AttemptPaths(ticket.folder).slot, known | ({} if room is None else {"room": room}))


def _recorded(folder: Path) -> KnownPack:
    """The pack in ``folder``; its job is LOST if the launcher died before it recorded one."""
    known, place = read_json(AttemptPaths(folder).slot).content or {}, PackFolder(folder)
    name = text_of(known, "name") or f"pack-{folder.name}"
    submitted_at = number_of(known, "submitted_at") or 0.0
    ticket = Ticket(name=name, folder=folder, job_id=text_of(known, "job_id"), submitted_at=submitted_at)
    unknown = JobStatus(state=JobState.LOST)
    return KnownPack(ticket, unknown, place, whole_of(known, "room"), text_of(known, "first"), sorted(place.trials()))


def _ask_for(pack: KnownPack, job: Job) -> bool:
    """Request the job's trial from the pack; False if it takes no more."""
    accepted = pack.folder.ask(job)
    if accepted and job.name not in pack.trials:
        pack.trials.append(job.name)
    return accepted
