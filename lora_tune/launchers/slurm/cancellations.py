"""Who ended a job that Slurm calls CANCELLED: a person with scancel, or Slurm itself. Pure functions.

Slurm uses one state for both. Its daemons cancel jobs in the name of SlurmUser or of root: a slurmctld that was killed
knows a running job as one that waits, starts it again, and a slurmd that refuses the second copy cancels both. It also
gives the ids of forgotten jobs out again, and a node where the forgotten one still runs refuses its namesake at once.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass

from lora_tune.launchers.slurm.parse import WHOLE_SECONDS, JobRow

_DAEMONS_REASONS = r"NodeDown|SystemFailure|JobLaunchFailure|InactiveLimit"
"""Reasons (squeue(1), JOB REASON CODES) with which Slurm ends a job that had started; scancel leaves it without one."""


@dataclass(frozen=True, slots=True)
class Controller:
    """What ``scontrol show config`` says of slurmctld.

    booted_at: epoch seconds of its start, None where it does not say. user: SlurmUser's id, None where unknown.
    """

    booted_at: float | None = None
    user: int | None = None


def controller(text: str) -> Controller:
    """The controller from ``scontrol show config`` with times as epoch seconds."""
    booted = re.search(r"^BOOT_TIME\s*=\s*([0-9]{1,18})\s*$", text, re.MULTILINE)
    user = re.search(r"^SlurmUser\s*=\s*.*\(([0-9]{1,18})\)\s*$", text, re.MULTILINE)
    return Controller(float(booted[1]) if booted else None, int(user[1]) if user else None)


def canceller(state: str) -> int | None:
    """The user's id in the accounting's ``CANCELLED by UID``; None where it names none."""
    match = re.match(r"CANCELLED by ([0-9]{1,18})\b", state)
    return int(match[1]) if match else None


def by_cluster(row: JobRow, slurmctld: Controller, by: int | None, *, user: int, output: bool) -> str:
    """Why a cancelled job counts as ended by Slurm itself; "" where a person may have ended it.

    A person is never taken for Slurm where the accounting names one. Where nobody says who it was, a slurmctld that was
    started after the submission explains it: at worst a person's scancel costs one more attempt, whose submission
    then comes after that start. The same holds for a job that ended in the seconds of its start without output.

    Parameters
    ----------
    row : Row
        The job, CANCELLED.
    slurmctld : Controller
        What the cluster's configuration says.
    by : int or None
        The id of the user in whose name it was cancelled, from the accounting; None where there is none.
    user : int
        The id of the user whose job it is.
    output : bool
        Whether the job has an output file, which its node makes before the script begins.

    Returns
    -------
    str
        For people to read.
    """
    if row.nodes and re.match(_DAEMONS_REASONS, row.reason):
        return f"CANCELLED {row.reason}: by Slurm itself"
    daemons = {0, slurmctld.user}
    if by is not None and by not in daemons:
        return ""
    if by is not None and user not in daemons:
        return f"CANCELLED by user id {by}: by Slurm itself, or by an administrator"
    if row.nodes and not output and _seconds(row) <= WHOLE_SECONDS:
        return f"CANCELLED as soon as it was started, before its script began: {', '.join(row.nodes)} refused it"
    if slurmctld.booted_at is not None and row.submitted is not None and row.submitted < slurmctld.booted_at:
        when = time.strftime("%H:%M:%S", time.localtime(slurmctld.booted_at))
        return f"CANCELLED, and slurmctld was started anew at {when}, after the submission: it may have lost the job"
    return ""


def _seconds(row: JobRow) -> float:
    """From its start to its end; infinite where Slurm does not say."""
    return math.inf if row.started is None or row.ended is None else row.ended - row.started
