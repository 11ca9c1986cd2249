"""What a simulated job will do: its record on disk, and its course, fixed by its parameters, its seed and its name."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from lora_tune.base.small_files import number_of
from lora_tune.launchers.base import JobState
from lora_tune.launchers.simulated import SurfaceFunction

PARAMETERS = "parameters.json"
"""The file of a job that says what to simulate (``workloads.surface``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """nodes: how many there are. queue_minutes: mean wait beside waiting for nodes (exponential).

    node_failures: of one node, preemptions: of a job, in 1,000 hours of running.
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
    wanted: int
    submitted_at: float
    eligible_at: float
    started_at: float | None = None
    nodes: tuple[str, ...] = ()
    cancelled_at: float | None = None


def record_of(content: Mapping[str, Any] | None) -> JobRecord | None:
    """What a job's record says, None where it says nothing that can be read: then nobody knows of the job."""
    if content is None:
        return None
    try:
        record = JobRecord(**{**content, "nodes": tuple(content["nodes"])})
    except (TypeError, KeyError):
        return None
    timed = ("submitted_at", "eligible_at", "minutes", *(n for n in ("started_at", "cancelled_at") if content.get(n)))
    numbers = all(number_of(content, name) is not None for name in timed)
    texts = all(isinstance(text, str) for text in (record.name, record.folder, record.log, *record.nodes))
    return record if numbers and texts and isinstance(record.wanted, int) else None


@dataclass(slots=True)
class JobCourse:
    """What a started job will do: its lines still to be written, when and how it ends."""

    lines: list[tuple[float, str]]
    wakes: deque[float]
    ends_at: float
    state: JobState
    written: int = 0


def course_of(job: JobRecord, surface: SurfaceFunction, cluster: Cluster) -> JobCourse:
    """The job's lines in virtual epoch seconds, cut at its time limit, a node's failure or a preemption."""
    data = json.loads((Path(job.folder) / PARAMETERS).read_text(encoding="utf-8"))
    assert job.started_at is not None
    lines = [(job.started_at + t, text) for t, text in surface(data["parameters"], int(data["seed"]))]
    ends: list[tuple[float, JobState]] = [(lines[-1][0] if lines else job.started_at, JobState.ENDED)]
    if job.minutes:
        ends.append((job.started_at + 60 * job.minutes, JobState.TIME_LIMIT))
    rng = luck(job.name)
    rng.exponential()  # the draw of the queue
    for rate, state in (
        (cluster.node_failures * job.wanted, JobState.NODE_FAILED),
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
    return JobCourse(lines=kept, wakes=wakes, ends_at=ends_at, state=state)


def luck(name: str) -> np.random.Generator:
    """The draws of a job, always the same for its name."""
    return np.random.default_rng(crc32(name.encode()))
