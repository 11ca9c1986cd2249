"""A cluster on a virtual clock: jobs are surfaces, time advances when the driver sleeps, logs are real files.

A job's outcome follows from its parameters, its seed and its name, so a new launcher continues from the records in the
jobs' folders. Nodes are allocated first come, first served.
"""

from __future__ import annotations

import heapq
import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from lora_tune.base.errors import InputError, LauncherError
from lora_tune.base.files import number_of, read_json
from lora_tune.config.study import Study
from lora_tune.launchers.base import JobState, JobStatus, Launcher, LauncherKind, Ticket
from lora_tune.workloads.base import Job
from lora_tune_simulation import SurfaceFunction, load

# Simulated jobs: their records on disk, and their outcome, a function of parameters, seed and name.


PARAMETERS = "parameters.json"
"""The file of a job that states what to simulate (``workloads.surface``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """nodes: number of nodes. queue_minutes: mean extra wait in the queue (exponential).

    node_failures: per node, preemptions: per job, in 1,000 hours of running.
    """

    nodes: int
    queue_minutes: float = 0.0
    node_failures: float = 0.0
    preemptions: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job on disk. Times are virtual epoch seconds, None while unknown."""

    name: str
    folder: str
    log: str
    minutes: float
    requested: int
    submitted_at: float
    eligible_at: float
    started_at: float | None = None
    nodes: tuple[str, ...] = ()
    cancelled_at: float | None = None


def record_of(content: Mapping[str, Any] | None) -> JobRecord | None:
    """A job's record; None if it is unreadable, so that the job counts as unknown."""
    if content is None:
        return None
    try:
        record = JobRecord(**{**content, "nodes": tuple(content["nodes"])})
    except (TypeError, KeyError):
        return None
    timed = ("submitted_at", "eligible_at", "minutes", *(n for n in ("started_at", "cancelled_at") if content.get(n)))
    numbers = all(number_of(content, name) is not None for name in timed)
    texts = all(isinstance(text, str) for text in (record.name, record.folder, record.log, *record.nodes))
    return record if numbers and texts and isinstance(record.requested, int) else None


@dataclass(slots=True)
class JobPlan:
    """The future of a started job: its remaining lines, when and how it ends."""

    lines: list[tuple[float, str]]
    wakes: deque[float]
    ends_at: float
    state: JobState
    written: int = 0


def job_plan(job: JobRecord, surface: SurfaceFunction, cluster: Cluster) -> JobPlan:
    """The job's lines in virtual epoch seconds, cut at its time limit, a node's failure or a preemption."""
    data = json.loads((Path(job.folder) / PARAMETERS).read_text(encoding="utf-8"))
    assert job.started_at is not None
    lines = [(job.started_at + t, text) for t, text in surface(data["parameters"], int(data["seed"]))]
    ends: list[tuple[float, JobState]] = [(lines[-1][0] if lines else job.started_at, JobState.ENDED)]
    if job.minutes:
        ends.append((job.started_at + 60 * job.minutes, JobState.TIME_LIMIT))
    rng = luck(job.name)
    rng.exponential()  # skip the draw of the queue
    for rate, state in (
        (cluster.node_failures * job.requested, JobState.NODE_FAILED),
        (cluster.preemptions, JobState.PREEMPTED),
    ):
        after = rng.exponential()
        if rate:
            ends.append((job.started_at + after * 3600_000 / rate, state))
    if job.cancelled_at is not None:
        ends.append((job.cancelled_at, JobState.CANCELLED))
    ends_at, state = min(ends, key=lambda e: e[0])
    kept = [line for line in lines if line[0] <= ends_at]
    wakes = deque(t for t, text in kept if '"train_loss"' not in text or "NaN" in text)
    return JobPlan(lines=kept, wakes=wakes, ends_at=ends_at, state=state)


def luck(name: str) -> np.random.Generator:
    """The random generator of a job, seeded by its name."""
    return np.random.default_rng(crc32(name.encode()))


RECORD = "simulated.json"
"""Record file in a job's folder."""
LONGEST_SLEEP = 300.0
"""Longest virtual sleep in seconds, shorter than any silence limit."""


