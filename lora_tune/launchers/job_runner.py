"""Runs inside a job: claims the attempt, runs its command once and records its end.

The driver can die and restart at any time, so the job itself writes its identity and liveness to disk: ``claim.json``
(created exclusively, so an attempt submitted twice runs once), ``started.json`` (process id with its start time, which
distinguishes the job from a later process with the same id) and ``ended.json``. Each carries the attempt's token
(:mod:`lora_tune.launchers.job_records`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lora_tune.base.files import create_json, read_json, text_of, write_json
from lora_tune.base.host import send_signal, steady
from lora_tune.base.paths import AttemptPaths, log_head
from lora_tune.launchers import processes
from lora_tune.launchers.job_records import describe, foreign, read_records
from lora_tune.launchers.processes import descendants
from lora_tune.store.leases import RENEW_SECONDS
from lora_tune.workloads.base import Job

# Detection of wall clock adjustments during a job, because the job's time stamps come from that clock.

LOOK_SECONDS = 0.25
"""Interval between two checks of the clocks and of a job's processes."""

STEP_SECONDS = 0.1
FASTEST_SLEW = 0.1
"""Maximum slew in seconds per second (chrony's maximum is 1/12). A larger change between two checks is a step."""

DRIFT_SECONDS = 1.0
DRIFT_SHARE = 0.01
"""Drift over a whole job is recorded if it exceeds this many seconds and this share of the job's run time."""

STEADY_READING = 0.01
"""Clock readings more seconds apart than this do not count as simultaneous."""


class ClockWatch:
    """Records wall clock adjustments, in seconds, in ``steps``, in a thread between enter and exit.

    The last entry is the total drift apart from steps, if it is large.
    """

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="clock watch", daemon=True)
        self._began = self._last = _read()

    def __enter__(self) -> ClockWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()
        (began, ahead), (now, ahead_now) = self._began, self._last
        drift = ahead_now - ahead - sum(self.steps)
        if abs(drift) > max(DRIFT_SECONDS, DRIFT_SHARE * (now - began)):
            self.steps.append(round(drift, 3))

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        (before, ahead), self._last = self._last, _read()
        now, ahead_now = self._last
        if abs(ahead_now - ahead) >= STEP_SECONDS + FASTEST_SLEW * (now - before):
            self.steps.append(round(ahead_now - ahead, 3))


def _read() -> tuple[float, float]:
    """Seconds of the raw monotonic clock including suspend, and the wall clock's lead over it.

    A time service that slews the wall clock slews the monotonic clock with it, but not the raw one.
    """
    while True:
        before, wall = steady(), time.time()
        slewed = time.monotonic() - time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
        if (spent := steady() - before) < STEADY_READING:
            now = before + spent / 2 - slewed
            return now, wall - now


# Pauses of a job's processes: suspended by Slurm, stopped by a signal, or frozen with a cgroup.

LEAST_SECONDS = 0.5
"""Shorter pauses are not recorded; pauses less than one check interval longer may be missed."""

STOPPED_LOOK_SECONDS = 0.05
"""Check interval while processes are stopped; the error of a pause's end."""

SCAN_SHARE = 100.0
"""Scans of all processes take at most one part in this many of the time."""

BUSY_SHARE = 0.2
"""If other processes of the job used more than this share of a processor, training may have continued."""


class Pause(NamedTuple):
    """Epoch seconds by the wall clock between which a job was stopped; never longer than the real pause.

    certain: all processes were stopped; else some were stopped while others computed.
    """

    begin: float
    end: float
    certain: bool


class _StoppedProcesses(NamedTuple):
    """Stopped processes, the time span known so far, and the processor seconds of each other process."""

    pids: frozenset[int]
    begin: float
    end: float
    others: dict[int, float]


