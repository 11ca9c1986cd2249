"""What a trial that shares a job is doing: from its own records, else from what became of its pack."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_tune.base.files import open_regular
from lora_tune.base.paths import AttemptPaths
from lora_tune.launchers.base import JobState, JobStatus, Ticket
from lora_tune.launchers.job_records import JobRecords, read_records
from lora_tune.launchers.pack_folder import PackFolder, PackState

SIGNALS = 128
"""Exit codes from here on tell which signal ended a process."""
TOLD_BYTES = 1 << 16
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
        known["nodes"] = (pack.status.nodes if pack else ()) or (process.host,)
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
        file.seek(max(0, file.seek(0, os.SEEK_END) - TOLD_BYTES))
        return file.read(TOLD_BYTES)
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
    own = (JobState.HOST_MEMORY, JobState.NODE_FAILED, JobState.NOT_BEGUN)
    state = below.state if below.state in own else JobState.PREEMPTED
    code = "" if below.exit_code is None else f", exit code {below.exit_code}"
    how = below.reason if below.state is JobState.HOST_MEMORY else f"{below.state.value}{code}"
    why = f"its pack {pack.ticket.name} ended before it: {how}"
    reason = why if how == below.reason else "; ".join(filter(None, (why, below.reason)))
    own_end = below.exit_code if below.state in (JobState.ENDED, JobState.HOST_MEMORY) else None  # not of preemption
    return JobStatus(state=state, ended_at=below.ended_at, exit_code=own_end, reason=reason, **known)
