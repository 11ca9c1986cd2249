"""Parsers of Slurm's output into job statuses: pure functions, one table of states.

All times are requested as epoch seconds (``SLURM_TIME_FORMAT=%s``), independent of time zone and locale.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_tune.base.errors import LauncherError, RefusedError
from lora_tune.base.host import NOTHING, hostnames
from lora_tune.base.paths import AttemptPaths
from lora_tune.config.tables import Site
from lora_tune.launchers.base import JobState, JobStatus, Ticket, Waits
from lora_tune.workloads.walltime import minutes_of

# sbatch's error messages: which are permanent, and their remedies. Pure functions.
#
# The texts are those of slurm_errno.c and of sbatch's option parser, unchanged from Slurm 21.08 to 25.05.

_TEMPORARY = re.compile(
    r"(?i)unable to contact slurm|timed out|connect(?:ion)? (?:failure|refused|reset)|no route to host|"
    r"temporarily|zero bytes were transmitted|unexpected message|missing socket|message (?:send|receive) failure|"
    r"controller .{0,40}(?:busy|standby|backup|shutting)|"
    r"job violates accounting/QOS policy|"
    r"partition not available|reservation not usable now|required node not available|still in use|"
    r"unable to resolve|DNS SRV|protocol authentication error|munge"
)
"""Errors that may pass: a controller that is away or busy, or a limit used up by running jobs."""

WITHOUT_GRES = 'gres = "none" in [site] where the cluster knows no GPUs and nodes are taken whole'

_PERMANENT = (
    (r"account", "correct site.account (sacctmgr show assoc user=$USER), or site.partition, which may not admit it"),
    (r"qos", "correct site.qos (sacctmgr show assoc user=$USER format=account,qos)"),
    (r"partition|group not permitted", "correct site.partition (sinfo --summarize)"),
    (r"reservation", "correct or remove site.reservation (scontrol show reservation)"),
    (r"generic resource|\bgres\b", f"correct site.gres (sinfo --format='%N %G'); {WITHOUT_GRES}"),
    (r"node name", "correct site.nodelist and site.exclude (sinfo --Node)"),
    (r"feature|constraint", "correct the --constraint in site.sbatch_args (sinfo --format='%N %f')"),
    (r"time limit", "lower budget.trial_minutes, or take a partition that allows more (sinfo --format='%P %l')"),
    (r"license", "correct the --licenses in site.sbatch_args (scontrol show licenses)"),
    (r"dependency", "correct the --dependency in site.sbatch_args"),
    (r"unable to open file", "the script is not in the folder that the study names: workload.implementation, or cwd"),
    (r"line breaks|batch script|NULL character|--wrap\b", "correct the script, on which sbatch says the same by hand"),
    (r"unrecognized option|invalid --|invalid option|ambiguous", "correct site.sbatch_args (sbatch --help)"),
    (r"access/permission denied|invalid user", "ask the administrator: this user may not submit"),
)
"""Pattern of a permanent error -> its remedy."""

_PREFIX = re.compile(r"(?i)batch job submission failed: ")
_COUNTS = (
    r"(?:max|limit|too many|exceed|simultaneous|quota|cap\b|allowed|threshold|already|only|running|queued|pending|"
    r"bereits|höchstens|déjà|\b\d+\b)"
)
_JOBS = r"\b(?:jobs?|aufträge|travaux|tâches|trabajos)\b"
_OF_A_FILTER = re.compile(rf"(?i)unspecified error|{_COUNTS}.{{0,60}}{_JOBS}|{_JOBS}.{{0,60}}{_COUNTS}")
"""A site's filter or wrapper refused the job because of existing jobs; its text may mention accounts and partitions."""

_LIMIT = re.compile(r"\b(?:QOS|Assoc)(?:Max|Min|Grp)(?!Submit|Jobs)(\w+)")
"""A limit of the QOS (flag DenyOnLimit) that this job exceeds by itself."""

_WALL_REMEDY = "lower budget.trial_minutes, or take a site.qos that allows more (sacctmgr show qos format=name,maxwall)"
_LIMIT_REMEDY = (
    "correct site.nodes and gpus_per_node, or budget.trial_minutes, or take a site.qos that allows more, or take the "
    "node count out of the space (sacctmgr show qos format=name,maxwall,maxtres,mintres)"
)

