"""What a trial that shares a job costs its driver: the part ``packed`` of ``benchmarks.scale``.

One pack of 16 slots through which many trials have gone. Measured is what the driver does for a trial beside its search
and its log: it is given to the pack, looked at with the others that train, and what the pack held is booked. A pack
that trains nothing stands below: it takes what is asked, and writes the records that a pack writes.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lora_tune.base.paths import AttemptPaths
from lora_tune.controller.event_log import EventLog
from lora_tune.controller.shared_jobs import SharedJobs
from lora_tune.launchers.base import JobState, JobStatus, Ticket
from lora_tune.launchers.job_records import describe
from lora_tune.launchers.pack_folder import PackFolder
from lora_tune.launchers.packed import PackedLauncher
from lora_tune.store.records import Attempt, StudyRecords
from lora_tune.store.unit_of_work import UnitOfWork
from lora_tune.workloads.base import Job, SlotTerms

SLOTS, MEASURED, LOOKS = 16, 48, 4
"""Trials side by side; trials that are measured; looks for each that ends."""


class OneJob:
    """A launcher whose jobs run."""

    def submit(self, job: Job) -> str:
        return "17"

    def poll(self, tickets: Sequence[Ticket]) -> Mapping[str, JobStatus]:
        status = JobStatus(state=JobState.RUNNING, job_id="17", started_at=time.time() - 3600)
        return {ticket.name: status for ticket in tickets}

    def cancel(self, ticket: Ticket, *, force: bool = False) -> None:
        raise AssertionError("nothing is cancelled here")


class PackedTrials:
    """A sweep of packed trials in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, 0
        self._launcher = PackedLauncher(OneJob(), SLOTS, folder / "packs")
        records = StudyRecords(name="s", digest="", study_toml="", began_at=time.time())
        self._work = UnitOfWork(records)
        events = EventLog(folder / "driver.log", lambda _: None, time.time)
        self._shared = SharedJobs(self._launcher, self._work, events)
        self._live: list[tuple[Attempt, Ticket]] = []
        self.seconds = 0.0  # of the processor, for what the driver does

    def go_through(self, trials: int, looks: int) -> None:
        """So many trials more end, and as many follow."""
        for _ in range(trials):
            while len(self._live) < SLOTS:
                self._begin()
            began = time.process_time()
            for _ in range(looks):
                self._look()
            self.seconds += time.process_time() - began
            self._end()

    def _begin(self) -> None:
        number, self._made = self._made, self._made + 1
        folder = self._folder / "trials" / f"{number:05d}"
        folder.mkdir(parents=True)
        job = Job(
            name=f"s-{number:05d}-0", folder=folder, token=f"{number}", argv=(), log=folder / "job.log",
            slot=SlotTerms(argv=("pack",), knobs={"LR": "0.001", "SEED": str(number)}),
        )  # fmt: skip
        ticket = Ticket(name=job.name, folder=folder, token=job.token)
        attempt = Attempt(trial=number, number=0, job_name=job.name, folder=str(folder), token=job.token)
        self._work.put_attempt(attempt)
        began = time.process_time()
        self._launcher.submit(job)
        self.seconds += time.process_time() - began
        (request,) = PackFolder(self._folder / "packs" / "0000").take()
        for record in (request.attempt.claim, request.attempt.started):
            record.write_text(json.dumps(describe(os.getpid(), request.token)))
        self._live.append((attempt, ticket))

    def _look(self) -> None:
        statuses = self._launcher.poll([ticket for _, ticket in self._live])
        for attempt, _ in self._live:
            status = statuses[attempt.job_name]
            self._work.put_attempt(replace(attempt, started_at=status.started_at, ended_at=status.ended_at))
        self._shared.book(time.time())
        self._work.take_changes()

    def _end(self) -> None:
        _, ticket = self._live[0]
        end = {"token": ticket.token, "exit_code": 0, "at": time.time(), "seconds": 1.0, "node_share": 1 / SLOTS}
        AttemptPaths(ticket.folder).ended.write_text(json.dumps(end))
        self._look()
        del self._live[0]


def packed(counts: Sequence[int]) -> None:
    """Print a line for each number of trials that the pack has had."""
    print(f"processor ms a trial, of {SLOTS} side by side in one pack, each with {LOOKS} looks at all")
    with tempfile.TemporaryDirectory() as folder:
        trials, gone, first = PackedTrials(Path(folder)), 0, 0.0
        for count in counts:
            trials.go_through(count - gone, looks=0)
            trials.seconds = 0.0
            trials.go_through(MEASURED, looks=LOOKS)
            cost = 1000 * trials.seconds / MEASURED
            gone, first = count + MEASURED, first or cost
            print(f"{count:>8} trials before: {cost:6.1f} ms, {cost / first:4.1f} x as at first", flush=True)
