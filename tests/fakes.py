"""A cluster, a clock and a database that fail on demand, for tests of the driver."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_tune.base.errors import LauncherError
from lora_tune.launchers.base import JobState, JobStatus, Launcher, Ticket
from lora_tune.workloads.base import Job

Script = Iterator[tuple[float, str]]
"""(seconds since the start, log line), in order; the job ends with the last one."""


class FakeClock:
    """Time that passes only when somebody sleeps; ``time`` may be set, as somebody sets a machine's clock.

    true: what it would show if nobody had.
    """

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.time = self.true = now

    def now(self) -> float:
        return self.time

    def monotonic_now(self) -> float:
        return min(self.time, self.true)

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.true += seconds


def record(at: float, key: str, value: Any, **metadata: Any) -> str:
    """One MLLOG line; ``at`` in seconds."""
    content = {"namespace": "", "time_ms": round(at * 1000), "event_type": "POINT_IN_TIME", "key": key, "value": value}
    return ":::MLLOG " + json.dumps({**content, "metadata": {"file": "x.py", "lineno": 1, **metadata}})


def curve_script(environment: Mapping[str, str], start: float) -> Script:
    """A trial whose eval loss falls as ln(samples); LR = 1e-3 is best, far from it the curve stays flat."""
    rate, steps, batch = float(environment["LR"]), int(environment["STEPS"]), 8
    slope = 0.5 * math.exp(-((math.log10(rate) + 3) ** 2))
    yield 1.0, record(start + 1, "run_start", None)
    for i in range(1, 11):
        samples = i * steps * batch // 10
        loss = 3.0 - slope * math.log(samples)
        at = 1.0 + samples / 100
        yield at, record(start + at, "eval_accuracy", loss, samples_count=samples)
        if loss <= float(environment["TARGET"]):
            yield at, record(start + at, "run_stop", None, status="success")
            return
    yield at, record(start + at, "run_stop", None, status="aborted")


@dataclass
class FakeJob:
    job: Job
    submitted: float
    script: Script
    exit_code: int = 0
    lines: list[tuple[float, str]] = field(default_factory=list)
    ended: float | None = None
    stubborn: bool = False
    immortal: bool = False


class FakeCluster(Launcher):
    """Runs jobs as scripts on a fake clock. It survives its drivers, as a cluster does.

    ``starts`` counts, by job name, how often a job really ran. ``down``: nothing answers.
    """

    def __init__(self, clock: FakeClock, script: Callable[[Mapping[str, str], float], Script] = curve_script) -> None:
        self.clock = clock
        self.jobs: dict[str, FakeJob] = {}
        self.starts: dict[str, int] = {}
        self.polls = 0
        self.down = False
        self.most_at_once = 0
        self._script = script

    def submit(self, job: Job) -> str:
        self._check()
        if job.name not in self.jobs:
            now = self.clock.true
            self.jobs[job.name] = FakeJob(job, now, self._script(job.environment, now))
            self.starts[job.name] = self.starts.get(job.name, 0) + 1
            self.most_at_once = max(self.most_at_once, sum(j.ended is None for j in self.jobs.values()))
        return f"id-{job.name}"

    def poll(self, tickets: Sequence[Ticket]) -> Mapping[str, JobStatus]:
        self._check()
        self.polls += 1
        return {ticket.name: self._status(ticket) for ticket in tickets}

    def _status(self, ticket: Ticket) -> JobStatus:
        found = self.jobs.get(ticket.name)
        if found is None:
            return JobStatus(state=JobState.LOST)
        self._write(found)
        state = JobState.RUNNING if found.ended is None else JobState.ENDED
        code = found.exit_code if found.ended is not None else None
        return JobStatus(
            state=state, job_id=f"id-{ticket.name}", started_at=found.submitted, ended_at=found.ended, exit_code=code,
            nodes=("n1",), seconds=(found.ended or self.clock.true) - found.submitted,
        )  # fmt: skip

    def _write(self, found: FakeJob) -> None:
        now = self.clock.true
        with found.job.log.open("a", encoding="utf-8") as log:
            while found.ended is None:
                if not found.lines:
                    following = next(found.script, None)
                    if following is None:
                        found.ended = now
                        return
                    found.lines.append(following)
                at, line = found.lines[0]
                if found.submitted + at > now:
                    return
                found.lines.pop()
                log.write(line + "\n")

    def cancel(self, ticket: Ticket, *, force: bool = False) -> None:
        self._check()
        found = self.jobs.get(ticket.name)
        if found is not None and found.ended is None and (force or not found.stubborn) and not found.immortal:
            self._write(found)
            if found.ended is None:
                found.ended, found.exit_code = self.clock.true, -15

    def _check(self) -> None:
        if self.down:
            raise LauncherError("the cluster does not answer")


class SurveyedCluster(FakeCluster):
    """One that also says which jobs write below a folder."""

    def jobs_below(self, folder: Path) -> list[Ticket]:
        alive = (found for found in self.jobs.values() if found.ended is None)
        return [
            Ticket(name=found.job.name, folder=found.job.folder, job_id=f"id-{found.job.name}")
            for found in alive
            if found.job.log.absolute().is_relative_to(folder)
        ]


class Crash(BaseException):
    """The driver's process is killed here."""


class Crashing:
    """Passes calls on, and crashes before or after the call whose turn it is. ``turn`` is shared by all ports."""

    def __init__(self, inner: Any, turn: Turn, methods: tuple[str, ...]) -> None:
        self._inner, self._turn, self._methods = inner, turn, methods
        for name in dir(type(inner)):
            if not name.startswith("_") and callable(getattr(type(inner), name)):
                setattr(self, name, functools.partial(self._call, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        if name not in self._methods:
            return getattr(self._inner, name)(*arguments, **options)
        self._turn.tick()
        result = getattr(self._inner, name)(*arguments, **options)
        self._turn.tick()
        return result


@dataclass
class Turn:
    """Counts down to the crash; None: never."""

    left: int | None = None

    def tick(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Crash


def command_study(**budget: Any) -> str:
    """A study of the ``command`` workload over LR and STEPS, as TOML."""
    lines = "\n".join(f"{k} = {v}" for k, v in budget.items())
    return f"""
description = "a study of fakes"
[workload]
kind = "command"
argv = ["true"]
[site]
system = "FAKE"
[space]
LR = {{ type = "float", low = 1e-5, high = 1e-1, log = true }}
STEPS = {{ type = "int", low = 100, high = 400, step = 100 }}
GBS = 8
[objective]
target = 0.0
[search]
sampler = "random"
[budget]
{lines}
"""


def write_study(folder: Path, text: str, name: str = "fake") -> Path:
    """A study file in ``folder``."""
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path
