"""Records that a job writes about itself (``claim.json``, ``started.json``, ``ended.json``), and their readers.

Each record carries its attempt's token. File contents raise no errors here: an unreadable record, or one of another
attempt, is reported as a problem and counts as absent.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from lora_tune.base.files import SmallFile, number_of, process_of, read_json, text_of, whole_of
from lora_tune.base.host import Process, steady
from lora_tune.base.paths import AttemptPaths

Record = TypeVar("Record")
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a process killed by SIGKILL, and of a program that passes on such an exit of its child."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """A process that runs, or ran, an attempt.

    at: epoch seconds by the wall clock when it was recorded. steady: the same in seconds of the monotonic clock since
    boot, None if unknown.
    """

    token: str
    process: Process
    at: float
    steady: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """How a job ended.

    seconds: run time of its command by a monotonic clock, None if unknown. clock_steps: seconds of each adjustment
    (step or slew) of the wall clock during the run. node_share: the job's share of the node's time. log_bytes: size of
    its log at the end, None if unknown. oom_kills: processes of the job, or of others in its cgroup, that the kernel's
    OOM killer ended during the run.
    """

    token: str
    exit_code: int
    at: float
    seconds: float | None = None
    clock_steps: tuple[float, ...] = ()
    node_share: float = 1.0
    log_bytes: int | None = None
    oom_kills: int = 0

    @property
    def short_of_host_memory(self) -> str:
        """A sentence if the kernel's OOM killer ended the job, else ""."""
        if self.oom_kills < 1 or self.exit_code not in KILLED:
            return ""
        return "the kernel's OOM killer ended it, since its machine or its cgroup was short of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecords:
    """Records of one attempt. problem: what is wrong with any of them, or ""."""

    claim: ProcessRecord | None = None
    started: ProcessRecord | None = None
    ended: EndRecord | None = None
    problem: str = ""


def read_records(attempt: AttemptPaths, token: str) -> JobRecords:
    """Read the records of the attempt ``token``; "" accepts any, for earlier releases without tokens."""
    problems: list[str] = []
    claim = _verified(attempt.claim, _process, token, problems)
    started = _verified(attempt.started, _process, token, problems)
    ended = _verified(attempt.ended, _end, token, problems)
    return JobRecords(claim=claim, started=started, ended=ended, problem="; ".join(problems))


def read_pauses(attempt: AttemptPaths, token: str) -> dict[str, Any]:
    """The pauses that the runner of the attempt ``token`` recorded, as fields of JobStatus."""
    if not attempt.pauses.exists():
        return {}
    pauses = _verified(attempt.pauses, _pauses, token, []) or ()
    placed = tuple((begin, end) for begin, end, certain in pauses if certain)
    whole = sum(end - begin for begin, end, _ in pauses)
    return {"pauses": placed, "paused_seconds": whole if len(placed) < len(pauses) else 0.0}


def _pauses(content: Mapping[str, Any]) -> tuple[tuple[float, float, bool], ...] | None:
    rows = content.get("pauses")
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 3 for row in rows):
        return None
    pauses = [(_numbers(row[:2]), row[2] is True) for row in rows[:1000]]
    ordered = [(times[0], times[1], certain) for times, certain in pauses if len(times) == 2 and times[0] < times[1]]
    return tuple(sorted(ordered))


def foreign(name: str, token: str, expected: str) -> str:
    """Describe the mismatch of a file's ``token`` and the attempt's ``expected`` one; "" if they agree.

    An empty ``expected`` accepts every file.
    """
    if not expected or token == expected:
        return ""
    owner = f"of another attempt (token {token[:32]})" if token else "without a token"
    return f"{name} is {owner}, not of this one (token {expected})"


def _verified(
    path: Path, parse: Callable[[Mapping[str, Any]], Record | None], token: str, problems: list[str]
) -> Record | None:
    file: SmallFile = read_json(path)
    record = parse(file.content) if file.content is not None else None
    problem = file.problem
    if file.content is not None:
        problem = foreign(path.name, text_of(file.content, "token"), token)
        if record is None and not problem:
            problem = f"{path.name} is damaged: a field is missing or cannot be"
    if problem:
        problems.append(problem)
        return None
    return record


def _process(content: Mapping[str, Any]) -> ProcessRecord | None:
    pid, at = whole_of(content, "pid"), number_of(content, "at")
    if pid is None or not 0 <= pid < 2**31 or at is None:
        return None
    token, process = text_of(content, "token"), process_of(content)
    return ProcessRecord(token=token, process=process, at=at, steady=number_of(content, "steady"))


def _end(content: Mapping[str, Any]) -> EndRecord | None:
    code, at, seconds = whole_of(content, "exit_code"), number_of(content, "at"), number_of(content, "seconds")
    if code is None or not -1024 <= code <= 1024 or at is None:
        return None
    steps, share = content.get("clock_steps"), number_of(content, "node_share")
    return EndRecord(
        token=text_of(content, "token"),
        exit_code=code,
        at=at,
        seconds=seconds if seconds is not None and seconds >= 0 else None,
        clock_steps=tuple(_numbers(steps)) if isinstance(steps, list) else (),
        node_share=share if share is not None and 0 <= share <= 1 else 1.0,
        log_bytes=whole_of(content, "log_bytes"),
        oom_kills=max(0, whole_of(content, "oom_kills") or 0),
    )


def _numbers(values: list[Any]) -> list[float]:
    numbers = (number_of({"": value}, "") for value in values[:1000])
    return [number for number in numbers if number is not None]


def describe(pid: int, token: str, sweep: str = "") -> dict[str, Any]:
    """The record of process ``pid`` of this host, which runs the attempt ``token`` of ``sweep``, as JSON."""
    return {"token": token, "sweep": sweep, **asdict(Process.of(pid)), "at": time.time(), "steady": steady()}