_SIZE = (
    r"(?i)node count|node configuration|more processors|memory specification|number of (?:tasks|cpus)|nodes? requested"
)
_SIZE_REMEDY = (
    "no partition has that many such nodes: correct site.nodes, gpus_per_node or gres, or take the node count out of "
    "the space (sinfo --format='%P %D %G')"
)


def refusal(job: str, answer: str) -> LauncherError:
    """Convert sbatch's ``answer`` for ``job`` to RefusedError, or to LauncherError if the error may pass.

    An unknown answer, e.g. of a site's submission filter, is a RefusedError that is not permanent.
    """
    if limit := _LIMIT.search(answer):
        wall = limit[1].startswith("Wall")
        return RefusedError(job, answer, _WALL_REMEDY if wall else _LIMIT_REMEDY, by_size=not wall)
    if _TEMPORARY.search(answer):
        return LauncherError(f"{job} was not submitted: {answer}")
    if re.search(_SIZE, answer):
        return RefusedError(job, answer, _SIZE_REMEDY, by_size=True)
    of_sbatch = "" if _OF_A_FILTER.search(_PREFIX.sub("", answer)) else answer
    for pattern, remedy in _PERMANENT:
        if re.search(f"(?i){pattern}", of_sbatch):
            return RefusedError(job, answer, remedy)
    return RefusedError(job, answer, "correct the study's [site], or ask the administrator", permanent=False)


# Time limits of partitions and reservations. Slurm accepts a job that exceeds them, unless it enforces them.
#
# Such a job is pending for ever (``PartitionTimeLimit``, ``Reservation``), so it is refused before. Pure functions.

LIMITS = ("sinfo", "--all", "--noheader", "--format=%P|%l")
"""Each partition with its limit; the default partition has a ``*``."""

REMEDY = "lower budget.trial_minutes, or take a partition that allows more (sinfo --format='%P %l')"

RESERVATION_REMEDY = "lower budget.trial_minutes, or take site.reservation out (scontrol show reservation)"


def beyond_limit(shown: str, site: Site, minutes: float) -> str:
    """A sentence if no partition of the site allows ``minutes``, else "".

    minutes: 0 if the job has no limit. shown: output of ``LIMITS``.
    """
    names = set((site.partition or "").split(",")) - {""}
    rows = [line.split("|") for line in shown.splitlines() if line.count("|") == 1]
    limits = {name: text for name, text in rows if (name.strip(" *") in names if names else "*" in name)}
    known = [minutes_of(text.strip()) for text in limits.values()]
    if not minutes or not known or any(limit is None or limit >= minutes for limit in known):
        return ""
    allowed = ", ".join(f"{name.strip(' *')}: {text.strip()}" for name, text in limits.items())
    return f"a trial asks for {minutes:g} minutes, and its partition allows less ({allowed})"


def reservation(site: Site) -> tuple[str, ...]:
    """The query for the site's reservation."""
    return ("scontrol", "--oneliner", "show", "reservation", site.reservation or "")


def beyond_reservation(shown: str, minutes: float, now: float) -> str:
    """A sentence if every reservation ends before a job of ``minutes`` could, else "".

    shown: output of ``reservation``, with times in epoch seconds. now: epoch seconds.
    """
    rows = [dict(pair.partition("=")[::2] for pair in line.split() if "=" in pair) for line in shown.splitlines()]
    left = []
    for row in rows:
        begin, end = row.get("StartTime", ""), row.get("EndTime", "")
        if not (begin.isdigit() and end.isdigit()) or "FLEX" in row.get("Flags", ""):
            return ""
        left.append((int(end) - max(now, int(begin))) / 60)
    if not minutes or not left or max(left) >= minutes:
        return ""
    name = rows[left.index(max(left))].get("ReservationName", "")
    return f"a trial asks for {minutes:g} minutes, and the reservation {name} ends in {max(0.0, max(left)):.0f}"


# Who ended a CANCELLED job: a user with scancel, or Slurm itself. Pure functions.
#
# Slurm uses one state for both. Its daemons cancel jobs as SlurmUser or root: after slurmctld was killed it knows a
# running job as pending and starts it again; slurmd refuses the second copy, and both are cancelled. It also reuses the
# ids of forgotten jobs, and a node where the forgotten job still runs refuses the new job of the same id at once.

