"""Interface between jobs and the machines that run them.

Launchers are stateless: one can be dropped and made again between any two calls, because a job is identified by its
name and folder, which are recorded before submission.
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
    """State of a job as the cluster reports it. ``ENDED`` does not imply success: the log decides."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    CANCELLED = "cancelled"
    TIME_LIMIT = "time limit"
    NODE_FAILED = "node failed"
    PREEMPTED = "preempted"
    HOST_MEMORY = "host memory"
    """Killed because the node's memory or the job's memory limit was exhausted."""
    DISPLACED = "displaced"
    """Its shared job ended before it took this trial; it never got a machine."""
    NOT_BEGUN = "not begun"
    """Its nodes never came up, e.g. cloud nodes without capacity; it never got a machine."""
    LOST = "lost"
    """Unknown to the launcher: it never started, or vanished without an exit record."""

    @property
    def alive(self) -> bool:
        return self in (JobState.QUEUED, JobState.RUNNING)


class Waits(enum.StrEnum):
    """Why a queued job does not start, if not just because of other jobs before it."""

    NORMAL = ""
    HELD = "held"
    """On hold; it starts when released."""
    DRAINED = "drained"
    """The nodes that it could run on are draining, down or reserved."""
    UNSATISFIABLE = "unsatisfiable"
    """No resources or limits of the cluster can ever satisfy it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Record of a submitted job, sufficient to find it again after a restart.

    submitted_at: epoch seconds. job_id: the launcher's id, "" while unknown. token: of the attempt that the job runs;
    files in its folder with another token are ignored. "" for an attempt of an earlier release.
    """

    name: str
    folder: Path
    token: str = ""
    job_id: str = ""
    submitted_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """Current state of one job. Times are epoch seconds, None while unknown.

    step_failed: the job exited with 0, and ``exit_code`` is that of a failed step which its script ignored. reason:
    explanation by the cluster or the launcher. waits: its meaning for a queued job. by_cluster: a cancelled job was
    ended by the cluster, as far as known, and not by a user; ``reason`` gives the evidence. seconds: run time so far by
    a monotonic clock, None if unknown. seconds_error: by how many seconds that may be too short. clock_steps: seconds
    of each adjustment (step or slew) of its machine's wall clock during the run. node_share: its share of its nodes'
    time since its start; below 1 if trials share a job. share_seconds: node seconds used so far, if trials share a job
    and they are known. log_bytes: size of its log at its end, None if its runner did not record it; a runner that does
    has also written the owner at the head of the log. paused: the cluster reports it as suspended now. pauses: spans,
    epoch seconds in ascending order, in which all its processes were stopped, as far as known. paused_seconds: total
    pause where that may be more than ``pauses``, by the cluster's count or because some processes were stopped while
    others computed. output: the end of the output of a shared job that failed before it took any trial; otherwise b"",
    and the trial's log has the output.
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
        """Total seconds of ``pauses``."""
        return sum(end - begin for begin, end in self.pauses)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedJob:
    """A job that trials share. Times are epoch seconds; ``ended_at`` is None while it runs.

    name: of the job. first: name of the trial for which it was started. trials: names of all trials ever assigned to
    it; later lists start with the same names.
    """

    name: str
    first: str
    trials: Sequence[str]
    started_at: float
    ended_at: float | None


class Launcher(ABC):
    """Submits, polls and cancels jobs. Contract: ``tests/contracts/launcher.py``.

    The default methods suit a launcher without shared jobs that finds jobs by their tickets only.
    """

    @abstractmethod
    def submit(self, job: Job) -> str:
        """Start the job and return its id. Its folder and files already exist.

        Submitting the same job (same name and folder) twice must not run it twice if the launcher can prevent it.
        Raises LauncherError if a retry may succeed, RefusedError if it will fail again.
        """

    @abstractmethod
    def poll(self, tickets: Sequence[Ticket]) -> Mapping[str, JobStatus]:
        """Return the status of every ticket by job name, with one query to the cluster for all of them.

        Finds jobs without a recorded id by name. Raises LauncherError if the cluster does not answer, which implies
        nothing about the jobs.
        """

    @abstractmethod
    def cancel(self, ticket: Ticket, *, force: bool = False) -> None:
        """Ask the job to end (``force``: kill it). Returns at once; ``poll`` shows when it is gone."""

    def jobs_below(self, folder: Path) -> Sequence[Ticket]:
        """Queued and running jobs of this user with output below ``folder``, submitted by any program.

        Sends one query to the cluster. Raises LauncherError if it does not answer.
        """
        return ()

    def widen(self, jobs: int) -> None:  # noqa: B027 - most launchers need no override
        """Allow up to ``jobs`` concurrent jobs from now on."""

    def shared_jobs(self) -> Sequence[SharedJob]:
        """Shared jobs that have started, as of the last ``poll``; an ended one is listed once."""
        return ()

    def let_go(self) -> bool:
        """Let jobs end that only wait for further trials; return whether any is alive.

        Raises LauncherError if the cluster does not answer.
        """
        return False


def command_line(job: Job, site: Site) -> list[str]:
    """The job's command, for a launcher that adds nothing to it."""
    return list(job.argv)


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherKind:
    """A launcher type, as ``site.launcher`` names it.

    Parameters
    ----------
    make : callable
        ``make(study, jobs)`` returns the launcher of at most ``jobs`` concurrent jobs; raises SetupError if this
        machine cannot run it.
    preview : callable
        ``preview(job, site)`` returns the command line that starts a job, for display; nothing is started.
    period : float
        Seconds between two ticks of the driver.
    submit_grace_seconds : float
        Seconds after which a job may still appear whose submission got no answer.
    one_machine : bool
        Jobs run on this machine only: its files are theirs, and there is no other node to try.
    slurm : bool
        Jobs go through Slurm's ``sbatch``, whose ``--test-only`` can check them.
    keeps_time : bool
        The launcher is its own clock (``now``, ``monotonic_now``, ``sleep``), as in a simulation.
    """

    make: Callable[[Study, int], Launcher]
    preview: Callable[[Job, Site], list[str]] = command_line
    period: float = 1.0
    submit_grace_seconds: float = 10.0
    one_machine: bool = False
    slurm: bool = False
    keeps_time: bool = False


def launcher_kind(site: Site) -> LauncherKind:
    """The launcher kind that the site names; a plain class or function is used as its ``make``.

    Raises InputError for an unknown name.
    """
    loaded = LAUNCHERS.load(site.launcher)
    return loaded if isinstance(loaded, LauncherKind) else LauncherKind(make=loaded)
