"""What runs inside a job of ours: claim the attempt, run its command once, write down how it ended.

The driver can die and come back at any moment, so identity and liveness are on disk, written by the job:
``claim.json`` (created exclusively: an attempt that is submitted twice still runs once), ``started.json``
(process id with its start time, so that a reused id is not mistaken for the job) and ``ended.json``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lora_tune.base.process import start_ticks
from lora_tune.launchers import descendants
from lora_tune.paths import AttemptPaths


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` so that a reader sees the whole file or none of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in ``path``, or None where the file is absent."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


def alive(record: dict[str, Any] | None) -> bool:
    """True when the process of a claim or started record still runs on this host."""
    return record is not None and start_ticks(record["pid"]) == record["start_ticks"]


def _identity(pid: int) -> dict[str, Any]:
    return {"pid": pid, "start_ticks": start_ticks(pid), "host": socket.gethostname(), "at": time.time()}


def _in_child(cgroup: Path | None) -> None:
    descendants.die_with_parent()
    if cgroup is not None:
        descendants.enter(cgroup)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGTERM})


def run_job(folder: str) -> int:
    """Run the command of the attempt in ``folder`` and return its exit code; -1 when another process has it.

    The command runs in a session of its own, with its output appended to the job's log, and dies with us. The job has
    ended when its last process has: whatever the command left running is ended first.
    """
    attempt = AttemptPaths(Path(folder))
    try:
        descriptor = os.open(attempt.claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return -1
    with os.fdopen(descriptor, "w", encoding="utf-8") as claim:
        json.dump(_identity(os.getpid()), claim)
    job = json.loads(attempt.job.read_text(encoding="utf-8"))
    code = 127
    try:
        with Path(job["log"]).open("ab") as log:
            code = _run(job, attempt, log.fileno())
    finally:
        write_json(attempt.ended, {"exit_code": code, "at": time.time()})
    return code


def _run(job: dict[str, Any], attempt: AttemptPaths, log: int) -> int:
    descendants.adopt_orphans()
    cgroup = descendants.make_cgroup(attempt)
    try:
        child = _start(job, attempt, log, cgroup)
        write_json(attempt.started, _identity(child.pid))
        # Slurm asks only a task's first process to end, and submitit's own handler would swallow it.
        signal.signal(signal.SIGTERM, lambda *_: _end_group(child.pid))
        child.returncode = descendants.wait_for(child.pid)
        return child.returncode
    except _NotStarted as error:
        os.write(log, f"{error}\n".encode())
        return 127
    finally:
        descendants.end_children(cgroup)


class _NotStarted(Exception):
    """There is no such command, or this user may not run it."""


def _start(job: dict[str, Any], attempt: AttemptPaths, log: int, cgroup: Path | None) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            job["argv"],
            cwd=job["cwd"],
            env={**os.environ, **job["environment"], descendants.MARK: str(attempt.folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(_in_child, cgroup),
        )
    except OSError as error:
        raise _NotStarted(f"{job['argv'][0]}: cannot be started: {error.strerror}") from error


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run_job(sys.argv[1]))
