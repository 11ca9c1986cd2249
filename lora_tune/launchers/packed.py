"""Trials that share jobs: a launcher around another one, whose jobs are packs of up to K trials.

A pack is a job of the launcher below that runs a packed trainer, which watches its folder (:mod:`pack_folder`). A job
may hold several packs, one a GPU, that share its folder: they live and end together, so all below speaks of one. Each
trial keeps its own folder, log, and records of claim, start and end: the pack writes them in place of a job, and makes
the claim exclusively, so that a trial is trained once or not at all. A slot that falls free takes the next trial while
the others train. When a pack ends, every trial in it without a record of its own end was interrupted, and says so.
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

# What a trial that shares a job is doing: from its own records, else from what became of its pack.


SIGNALS = 128
"""Exit codes from here on tell which signal ended a process."""
EVENT_BYTES = 1 << 16
"""Of the end of a pack's log, where that says why its trials failed."""


@dataclass(frozen=True, slots=True)
class KnownPack:
    """A pack as the launcher below knows it, and its folder.

    room: trials that a job of several packs takes, as these were told when it began; None where it was told nothing.
    first: name of the trial for which it was started, "" where an earlier release started it. trials: names of all
    that it was asked for; it grows.
    """

    ticket: Ticket
    status: JobStatus
    folder: PackFolder
    room: int | None
    first: str
    trials: list[str]


def telling(name: str, states: Sequence[PackState]) -> list[PackState]:
    """Of the packs of a job, the one that trains the trial."""
    return [state for state in states if name in state.shares]


def trial_status(ticket: Ticket, pack: KnownPack | None, home: PackFolder, states: Sequence[PackState]) -> JobStatus:
    """A trial's status from its own records, else from what became of its pack."""
    # Whether it still waits is looked at before the records: the pack takes the request, then it writes them.
    waits = home.asked(ticket.name)
    records = read_records(AttemptPaths(ticket.folder), ticket.token)
    known = _begun(ticket, pack, records, states)
    if records.ended is not None:
        end = records.ended
        # Its seconds are not told: the log's clock is that of the trial alone, which a job's length says nothing about.
        known["node_share"] = end.node_share
        # By the clock that nobody sets, where it began.
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
    """What a trial's status says of its beginning, and of its share of the node so far."""
    known: dict[str, Any] = {"job_id": pack.ticket.job_id if pack else ticket.job_id}
    process = records.started or records.claim
    if process is not None:
        # By the cluster's name, by which a node can be excluded; its host name may be another.
        known["nodes"] = (pack.status.nodes if pack else ()) or (process.process.host,)
    if records.started is not None:
        known["started_at"] = records.started.at
        for state in telling(ticket.name, states):
            known["share_seconds"] = state.shares[ticket.name]
            steadily = state.steady > 0 and records.started.steady is not None  # packs of earlier releases: not
            begun, now = (records.started.steady, state.steady) if steadily else (records.started.at, state.at)
            if (lived := now - (begun or 0.0)) > 0:
                known["node_share"] = min(1.0, state.shares[ticket.name] / lived)
    return known


