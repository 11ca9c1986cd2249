"""What runs inside a job of ours: claim the attempt, run its command once, write down how it ended.

The driver can die and come back at any moment, so identity and liveness are on disk, written by the job:
``claim.json`` (created exclusively: an attempt that is submitted twice still runs once), ``started.json``
(process id with its start time, so that a reused id is not mistaken for the job) and ``ended.json``. Each carries
the attempt's token (:mod:`lora_tune.launchers.job_records`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lora_tune.base.files import create_json, read_json, text_of, write_json
from lora_tune.base.host import send_signal, steady
from lora_tune.base.paths import AttemptPaths, log_head
from lora_tune.launchers import processes
from lora_tune.launchers.clock_watch import ClockWatch
from lora_tune.launchers.job_records import describe, foreign, read_records
from lora_tune.launchers.pause_watch import Pause, PauseWatch
from lora_tune.workloads.base import Job

NOT_CLAIMED = -1
"""The exit code of a runner that left the attempt alone: another process has it, or it is another attempt's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a job runs: ``command.json``."""

    token: str
    sweep: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: str | None
    log: Path


def command_record(job: Job, environment: Mapping[str, str]) -> dict[str, Any]:
    """What ``run_job`` needs of a job, as JSON."""
    return {
        "name": job.name,
        "token": job.token,
        "sweep": job.sweep,
        "argv": list(job.argv),
        "environment": dict(environment),
        "cwd": str(job.cwd) if job.cwd else None,
        "log": str(job.log),
    }


def read_command(path: Path) -> Command | str:
    """The command in ``path``, or why it cannot be read."""
    file = read_json(path)
    if file.content is None:
        return file.problem or f"{path.name} is absent"
    argv, environment = file.content.get("argv"), file.content.get("environment")
    cwd, log = file.content.get("cwd"), text_of(file.content, "log")
    whole = isinstance(argv, list) and argv and all(isinstance(word, str) and "\0" not in word for word in argv)
    if not whole or not _is_environment(environment) or not isinstance(cwd, str | None) or not log or "\0" in log:
        return f"{path.name} is damaged: a field is missing or cannot be"
    assert isinstance(argv, list)
    assert isinstance(environment, dict)
    return Command(
        token=text_of(file.content, "token"),
        sweep=text_of(file.content, "sweep"),
        argv=tuple(argv),
        environment=environment,
        cwd=cwd,
        log=Path(log),
    )


def _is_environment(environment: object) -> bool:
    """Whether a process can be given this environment."""
    if not isinstance(environment, dict):
        return False
    texts = [*environment, *environment.values()]
    named = all(name and "=" not in name for name in environment)
    return named and all(isinstance(text, str) and "\0" not in text for text in texts)


def run_job(folder: str, token: str = "") -> int:
    """Run the command of the attempt in ``folder`` and return its exit code; ``NOT_CLAIMED`` where it must not.

    token: of the attempt that was submitted; a folder of another one is left as it is. The command runs in a session
    of its own, with its output appended to the job's log, and dies with us. The job has ended when its last process
    has: whatever the command left running is ended first.
    """
    attempt = AttemptPaths(Path(folder))
    command = read_command(attempt.job)
    if isinstance(command, str) or foreign(attempt.job.name, command.token, token):
        print(command if isinstance(command, str) else foreign(attempt.job.name, command.token, token), file=sys.stderr)
        return NOT_CLAIMED
    try:
        create_json(attempt.claim, describe(os.getpid(), command.token, command.sweep))
    except FileExistsError:
        return NOT_CLAIMED
    code, began, clock = os.EX_IOERR, steady(), ClockWatch()  # where a full disk keeps us from running it
    spent: dict[str, Any] = {}
    killed_before = processes.oom_kills()
    try:
        with command.log.open("ab") as log:
            headed = _write_head(log, command)
            code = _run(command, attempt, log.fileno(), clock)
            spent |= {"log_bytes": os.fstat(log.fileno()).st_size} if headed else {}
    finally:
        spent |= {"seconds": round(steady() - began, 3), "clock_steps": clock.steps}
        spent |= {"oom_kills": processes.oom_kills() - killed_before}
        write_json(
            attempt.ended,
            {"token": command.token, "sweep": command.sweep, "exit_code": code, "at": time.time(), **spent},
        )
    return code


def run_job_once(folder: str, token: str = "") -> int:
    """:func:`run_job` for a scheduler that takes whatever returns for a success, as submitit and Slurm do.

    A controller that was killed starts a job anew whose first run it has ended: what that left behind is no result. So
    a runner that finds its attempt begun says so in the log, and fails; not where the first run has ended well, of
    which the controller had not heard yet.
    """
    attempt = AttemptPaths(Path(folder))
    begun, code = attempt.claim.exists(), run_job(folder, token)
    if begun and code == NOT_CLAIMED:
        first = read_records(attempt, token).ended
        if first is None or first.exit_code != 0:
            sys.exit("lora-tune: its job was started a second time; the first run did not end by itself")
    return code


def _write_head(log: BinaryIO, command: Command) -> bool:
    """Say at the head of the log whose it is; False without a token, and where the disk is full, which ends no job."""
    if not command.token:
        return False
    with contextlib.suppress(OSError):
        log.write(log_head(command.sweep, command.token))
        log.flush()
        return True
    return False


def _run(command: Command, attempt: AttemptPaths, log: int, clock: ClockWatch) -> int:
    others = processes.children()  # of whoever calls this in a process with children of its own
    processes.adopt_orphans()
    cgroup = processes.make_cgroup(attempt)
    try:
        child = _start(command, attempt, log, cgroup)
        write_json(attempt.started, describe(child.pid, command.token, command.sweep))
        # Slurm asks only a task's first process to end, and submitit's own handler would swallow it.
        signal.signal(signal.SIGTERM, lambda *_: send_signal(child.pid, signal.SIGTERM, group=True))
        with clock, PauseWatch(child.pid, cgroup, functools.partial(_note_pauses, command, attempt)):
            child.returncode = processes.wait_for(child.pid)
        return child.returncode
    except _NotStarted as error:
        os.write(log, f"{error}\n".encode())
        return 127
    finally:
        processes.end_children(cgroup, others)


def _note_pauses(command: Command, attempt: AttemptPaths, pauses: Sequence[Pause]) -> None:
    """Write down when the job stood still; where the disk is full the job goes on without."""
    with contextlib.suppress(OSError):
        write_json(attempt.pauses, {"token": command.token, "sweep": command.sweep, "pauses": pauses})


class _NotStarted(Exception):
    """There is no such command, or this user may not run it."""


def _start(command: Command, attempt: AttemptPaths, log: int, cgroup: Path | None) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command.argv,
            cwd=command.cwd,
            env={**os.environ, **command.environment, processes.MARK: str(attempt.folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(_in_child, cgroup),
        )
    except OSError as error:
        raise _NotStarted(f"{command.argv[0]}: cannot be started: {error.strerror}") from error


def _in_child(cgroup: Path | None) -> None:
    processes.die_with_parent()
    if cgroup is not None:
        processes.enter(cgroup)
    # What a terminal sent before this was a session of its own waits behind the mask; ignoring it drops it.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGTERM})
    for number, handler in before.items():
        signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(run_job(*sys.argv[1:3]))