class PauseWatch:
    """Records pauses of the child process and its descendants between enter and exit.

    Slurm and the cgroup freezer stop this process too: a check then comes late although the thread did not wait for a
    processor. Other pauses show in process states. cgroup: of the child, or None. note: called with all pauses after
    each new one.
    """

    def __init__(self, child: int, cgroup: Path | None, note: Callable[[Sequence[Pause]], None]) -> None:
        self.pauses: list[Pause] = []
        self._child, self._note = child, note
        self._frozen = cgroup / "cgroup.events" if cgroup else None
        self._stopped: _StoppedProcesses | None = None
        self._scan_at = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pause watch", daemon=True)

    def __enter__(self) -> PauseWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look(over=True)

    def _watch(self) -> None:
        over = False
        while not over:
            before, waited = steady(), _waited()
            until = LOOK_SECONDS if self._stopped is None else STOPPED_LOOK_SECONDS
            over = self._ended.wait(until)
            # Only the wait is timed: a slow check, e.g. on a slow disk, is no pause.
            self._woke(steady() - before - until, _waited() - waited)
            self._look()

    def _woke(self, late: float, waited: float) -> None:
        """Record a pause if a check comes ``late`` by more seconds than it ``waited`` for a processor."""
        if late - waited >= LEAST_SECONDS:
            now = time.time()
            self._add(Pause(now - (late - waited), now, certain=True))
            self._stopped = None  # a stop seen before is part of this pause, or is detected again

    def _look(self, *, over: bool = False) -> None:
        stopped, now = self._stopped, time.time()
        if stopped is not None:
            if not over and any(map(_is_stopped, stopped.pids)):
                self._stopped = stopped._replace(end=now)
                return
            self._stopped = None
            if stopped.end - stopped.begin >= LEAST_SECONDS:
                self._add(Pause(stopped.begin, stopped.end, self._all_stood_still(stopped)))
        elif not over and (steady() >= self._scan_at or _is_stopped(self._child)):
            self._scan(now)

    def _scan(self, now: float) -> None:
        began = steady()
        living = _of_the_job()
        self._scan_at = steady() + SCAN_SHARE * (steady() - began)
        stopped = frozenset(pid for pid, (state, _) in living.items() if state == "T")
        if self._is_frozen():
            stopped = frozenset(living)
        if stopped:
            others = {pid: spent for pid, (_, spent) in living.items() if pid not in stopped}
            self._stopped = _StoppedProcesses(stopped, now, now, others)

    def _is_frozen(self) -> bool:
        with contextlib.suppress(OSError):
            return self._frozen is not None and b"frozen 1" in self._frozen.read_bytes()
        return False

    def _all_stood_still(self, stopped: _StoppedProcesses) -> bool:
        now = _of_the_job()
        spent = sum(now[pid][1] - before for pid, before in stopped.others.items() if pid in now)
        return spent <= BUSY_SHARE * (stopped.end - stopped.begin)

    def _add(self, pause: Pause) -> None:
        if self.pauses and pause.begin < self.pauses[-1].end:
            pause = pause._replace(begin=self.pauses[-1].end)
        if pause.end > pause.begin:
            self.pauses.append(pause)
            self._note(self.pauses)


def _of_the_job() -> dict[int, tuple[str, float]]:
    """State and processor seconds of all processes that this process has started or adopted."""
    living = descendants(os.getpid())
    living.pop(os.getpid(), None)
    return living


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return stat[stat.rindex(b")") + 2 :].startswith(b"T")
    return False