_DAEMONS_REASONS = r"NodeDown|SystemFailure|JobLaunchFailure|InactiveLimit"
"""Reasons (squeue(1), JOB REASON CODES) with which Slurm ends a started job; scancel sets none."""


@dataclass(frozen=True, slots=True)
class Controller:
    """Fields of slurmctld from ``scontrol show config``.

    booted_at: epoch seconds of its start, or None. user: id of SlurmUser, or None.
    """

    booted_at: float | None = None
    user: int | None = None


def controller(text: str) -> Controller:
    """Parse ``scontrol show config`` with times as epoch seconds."""
    booted = re.search(r"^BOOT_TIME\s*=\s*([0-9]{1,18})\s*$", text, re.MULTILINE)
    user = re.search(r"^SlurmUser\s*=\s*.*\(([0-9]{1,18})\)\s*$", text, re.MULTILINE)
    return Controller(float(booted[1]) if booted else None, int(user[1]) if user else None)


def canceller(state: str) -> int | None:
    """The user id in the accounting's ``CANCELLED by UID``, or None."""
    match = re.match(r"CANCELLED by ([0-9]{1,18})\b", state)
    return int(match[1]) if match else None


def by_cluster(row: JobRow, slurmctld: Controller, by: int | None, *, user: int, output: bool) -> str:
    """Why a cancelled job counts as ended by Slurm itself; "" if a user may have ended it.

    If the accounting names an ordinary user, it was that user. If it names none, a slurmctld start after the submission
    explains the end: at worst a user's scancel costs one more attempt, whose submission is after that start. The same
    holds for a job that ended within seconds of its start without output.

    Parameters
    ----------
    row : JobRow
        The CANCELLED job.
    slurmctld : Controller
        From the cluster's configuration.
    by : int or None
        Id of the user who cancelled it, from the accounting.
    user : int
        Id of the job's user.
    output : bool
        Whether the job has an output file, which its node makes before the script begins.

    Returns
    -------
    str
        For display.
    """
    if row.nodes and re.match(_DAEMONS_REASONS, row.reason):
        return f"CANCELLED {row.reason}: by Slurm itself"
    daemons = {0, slurmctld.user}
    if by is not None and by not in daemons:
        return ""
    if by is not None and user not in daemons:
        return f"CANCELLED by user id {by}: by Slurm itself, or by an administrator"
    if row.nodes and not output and _lasted(row) <= WHOLE_SECONDS:
        return f"CANCELLED as soon as it was started, before its script began: {', '.join(row.nodes)} refused it"
    if slurmctld.booted_at is not None and row.submitted is not None and row.submitted < slurmctld.booted_at:
        when = time.strftime("%H:%M:%S", time.localtime(slurmctld.booted_at))
        return f"CANCELLED, and slurmctld was started anew at {when}, after the submission: it may have lost the job"
    return ""


def _lasted(row: JobRow) -> float:
    """Seconds from start to end; infinite if Slurm does not report them."""
    return math.inf if row.started is None or row.ended is None else row.ended - row.started


WHOLE_SECONDS = 2.0
"""Maximum error in seconds of a difference of two Slurm times, which are whole seconds."""

_ANSWERED_SECONDS = 150.0
"""Maximum seconds between recording a submission and Slurm's submit time; sbatch is killed after two minutes."""

_CLOCKS_SECONDS = 60.0
"""Maximum seconds by which the cluster's clock may be behind this machine's."""

