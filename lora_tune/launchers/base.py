"""The port between a job and the machine that runs it.

Three calls, and no memory: a launcher can be dropped and made again between any two of them,
because identity is the job's name and folder, written down before submission.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_tune.base.registry import LAUNCHERS
from lora_tune.config.study import Study
from lora_tune.config.tables import Site
from lora_tune.workloads.base import Job


class JobState(enum.StrEnum):
    """What the cluster says of a job. ``ENDED`` says nothing about success: the log decides."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    CANCELLED = "cancelled"
    TIME_LIMIT = "time limit"
    NODE_FAILED = "node failed"
    PREEMPTED = "preempted"
    HOST_MEMORY = "host memory"
    """It was killed for want of host memory: of the node's, or of what the job was given."""
    DISPLACED = "displaced"
    """It waited for a place in a job that ended before it took it: no machine has had it."""
    NOT_BEGUN = "not begun"
    """The nodes that it was to have never came up, such as those of a cloud without capacity: no machine has had it."""
    LOST = "lost"
    """The launcher has no trace of it: it never started, or vanished without an exit record."""

    @property
    def alive(self) -> bool:
        return self in (JobState.QUEUED, JobState.RUNNING)


class Waits(enum.StrEnum):
    """Why a queued job does not start, where it is not simply that others are before it."""

    NORMAL = ""
    HELD = "held"
    """Somebody holds it back; it starts when released."""
    DRAINED = "drained"
    """The nodes that it could run on are draining, down or reserved."""
    UNSATISFIABLE = "unsatisfiable"
    """Nothing that the cluster has, or allows, can ever run it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What is written down of a submitted job and suffices to find it again after a restart.

    submitted_at: epoch seconds at submission. job_id: the launcher's own id, "" while unknown. token: of the attempt
    that the job runs; files in its folder that carry another one say nothing of it. "" of an earlier release's attempt.
    """

    name: str
    folder: Path
    token: str = ""
    job_id: str = ""
    submitted_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One job as the cluster sees it now. Times are epoch seconds, None while unknown.

    step_failed: the job itself says 0, and ``exit_code`` is that of one of its steps: its script went on after it.
    reason: the cluster's own words. waits: what they mean for a queued job. by_cluster: of a cancelled job, that the
    cluster itself ended it, as far as can be known, and no person; ``reason`` says how that is known. seconds: how long
    it has run, or ran, by a clock that nobody sets, None where unknown. seconds_error: by how much that may be too
    short, in seconds. clock_steps: by how many seconds the wall clock of its machine was set or slewed meanwhile, one
    number a time. node_share: how much of its nodes' time since its start was this job's; less than 1 where trials
    share a job. share_seconds: of these nodes that it has had so far, where trials share a job and it is known.
    log_bytes: how long its log was when it ended, None where its runner did not say; one that did has also written at
    the log's head whose it is. paused: its processes stand still just now, as the cluster says: it is suspended.
    pauses: spans, epoch seconds in rising order, in which all of them did, as far as known. paused_seconds: how long
    they did in all, where that may be more, by the cluster's count or since some did while others computed. output:
    the end of what was printed in its place, of a trial whose shared job failed before it took any; else the trial's
    own log tells.
    """

    state: JobState
    job_id: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    step_failed: bool = False
    nodes: tuple[str, ...] = ()
    reason: str = ""
    waits: Waits = Waits.NORMAL
    by_cluster: bool = False
    seconds: float | None = None
    seconds_error: float = 0.0
    clock_steps: tuple[float, ...] = ()
    node_share: float = 1.0
    share_seconds: float | None = None
    log_bytes: int | None = None
    paused: bool = False
    pauses: tuple[tuple[float, float], ...] = ()
    paused_seconds: float = 0.0
    output: bytes = b""

    @property
    def standstill_seconds(self) -> float:
        """For how long it stood still, of which is known when."""
        return sum(end - begin for begin, end in self.pauses)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedJob:
    """A job that trials share. Times are epoch seconds; ``ended_at`` None while it runs.

    name: its own. first: name of the trial for which it was started. trials: names of all that it was ever asked for;
    told again, it begins with the same ones.
    """

    name: str
    first: str
    trials: Sequence[str]
    started_at: float
    ended_at: float | None


class Launcher(ABC):
    """Submits, polls and cancels jobs. Contract: ``tests/contracts/launcher.py``.

    The other answers are those of a launcher that knows only the jobs it is asked about, each one trial's own.
    """

    @abstractmethod
    def submit(self, job: Job) -> str:
        """Start the job and return its id. Its folder and files are on disk already.

        Submitting the same job (same name and folder) twice must not run it twice where the launcher can
        prevent it. Raises LauncherError when that failed and may not fail again, RefusedError when it will.
        """

    @abstractmethod
    def poll(self, tickets: Sequence[Ticket]) -> Mapping[str, JobStatus]:
        """The status of every ticket by job name, in one question to the cluster whatever their number.

        Also finds jobs whose id was never recorded, by name. Raises LauncherError when the cluster does not
        answer: that says nothing about the jobs.
        """

    @abstractmethod
    def cancel(self, ticket: Ticket, *, force: bool = False) -> None:
        """Ask the job to end (``force``: kill it). Returns at once; ``poll`` tells when it is gone."""

    def jobs_below(self, folder: Path) -> Sequence[Ticket]:
        """The jobs of this user, queued or running, whose output lies below ``folder``, whoever submitted them.

        One question to the cluster. Raises LauncherError when it does not answer.
        """
        return ()

    def widen(self, jobs: int) -> None:  # noqa: B027 - most launchers keep no room
        """From now on up to ``jobs`` are submitted at one time."""

    def shared_jobs(self) -> Sequence[SharedJob]:
        """The jobs that trials share and that have started, as ``poll`` last saw them; an ended one is listed once."""
        return ()

    def let_go(self) -> bool:
        """Let jobs end that only wait for further trials; whether any is alive.

        Raises LauncherError when the cluster does not answer.
        """
        return False


def command_line(job: Job, site: Site) -> list[str]:
    """The job's own command, for a launcher that adds nothing to it."""
    return list(job.argv)


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherKind:
    """What ``site.launcher`` names.

    Parameters
    ----------
    make : callable
        ``make(study, jobs)`` gives the launcher of at most ``jobs`` jobs at one time; raises SetupError when this
        machine cannot do it.
    preview : callable
        ``preview(job, site)`` gives the command line that starts a job, for people to read; nothing is started.
    period : float
        Seconds between two ticks of the driver.
    submit_grace_seconds : float
        How late a job may appear whose submission nobody answered.
    one_machine : bool
        Jobs run on this machine and on no other: its files are theirs, and there is no other node to try.
    slurm : bool
        Jobs go through Slurm's ``sbatch``, whose commands can be asked what they would do.
    keeps_time : bool
        The launcher is its own clock (``now``, ``monotonic_now``, ``sleep``), as a simulation is.
    """

    make: Callable[[Study, int], Launcher]
    preview: Callable[[Job, Site], list[str]] = command_line
    period: float = 1.0
    submit_grace_seconds: float = 10.0
    one_machine: bool = False
    slurm: bool = False
    keeps_time: bool = False


def launcher_kind(site: Site) -> LauncherKind:
    """The kind that the site names; a plain class or function counts as one that makes launchers.

    Raises InputError for a name that is not known.
    """
    loaded = LAUNCHERS.load(site.launcher)
    return loaded if isinstance(loaded, LauncherKind) else LauncherKind(make=loaded)