def _waited() -> float:
    """Seconds that this thread was runnable without a processor (proc(5), schedstat); 0 if not counted."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    return 0.0


NOT_CLAIMED = -1
"""Exit code of a runner that did not run the attempt: another process claimed it, or it is another attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Command of a job, as in ``command.json``."""

    token: str
    sweep: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: str | None
    log: Path


def command_record(job: Job, environment: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a job that ``run_job`` needs, as JSON."""
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
    """Read the command in ``path``; return a problem text if that fails."""
    file = read_json(path)
    if file.content is None:
        return file.problem or f"{path.name} is absent"
    argv, environment = file.content.get("argv"), file.content.get("environment")
    cwd, log = file.content.get("cwd"), text_of(file.content, "log")
    whole = (
        isinstance(argv, list) and argv and all(isinstance(argument, str) and "\0" not in argument for argument in argv)
    )
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
    """Whether this is a valid environment of a process."""
    if not isinstance(environment, dict):
        return False
    texts = [*environment, *environment.values()]
    named = all(name and "=" not in name for name in environment)
    return named and all(isinstance(text, str) and "\0" not in text for text in texts)


def run_job(folder: str, token: str = "") -> int:
    """Run the command of the attempt in ``folder`` and return its exit code; ``NOT_CLAIMED`` if it must not run.

    token: of the submitted attempt; the folder of another attempt is left unchanged. The command runs in a new session,
    appends its output to the job's log and is killed with this process. Processes that the command leaves running are
    ended before the job counts as ended.
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
    code, began, clock = os.EX_IOERR, steady(), ClockWatch()  # EX_IOERR if a full disk prevents the run
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
    """:func:`run_job` for a scheduler that counts every return as success, as submitit and Slurm do.

    A slurmctld that was killed may restart a job after it ended its first run, whose partial output is no result. So if
    the attempt has already begun, exit with an error and a message in the log, unless the first run ended successfully.
    """
    attempt = AttemptPaths(Path(folder))
    begun, code = attempt.claim.exists(), run_job(folder, token)
    if begun and code == NOT_CLAIMED:
        first = read_records(attempt, token).ended
        if first is None or first.exit_code != 0:
            sys.exit("lora-tune: its job was started a second time; the first run did not end by itself")
    return code


def _write_head(log: BinaryIO, command: Command) -> bool:
    """Write the log's owner at its head; False without a token or on a full disk, which does not end the job."""
    if not command.token:
        return False
    with contextlib.suppress(OSError):
        log.write(log_head(command.sweep, command.token))
        log.flush()
        return True
    return False


def _run(command: Command, attempt: AttemptPaths, log: int, clock: ClockWatch) -> int:
    others = processes.children()  # children of a calling process that are not the job's
    processes.adopt_orphans()
    cgroup = processes.make_cgroup(attempt)
    try:
        child = _start(command, attempt, log, cgroup)
        write_json(attempt.started, describe(child.pid, command.token, command.sweep))
        # Slurm sends SIGTERM only to a task's first process, and submitit's handler would ignore it.
        signal.signal(signal.SIGTERM, lambda *_: send_signal(child.pid, signal.SIGTERM, group=True))
        with (
            clock,
            _showing_life(attempt.claim),
            PauseWatch(child.pid, cgroup, functools.partial(_note_pauses, command, attempt)),
        ):
            child.returncode = processes.wait_for(child.pid)
        return child.returncode
    except _NotStarted as error:
        os.write(log, f"{error}\n".encode())
        return 127
    finally:
        processes.end_children(cgroup, others)


@contextlib.contextmanager
def _showing_life(claim: Path) -> Iterator[None]:
    """Touch the claim every few seconds: a driver on another host or in another PID namespace sees no other sign of
    life."""
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(claim)

    thread = threading.Thread(target=touch, name="life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _note_pauses(command: Command, attempt: AttemptPaths, pauses: Sequence[Pause]) -> None:
    """Record the job's pauses; on a full disk the job continues without them."""
    with contextlib.suppress(OSError):
        write_json(attempt.pauses, {"token": command.token, "sweep": command.sweep, "pauses": pauses})


class _NotStarted(Exception):
    """The command does not exist, or this user may not execute it."""


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
    # Signals from the terminal before this became a new session are pending behind the mask; ignoring drops them.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGTERM})
    for number, handler in before.items():
        signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(run_job(*sys.argv[1:3]))