STATES = {
    "PENDING": JobState.QUEUED,
    "CONFIGURING": JobState.QUEUED,
    "REQUEUED": JobState.QUEUED,
    "REQUEUE_FED": JobState.QUEUED,
    "REQUEUE_HOLD": JobState.QUEUED,
    "SPECIAL_EXIT": JobState.QUEUED,
    "RESV_DEL_HOLD": JobState.QUEUED,
    "RUNNING": JobState.RUNNING,
    # A completing job still holds its nodes; it is gone only when it has left them.
    "COMPLETING": JobState.RUNNING,
    "SUSPENDED": JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STAGE_OUT": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "COMPLETED": JobState.ENDED,
    "FAILED": JobState.ENDED,
    "CANCELLED": JobState.CANCELLED,
    "TIMEOUT": JobState.TIME_LIMIT,
    "DEADLINE": JobState.TIME_LIMIT,
    "NODE_FAIL": JobState.NODE_FAILED,
    "BOOT_FAIL": JobState.NODE_FAILED,
    "LAUNCH_FAILED": JobState.NODE_FAILED,
    "RECONFIG_FAIL": JobState.NODE_FAILED,
    "PREEMPTED": JobState.PREEMPTED,
    "OUT_OF_MEMORY": JobState.HOST_MEMORY,
    "REVOKED": JobState.LOST,
}
"""Slurm's job states (squeue(1), sacct(1), versions 21.08 to 25.05) -> JobState."""

PAUSED = frozenset({"SUSPENDED", "STOPPED"})
"""States of a job with stopped processes that holds its nodes, or may get them back."""

WAITS = {
    Waits.HELD: r"JobHeld(?:User|Admin)|launch failed requeued held|job requeued in held state",
    Waits.DRAINED: r"ReqNodeNotAvail|Nodes required for job are DOWN|PartitionDown|PartitionInactive|NodeDown",
    Waits.UNSATISFIABLE: r"BadConstraints|Partition(?:Node|Time|Config)Limit|PartitionConfig|Invalid(?:Account|QOS)|"
    r"AccountNotAllowed|QOSNotAllowed|ReservationDeleted|DependencyNeverSatisfied|DeadLine|"
    r"(?:Assoc|QOS)Max\w*Per(?:Job|Node)Limit|QOSMin\w+",
}
"""Waits -> patterns at the beginning of Slurm's reasons of pending jobs (squeue(1), JOB REASON CODES)."""

_SQUEUE = {
    "JobID": 24,
    "Name": 160,
    "State": 24,
    "RestartCnt": 12,
    "exit_code": 12,
    "SubmitTime": 24,
    "StartTime": 24,
    "EndTime": 24,
    "TimeUsed": 24,
    "NodeList": 4096,
    "Comment": 80,
    "STDOUT": 4096,
    "Reason": 400,
}
SQUEUE_FORMAT = ",".join(f"{field}:{width}" for field, width in _SQUEUE.items())
"""``squeue --Format``: columns of fixed width, since names and reasons may contain any separator."""

_OUTPUT = {"JobID": 24, "Name": 160, "STDOUT": 4096}
OUTPUT_FORMAT = ",".join(f"{field}:{width}" for field, width in _OUTPUT.items())
"""``squeue --Format`` for output files of jobs."""

NODES = ("sinfo", "--all", "--noheader", "--Node", "--format=%N|%T|%G|%P")
"""Lists each node in each partition. sinfo allows no --partition with --all."""

SACCT_FORMAT = "JobID,State,ExitCode,DerivedExitCode,Submit,Start,End,Suspended,NodeList,Comment,JobName"
"""``sacct --format`` with ``--parsable2``; the job's name is last, as only it may contain ``|``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job as a Slurm command shows it. Times are epoch seconds, None if Slurm has none.

    suspended: total seconds of suspension of an ended job.
    """

    job_id: str
    name: str
    state: str
    restarts: int = 0
    exit_code: int | None = None
    step_failed: bool = False
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    suspended: float = 0.0
    nodes: tuple[str, ...] = ()
    comment: str = ""
    output: str = ""
    reason: str = ""


def squeue_rows(text: str) -> list[JobRow]:
    """Parse ``squeue --noheader --Format=SQUEUE_FORMAT``."""
    rows = []
    for line in text.split("\n"):
        values = _columns(line, _SQUEUE)
        if _count(values["JobID"]) is None:
            continue  # a banner of a site's wrapper, or an array job, which this program never submits
        started, ended, used = _time(values["StartTime"]), _time(values["EndTime"]), _seconds(values["TimeUsed"])
        rows.append(
            JobRow(
                job_id=values["JobID"],
                name=values["Name"],
                state=values["State"],
                restarts=_count(values["RestartCnt"]) or 0,
                exit_code=_wait_status(values["exit_code"]),
                submitted=_time(values["SubmitTime"]),
                started=started,
                ended=ended,
                suspended=max(0.0, ended - started - used) if started and ended and used is not None else 0.0,
                nodes=tuple(hostnames(values["NodeList"])),
                comment=_plain(values["Comment"]),
                output=_plain(values["STDOUT"]),
                reason=_plain(values["Reason"]),
            )
        )
    return rows