def of_study(study: Study, jobs: int) -> SimulatedLauncher:
    """The simulated cluster of a study with a surface workload, by default with room for ``jobs`` trials.

    Raises InputError with the key.
    """
    table = study.workload.model_extra or {}
    if study.workload.kind != "surface" or "surface" not in table:
        raise InputError("site.launcher = simulated needs workload.kind = surface and a workload.surface; set both")
    cluster = Cluster(
        nodes=table.get("cluster_nodes") or jobs * study.site.nodes,
        queue_minutes=table.get("queue_minutes", 0.0),
        node_failures=table.get("node_failures_per_1000_hours", 0.0),
        preemptions=table.get("preemptions_per_1000_hours", 0.0),
    )
    return SimulatedLauncher(load(table["surface"]), cluster)


class SimulatedLauncher(Launcher):
    """Implements the launcher port, and the driver's clock by :meth:`now` and :meth:`sleep`."""

    def __init__(self, surface: SurfaceFunction, cluster: Cluster, start: float | None = None) -> None:
        """``start``: initial virtual epoch seconds; the present by default."""
        self._surface, self._cluster = surface, cluster
        self._now = time.time() if start is None else start
        self._jobs: dict[str, JobRecord] = {}
        self._courses: dict[str, JobPlan] = {}
        self._queue: set[str] = set()
        self._live: set[str] = set()
        self._free = [f"sim{n:04d}" for n in range(cluster.nodes)]
        heapq.heapify(self._free)

    # -- clock -------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Virtual epoch seconds."""
        return self._now

    def monotonic_now(self) -> float:
        """As :meth:`now`, because a virtual clock never jumps."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Advance to the next event of any job, at least ``seconds`` and at most five minutes."""
        ahead = [self._next_event(self._courses[name]) for name in self._live]
        ahead += [j.eligible_at for j in self._waiting() if j.eligible_at > self._now]
        event = min(ahead, default=math.inf)
        self._pass_until(max(self._now + seconds, min(event, self._now + LONGEST_SLEEP)))

    def _next_event(self, plan: JobPlan) -> float:
        while plan.wakes and plan.wakes[0] <= self._now:
            plan.wakes.popleft()
        return min(plan.wakes[0] if plan.wakes else math.inf, plan.ends_at)

    def _waiting(self) -> list[JobRecord]:
        jobs = (self._jobs[name] for name in self._queue)
        return sorted((j for j in jobs if j.cancelled_at is None), key=lambda j: (j.eligible_at, j.name))

    def _pass_until(self, then: float) -> None:
        """Advance to ``then``, ending and starting jobs in order on the way."""
        while True:
            ends = [self._courses[name].ends_at for name in self._live]
            waits = [j.eligible_at for j in self._waiting() if j.eligible_at > self._now]
            moment = min([*ends, *waits], default=math.inf)
            if moment > then:
                break
            self._now = max(self._now, moment)
            self._release_ended()
            self._start_waiting()
        self._now = max(self._now, then)
        for name in self._live:
            self._write_lines(name)

    def _release_ended(self) -> None:
        for name in [n for n in self._live if self._courses[n].ends_at <= self._now]:
            self._live.discard(name)
            for node in self._jobs[name].nodes:
                heapq.heappush(self._free, node)
            self._write_lines(name)

    def _start_waiting(self) -> None:
        for job in self._waiting():
            if job.eligible_at > self._now or len(self._free) < job.requested:
                return
            nodes = tuple(heapq.heappop(self._free) for _ in range(job.requested))
            self._queue.discard(job.name)
            self._live.add(job.name)
            self._keep(replace(job, started_at=self._now, nodes=nodes))
            self._courses[job.name] = job_plan(self._jobs[job.name], self._surface, self._cluster)

    # -- jobs --------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> str:
        """Queue the job; its id is its name. A known name is not queued again."""
        folder = Path(job.folder)
        if job.name in self._jobs or self._restored(job.name, folder):
            return job.name
        if PARAMETERS not in job.files:
            raise LauncherError(f"{job.name} names no surface; launcher = simulated needs workload.kind = surface")
        if job.resources.nodes > self._cluster.nodes:
            raise LauncherError(
                f"{job.name} wants {job.resources.nodes} nodes, the simulated cluster has {self._cluster.nodes}; "
                "raise workload.cluster_nodes"
            )
        rng = luck(job.name)
        wait = rng.exponential(60 * self._cluster.queue_minutes) if self._cluster.queue_minutes else 0.0
        self._keep(
            JobRecord(
                name=job.name,
                folder=str(folder),
                log=str(job.log),
                minutes=job.resources.minutes,
                requested=job.resources.nodes,
                submitted_at=self._now,
                eligible_at=self._now + wait,
            )
        )
        self._queue.add(job.name)
        self._start_waiting()
        return job.name

    def poll(self, tickets: Sequence[Ticket]) -> Mapping[str, JobStatus]:
        """The status of each job now; writes logs up to this moment."""
        statuses = {}
        for ticket in tickets:
            if ticket.name not in self._jobs and not self._restored(ticket.name, ticket.folder):
                statuses[ticket.name] = JobStatus(state=JobState.LOST)
                continue
            self._write_lines(ticket.name)
            statuses[ticket.name] = self._status(ticket.name)
        return statuses

    def cancel(self, ticket: Ticket, *, force: bool = False) -> None:
        """End the job now, with or without ``force``; no effect if it has ended."""
        if ticket.name not in self._jobs and not self._restored(ticket.name, ticket.folder):
            return
        job, plan = self._jobs[ticket.name], self._courses.get(ticket.name)
        if plan is None:
            self._queue.discard(ticket.name)
            self._keep(replace(job, cancelled_at=self._now))
        elif plan.ends_at > self._now:
            self._write_lines(ticket.name)
            self._keep(replace(job, cancelled_at=self._now))
            plan.ends_at, plan.state = self._now, JobState.CANCELLED
            self._release_ended()
            self._start_waiting()

    def _status(self, name: str) -> JobStatus:
        job, plan = self._jobs[name], self._courses.get(name)
        if plan is None:
            if job.cancelled_at is not None:
                return JobStatus(state=JobState.CANCELLED, job_id=name, ended_at=job.cancelled_at)
            return JobStatus(state=JobState.QUEUED, job_id=name, reason="Resources")
        if plan.ends_at > self._now:
            return JobStatus(state=JobState.RUNNING, job_id=name, started_at=job.started_at, nodes=job.nodes)
        failed = plan.state in (JobState.ENDED,) and "OutOfMemoryError" in (plan.lines[-1][1] if plan.lines else "")
        return JobStatus(
            state=plan.state, job_id=name, started_at=job.started_at, ended_at=plan.ends_at, nodes=job.nodes,
            exit_code=(1 if failed else 0) if plan.state is JobState.ENDED else None,
        )  # fmt: skip

    def _write_lines(self, name: str) -> None:
        """Append due lines to the job's log."""
        plan, job = self._courses.get(name), self._jobs[name]
        if plan is None:
            return
        due = plan.written
        limit = min(self._now, plan.ends_at)
        while due < len(plan.lines) and plan.lines[due][0] <= limit:
            due += 1
        if due > plan.written:
            with Path(job.log).open("a", encoding="utf-8") as file:
                file.writelines(text + "\n" for _, text in plan.lines[plan.written : due])
            plan.written = due

    # -- records -----------------------------------------------------------------------------------------------

    def _keep(self, job: JobRecord) -> None:
        self._jobs[job.name] = job
        (Path(job.folder) / RECORD).write_text(json.dumps(asdict(job)), encoding="utf-8")

    def _restored(self, name: str, folder: Path) -> bool:
        """Restore a job of an earlier launcher, and advance the clock to its latest event."""
        job = record_of(read_json(folder / RECORD).content)
        if job is None:
            return False
        self._jobs[name] = job
        moments = [t for t in (job.submitted_at, job.started_at, job.cancelled_at) if t is not None]
        self._now = max(self._now, *moments)
        if job.started_at is not None:
            self._free = sorted(set(self._free) - set(job.nodes))
            plan = self._courses[name] = job_plan(job, self._surface, self._cluster)
            log = Path(job.log)
            plan.written = len(log.read_text(encoding="utf-8").splitlines()) if log.exists() else 0
            self._live.add(name)
            self._release_ended()
        elif job.cancelled_at is None:
            self._queue.add(name)
            self._start_waiting()
        return True


KIND = LauncherKind(make=of_study, keeps_time=True)
"""Launcher kind of ``site.launcher = "simulated"``."""