def _failed_to_begin(pack: KnownPack, known: Mapping[str, Any]) -> JobStatus | None:
    """Of a trial whose pack failed by itself before it took any: it ends as its pack did; None where that is not so.

    Its command, its libraries or its GPUs are not what they should be, as they would not be for the trial alone.
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
    """The last lines of a log; b"" where it cannot be read."""
    with contextlib.suppress(OSError), os.fdopen(open_regular(log), "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - EVENT_BYTES))
        return file.read(EVENT_BYTES)
    return b""


def _displaced(pack: KnownPack, known: Mapping[str, Any]) -> JobStatus | None:
    """Of a trial that waited for a place until its pack ended; None where the pack took none at all.

    So each pack that ends takes an attempt of some trial, or brings one to its end: none is asked for without end.
    """
    if pack.folder.untouched:
        return None
    why = f"its pack {pack.ticket.name} ended before it took the trial: {pack.status.state.value}"
    return JobStatus(state=JobState.DISPLACED, ended_at=pack.status.ended_at, reason=why, **known)


def _interrupted(pack: KnownPack, known: Mapping[str, Any]) -> JobStatus:
    """A trial whose pack ended without a word about it: it is run again, since another one may be to blame."""
    below = pack.status
    node_states = (JobState.HOST_MEMORY, JobState.NODE_FAILED, JobState.NOT_BEGUN)
    state = below.state if below.state in node_states else JobState.PREEMPTED
    code = "" if below.exit_code is None else f", exit code {below.exit_code}"
    how = below.reason if below.state is JobState.HOST_MEMORY else f"{below.state.value}{code}"
    why = f"its pack {pack.ticket.name} ended before it: {how}"
    reason = why if how == below.reason else "; ".join(filter(None, (why, below.reason)))
    ended_by_itself = (
        below.exit_code if below.state in (JobState.ENDED, JobState.HOST_MEMORY) else None
    )  # not of preemption
    return JobStatus(state=state, ended_at=below.ended_at, exit_code=ended_by_itself, reason=reason, **known)


SILENCE_SECONDS = 120.0
"""A pack that is asked to kill a trial and has not written its state for this long hangs, and is killed itself."""
FRESH_SECONDS = 5.0
"""How old the last answer about the packs may be when a trial is to be given to one of them."""
TERMINATED = 143
"""Exit code of a trial that was withdrawn before its pack took it, as of a process that SIGTERM ended."""


class PackedLauncher(Launcher):
    """Gives trials that can share a job to packs of at most ``slots``; every other job goes to ``below`` as it is.

    folder: where the packs' folders are made. packs: in one job.
    """

    def __init__(self, below: Launcher, slots: int, folder: Path, packs: int = 1) -> None:
        self._below, self._most, self._place, self._number = below, slots, folder, packs
        self._slots = slots
        self._packs: dict[Path, KnownPack] = {}
        self._reported: set[Path] = set()  # packs that have ended, and whose end was told
        self._homes: set[Path] = set()  # of trials that were asked about, also where somebody has removed them
        self._queried_at = float("-inf")

    def submit(self, job: Job) -> str:
        """Give the trial to a pack with room, or to a new one; returns the id of the pack's job."""
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
        """Make room for so many at one time: in the packs that live, and for further jobs beside them."""
        if self._number > 1:  # the first pack of a job is to leave the others their part
            self._slots = min(self._most, -(-jobs // self._number))
        of_job = self._number * self._slots
        for place, pack in self._packs.items():
            if pack.status.state.alive and pack.room is not None and pack.room < of_job:
                with contextlib.suppress(OSError):  # a full disk, or a folder that was removed: it is told again
                    # Before its room is written down: it must not get what it does not take.
                    pack.folder.widen(self._slots)
                    _write_down(pack.ticket, of_job, pack.first)
                    self._packs[place] = replace(pack, room=of_job)
        self._below.widen(-(-jobs // of_job))

    def _start_pack(self, job: Job) -> KnownPack:
        """A pack for the trials that run as ``job`` does."""
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
            # It is no attempt of a trial: each of its logs says whose it is.
            environment={k: v for k, v in job.environment.items() if k != ATTEMPT_VARIABLE},
            log=AttemptPaths(folder).log,
            # A trial's limit is not the pack's, which goes on with the next trials.
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
        """What the trials' records say, and what the launcher below says of the packs that they are in."""
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
        """The packs that are on disk, each with its state; those that ended are not asked about again."""
        unknown = [_recorded(folder) for folder in sorted(self._place.glob("[0-9]*")) if folder not in self._packs]
        # Also one whose folder was removed: its job may live on.
        polled = [*(pack for pack in self._packs.values() if pack.status.state.alive), *unknown]
        statuses = self._below.poll([pack.ticket for pack in polled]) if polled else {}
        for pack in polled:
            self._packs[pack.ticket.folder] = replace(pack, status=statuses[pack.ticket.name])
        self._queried_at = time.monotonic()

    def cancel(self, ticket: Ticket, *, force: bool = False) -> None:
        """A message to the pack: it ends the trial, and the others train on. A pack that hangs is killed."""
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
        # Which pack of its job has a trial that trains not yet, is not known: the quietest may.
        latest = min(state.at for state in telling(ticket.name, states) or states)
        hangs = time.time() - latest > SILENCE_SECONDS
        if force and hangs and (pack := self._packs.get(home.paths.folder)) is not None:
            self._below.cancel(pack.ticket, force=True)

    def shared_jobs(self) -> Sequence[SharedJob]:
        """The packs' jobs that have started, as they were last seen; one that has ended is told once."""
        jobs = []
        for place, pack in self._packs.items():
            status = pack.status
            if status.started_at is None or place in self._reported:
                continue
            ended_at = None if status.state.alive else status.ended_at
            if not status.state.alive:
                self._reported.add(place)
                if ended_at is None:  # lost, and nobody knows when
                    continue
            jobs.append(
                SharedJob(
                    name=pack.ticket.name, first=pack.first, trials=pack.trials,
                    started_at=status.started_at, ended_at=ended_at,
                )
            )  # fmt: skip
        return jobs

    def let_go(self) -> bool:
        """Let packs end that only wait for further trials, or in the queue; whether any is alive."""
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
        """The trials in live packs whose folders lie below ``folder``."""
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
    """Raises LauncherError, after which a message is tried again, where it cannot be written: a full disk, say."""
    try:
        yield
    except OSError as error:
        raise LauncherError(f"{action}: {error}") from error


def _write_down(ticket: Ticket, room: int | None, first: str) -> None:
    """What suffices to find the pack's job again, and to give it no more trials than it takes."""
    known = {"name": ticket.name, "job_id": ticket.job_id, "submitted_at": ticket.submitted_at, "first": first}
    write_json(AttemptPaths(ticket.folder).slot, known | ({} if room is None else {"room": room}))


def _recorded(folder: Path) -> KnownPack:
    """The pack in ``folder``; its job is nowhere, where its launcher died before it wrote anything down."""
    known, place = read_json(AttemptPaths(folder).slot).content or {}, PackFolder(folder)
    name = text_of(known, "name") or f"pack-{folder.name}"
    submitted_at = number_of(known, "submitted_at") or 0.0
    ticket = Ticket(name=name, folder=folder, job_id=text_of(known, "job_id"), submitted_at=submitted_at)
    unknown = JobStatus(state=JobState.LOST)
    return KnownPack(ticket, unknown, place, whole_of(known, "room"), text_of(known, "first"), sorted(place.trials()))


def _ask_for(pack: KnownPack, job: Job) -> bool:
    """Ask for the job's trial; False where the pack takes no more."""
    accepted = pack.folder.ask(job)
    if accepted and job.name not in pack.trials:
        pack.trials.append(job.name)
    return accepted