def node_rows(text: str, partition: str | None) -> list[list[str]]:
    """The rows of ``NODES`` in the partitions of ``partition``; all rows if it is empty."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 3]
    return [row for row in rows if not partition or row[3].strip(" *") in partition.split(",")]


def output_rows(text: str) -> list[tuple[str, str, Path]]:
    """Job id, name and output file in ``squeue --noheader --Format=OUTPUT_FORMAT``."""
    rows = [_columns(line, _OUTPUT) for line in text.split("\n")]
    return [(row["JobID"], row["Name"], Path(row["STDOUT"])) for row in rows if _count(row["JobID"]) is not None]


def _columns(line: str, widths: Mapping[str, int]) -> dict[str, str]:
    """The values of one line by field."""
    values, start = {}, 0
    for field, width in widths.items():
        values[field] = line[start : start + width].strip()
        start += width
    return values


def sacct_rows(text: str) -> list[JobRow]:
    """Parse ``sacct --noheader --parsable2 --format=SACCT_FORMAT``."""
    rows = []
    for line in text.split("\n"):
        values = line.split("|", SACCT_FORMAT.count(","))
        if len(values) <= SACCT_FORMAT.count(","):
            continue
        job_id, state, exit_code, derived, submit, start, end, suspended, nodes, comment, name = values
        rows.append(
            JobRow(
                job_id=job_id,
                name=name,
                state=state,
                exit_code=_worse(exit_code, derived),
                step_failed=bool(_worse(derived) and not _worse(exit_code)),
                submitted=_time(submit),
                started=_time(start),
                ended=_time(end),
                suspended=_seconds(suspended) or 0.0,
                nodes=() if nodes == "None assigned" else tuple(hostnames(nodes)),
                comment=comment,
            )
        )
    return rows


def detail_exit_code(text: str) -> int | None:
    """The exit code in ``scontrol --details show job``, or the worst step's if the script hides it."""
    of_sbatch = re.search(r"\bExitCode=(\d+:\d+)", text)
    derived = re.search(r"\bDerivedExitCode=(\d+:\d+)", text)
    return _worse(of_sbatch[1] if of_sbatch else "", derived[1] if derived else "")


def status(row: JobRow, submitted_at: float) -> JobStatus:
    """Convert a row to a JobStatus. Unknown, newer Slurm states count as running, since the job may not have ended.

    submitted_at: epoch seconds of the submission by this machine's clock, 0.0 if unknown.
    """
    pair = row.state.split(" ", 1)[0]
    state = STATES.get(pair, JobState.RUNNING)
    if row.restarts:
        return _requeued(row, state, submitted_at)
    queued = state is JobState.QUEUED
    ran = bool(row.nodes) and not queued
    over = ran and not state.alive and row.started is not None and row.ended is not None
    return JobStatus(
        state=state,
        job_id=row.job_id,
        started_at=row.started if ran else None,
        ended_at=None if state.alive else row.ended,
        exit_code=None if state.alive else row.exit_code,
        step_failed=not state.alive and row.step_failed,
        nodes=row.nodes if ran else (),
        reason=row.reason if pair in row.reason else " ".join(filter(None, (pair, row.reason))),
        waits=waits(row.reason) if queued else Waits.NORMAL,
        seconds=max(0.0, (row.ended or 0.0) - (row.started or 0.0)) if over else None,
        seconds_error=WHOLE_SECONDS,
        paused=pair in PAUSED,
        paused_seconds=row.suspended if over and row.suspended > WHOLE_SECONDS else 0.0,
    )


def waits(reason: str) -> Waits:
    """Convert Slurm's reason of a pending job; some outputs join its words by underscores."""
    text = reason.strip("() ").replace("_", " ")
    return next((kind for kind, pattern in WAITS.items() if re.match(pattern, text)), Waits.NORMAL)


def _requeued(row: JobRow, state: JobState, submitted_at: float) -> JobStatus:
    """Status of a job that was requeued despite --no-requeue; its log would contain two runs.

    Its StartTime is that of the new run, or an estimate, so none is reported. SubmitTime becomes the time of the
    requeue only once the job is pending again; if it was cancelled before that, its end time is used.
    """
    reason = "requeued outside the sweep"
    if state.alive:
        return JobStatus(state=state, job_id=row.job_id, reason=reason)
    renewed = submitted_at > 0 and row.submitted is not None and row.submitted > submitted_at + 1
    ended = row.submitted if renewed else row.ended
    return JobStatus(state=JobState.PREEMPTED, job_id=row.job_id, ended_at=ended, reason=reason)


def find(rows: Iterable[JobRow], job: Ticket) -> JobRow | None:
    """The row of ``job``, whose comment is its token: the one with its id; the newest of several.

    Fields that a site or user can change are used only if no row has the id: an sbatch answer that never arrived leaves
    no id, and a wrapper's output may have been parsed as one. Jobs that sbatch refused for their constraints stay in
    the controller's memory as FAILED and are skipped. Without a token nothing was submitted.
    """
    if not job.token:
        return None
    known = [r for r in rows if not (r.state == "FAILED" and not r.nodes and not r.restarts)]
    same_id = [r for r in known if r.job_id == job.job_id and _shares_only_id(r, job)]
    return max(same_id or [r for r in known if _is_without_id(r, job)], key=lambda r: r.submitted or 0.0, default=None)


def _shares_only_id(row: JobRow, job: Ticket) -> bool:
    """Whether the row with the id of ``job`` is that job: a controller that crashed reuses ids.

    No other job writes to its log or has its token. Accounting may show neither; then the submit time decides, unless
    the comment is another job's token.
    """
    submitted = row.submitted or job.submitted_at
    if row.comment == job.token:
        return True
    if row.output:
        return _writes_to(row, job) and submitted >= job.submitted_at - _CLOCKS_SECONDS
    others = re.fullmatch(r"[0-9a-f]{32}", row.comment) is not None
    return not others and job.submitted_at > 0 and abs(submitted - job.submitted_at) <= _ANSWERED_SECONDS


def _is_without_id(row: JobRow, job: Ticket) -> bool:
    """Whether a row is ``job``, whose id is unknown: by its token, else its log, else its name."""
    submitted = row.submitted or job.submitted_at
    if row.comment == job.token:
        return row.name == job.name or _writes_to(row, job)
    if job.job_id:
        return False
    if _writes_to(row, job):
        return 0 < job.submitted_at <= submitted + WHOLE_SECONDS
    unmarked = not row.comment and not row.output  # if the cluster shows neither, name and time decide
    return unmarked and row.name == job.name and submitted >= job.submitted_at - _CLOCKS_SECONDS


def _writes_to(row: JobRow, job: Ticket) -> bool:
    log = AttemptPaths(job.folder).log
    return row.output in (str(log), str(log).replace("%", "%%"))  # Slurm expands %


def _plain(text: str) -> str:
    """Replace Slurm's placeholders for no value by ""."""
    return "" if text in NOTHING else text


def _count(text: str) -> int | None:
    """A whole number as Slurm prints it; None for anything else, such as non-ASCII digits."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _time(text: str) -> float | None:
    return float(_count(text) or 0) or None


def _seconds(text: str) -> float | None:
    """``[DAYS-][HOURS:]MINUTES:SECONDS`` in seconds; None for anything else."""
    match = re.fullmatch(r"(?:([0-9]{1,6})-)?(?:([0-9]{1,9}):)?([0-9]{1,9}):([0-9]{1,2})(?:\.[0-9]+)?", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _wait_status(text: str) -> int | None:
    """Exit code from squeue's raw status of wait(2): code in the high byte, or 128 + signal from the low byte."""
    raw = _count(text)
    if raw is None:
        return None
    return 128 + (raw & 0x7F) if raw & 0x7F else raw >> 8


def _worse(*codes: str) -> int | None:
    """The first ``code:signal`` pair other than 0:0, a signal as 128 + signal; None without valid pairs."""
    known = [tuple(int(x) for x in c.split(":")) for c in codes if re.fullmatch(r"[0-9]{1,18}:[0-9]{1,18}", c)]
    for code, signal in known:
        if code or signal:
            return 128 + signal if signal else code
    return 0 if known else None
