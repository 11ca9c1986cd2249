"""What Slurm's commands print, turned into job statuses: pure functions, one table of states.

All times are asked for as epoch seconds (``SLURM_TIME_FORMAT=%s``), so neither time zone nor locale counts.
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

# What sbatch says when it takes no job: which answers last, and what fixes them. Pure functions.
#
# The words are those of slurm_errno.c and of sbatch's own option parser, the same from Slurm 21.08 to 25.05.

_TEMPORARY = re.compile(
    r"(?i)unable to contact slurm|timed out|connect(?:ion)? (?:failure|refused|reset)|no route to host|"
    r"temporarily|zero bytes were transmitted|unexpected message|missing socket|message (?:send|receive) failure|"
    r"controller .{0,40}(?:busy|standby|backup|shutting)|"
    r"job violates accounting/QOS policy|"
    r"partition not available|reservation not usable now|required node not available|still in use|"
    r"unable to resolve|DNS SRV|protocol authentication error|munge"
)
"""What another try may find otherwise: a controller that is away or busy, a limit that running jobs have used up."""

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
"""Pattern of an answer that stays the same -> what fixes it."""

_PREFIX = re.compile(r"(?i)batch job submission failed: ")
_COUNTS = (
    r"(?:max|limit|too many|exceed|simultaneous|quota|cap\b|allowed|threshold|already|only|running|queued|pending|"
    r"bereits|höchstens|déjà|\b\d+\b)"
)
_JOBS = r"\b(?:jobs?|aufträge|travaux|tâches|trabajos)\b"
_OF_A_FILTER = re.compile(rf"(?i)unspecified error|{_COUNTS}.{{0,60}}{_JOBS}|{_JOBS}.{{0,60}}{_COUNTS}")
"""A site's own filter or wrapper refused it for jobs that are there: its words may speak of accounts and partitions."""

_LIMIT = re.compile(r"\b(?:QOS|Assoc)(?:Max|Min|Grp)(?!Submit|Jobs)(\w+)")
"""A limit of the QOS (its flag DenyOnLimit) that this job is beyond by itself, whatever else runs."""

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
    """What ``answer``, what sbatch said of ``job``, amounts to: RefusedError, or LauncherError where it may pass.

    An answer that is not known, of a site's own submission filter for example, is a refusal that may not last.
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


# How long partitions and reservations let a job run. Slurm takes a job that asks for more, unless it enforces that.
#
# Such a job waits for ever (``PartitionTimeLimit``, ``Reservation``), so it is said before. Pure functions.

LIMITS = ("sinfo", "--all", "--noheader", "--format=%P|%l")
"""Each partition with its limit; the default one carries a ``*``."""

REMEDY = "lower budget.trial_minutes, or take a partition that allows more (sinfo --format='%P %l')"

RESERVATION_REMEDY = "lower budget.trial_minutes, or take site.reservation out (scontrol show reservation)"


def beyond_limit(shown: str, site: Site, minutes: float) -> str:
    """That no partition of the site lets a job run for ``minutes``, a sentence; "" where one does.

    minutes: 0 where the job names no limit. shown: what ``LIMITS`` prints.
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
    """The question about the site's reservation."""
    return ("scontrol", "--oneliner", "show", "reservation", site.reservation or "")


def beyond_reservation(shown: str, minutes: float, now: float) -> str:
    """That each of the reservations ends before a job of ``minutes`` could, a sentence; "" where one does not.

    shown: what ``reservation`` prints, with times in epoch seconds. now: epoch seconds.
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


# Who ended a job that Slurm calls CANCELLED: a person with scancel, or Slurm itself. Pure functions.
#
# Slurm uses one state for both. Its daemons cancel jobs in the name of SlurmUser or of root: a slurmctld that was
# killed knows a running job as one that waits, starts it again, and a slurmd that refuses the second copy cancels both.
# It also gives the ids of forgotten jobs out again, and a node where the forgotten one still runs refuses its namesake
# at once.

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
    if row.nodes and not output and _lasted(row) <= WHOLE_SECONDS:
        return f"CANCELLED as soon as it was started, before its script began: {', '.join(row.nodes)} refused it"
    if slurmctld.booted_at is not None and row.submitted is not None and row.submitted < slurmctld.booted_at:
        when = time.strftime("%H:%M:%S", time.localtime(slurmctld.booted_at))
        return f"CANCELLED, and slurmctld was started anew at {when}, after the submission: it may have lost the job"
    return ""


def _lasted(row: JobRow) -> float:
    """From its start to its end; infinite where Slurm does not say."""
    return math.inf if row.started is None or row.ended is None else row.ended - row.started


WHOLE_SECONDS = 2.0
"""By how much a difference of two of Slurm's times may be off: it counts whole seconds, at both ends."""

_ANSWERED_SECONDS = 150.0
"""Between our intention to submit and Slurm's time of submission, at most: sbatch is ended after two minutes."""

_CLOCKS_SECONDS = 60.0
"""By how much the cluster's clock may be behind this machine's."""

STATES = {
    "PENDING": JobState.QUEUED,
    "CONFIGURING": JobState.QUEUED,
    "REQUEUED": JobState.QUEUED,
    "REQUEUE_FED": JobState.QUEUED,
    "REQUEUE_HOLD": JobState.QUEUED,
    "SPECIAL_EXIT": JobState.QUEUED,
    "RESV_DEL_HOLD": JobState.QUEUED,
    "RUNNING": JobState.RUNNING,
    # A completing job still holds its nodes: only what has left them counts as gone.
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
"""Slurm's job states (squeue(1), sacct(1), versions 21.08 to 25.05) -> ours."""

PAUSED = frozenset({"SUSPENDED", "STOPPED"})
"""States of a job that holds its nodes, or may get them back, and whose processes stand still."""

WAITS = {
    Waits.HELD: r"JobHeld(?:User|Admin)|launch failed requeued held|job requeued in held state",
    Waits.DRAINED: r"ReqNodeNotAvail|Nodes required for job are DOWN|PartitionDown|PartitionInactive|NodeDown",
    Waits.UNSATISFIABLE: r"BadConstraints|Partition(?:Node|Time|Config)Limit|PartitionConfig|Invalid(?:Account|QOS)|"
    r"AccountNotAllowed|QOSNotAllowed|ReservationDeleted|DependencyNeverSatisfied|DeadLine|"
    r"(?:Assoc|QOS)Max\w*Per(?:Job|Node)Limit|QOSMin\w+",
}
"""What a pending job waits for -> patterns of Slurm's reasons (squeue(1), JOB REASON CODES) at their beginning."""

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
"""``squeue --Format``: columns of fixed width, since names and reasons may hold any separator."""

_OUTPUT = {"JobID": 24, "Name": 160, "STDOUT": 4096}
OUTPUT_FORMAT = ",".join(f"{field}:{width}" for field, width in _OUTPUT.items())
"""``squeue --Format`` for where jobs write to."""

NODES = ("sinfo", "--all", "--noheader", "--Node", "--format=%N|%T|%G|%P")
"""Each node in each partition. sinfo takes no --partition beside --all."""

SACCT_FORMAT = "JobID,State,ExitCode,DerivedExitCode,Submit,Start,End,Suspended,NodeList,Comment,JobName"
"""``sacct --format`` with ``--parsable2``; the job's name comes last, as it alone may hold a ``|``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job as a Slurm command shows it. Times are epoch seconds, None where Slurm has none.

    suspended: for how many seconds it was, of one that has ended.
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
    """The rows of ``squeue --noheader --Format=SQUEUE_FORMAT``."""
    rows = []
    for line in text.split("\n"):
        values = _columns(line, _SQUEUE)
        if _count(values["JobID"]) is None:
            continue  # a banner of a site's wrapper; arrays are never ours
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
    """The rows that ``NODES`` asks for, of the partitions that sbatch is told; of all where it is told none."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 3]
    return [row for row in rows if not partition or row[3].strip(" *") in partition.split(",")]


def output_rows(text: str) -> list[tuple[str, str, Path]]:
    """Job id, name and output file of the rows of ``squeue --noheader --Format=OUTPUT_FORMAT``."""
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
    """The rows of ``sacct --noheader --parsable2 --format=SACCT_FORMAT``."""
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
    """The exit code in ``scontrol --details show job``: that of the worst step where the script hides it."""
    of_sbatch = re.search(r"\bExitCode=(\d+:\d+)", text)
    derived = re.search(r"\bDerivedExitCode=(\d+:\d+)", text)
    return _worse(of_sbatch[1] if of_sbatch else "", derived[1] if derived else "")


def status(row: JobRow, submitted_at: float) -> JobStatus:
    """A row in our own words. A state that Slurm may add one day counts as running: it is not known to be over.

    submitted_at: epoch seconds of our own submission, 0.0 when unknown.
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
    """What Slurm's reason for a pending job amounts to; in some outputs its words are joined by underscores."""
    text = reason.strip("() ").replace("_", " ")
    return next((kind for kind, pattern in WAITS.items() if re.match(pattern, text)), Waits.NORMAL)


def _requeued(row: JobRow, state: JobState, submitted_at: float) -> JobStatus:
    """A job that Slurm ran again although it was submitted with --no-requeue; its log would hold two runs.

    Its StartTime is that of the new run, or a guess, never the first run's: none is reported. SubmitTime becomes the
    time of the requeue only once the job is pending again; where it was cancelled before that, its end is the end.
    """
    reason = "requeued outside the sweep"
    if state.alive:
        return JobStatus(state=state, job_id=row.job_id, reason=reason)
    renewed = submitted_at > 0 and row.submitted is not None and row.submitted > submitted_at + 1
    ended = row.submitted if renewed else row.ended
    return JobStatus(state=JobState.PREEMPTED, job_id=row.job_id, ended_at=ended, reason=reason)


def find(rows: Iterable[JobRow], job: Ticket) -> JobRow | None:
    """The row of ``job``, whose token stands in its comment: the one with its id; the newest if there are several.

    Only where no row has its id is it looked for by what a site or a person can change: an answer of sbatch that never
    came left no id, and a wrapper's words may have been taken for one. What sbatch refused for its constraints stays in
    the controller's memory as a job that failed, and is none. Without a token nothing was submitted.
    """
    if not job.token:
        return None
    known = [r for r in rows if not (r.state == "FAILED" and not r.nodes and not r.restarts)]
    same_id = [r for r in known if r.job_id == job.job_id and _shares_only_id(r, job)]
    return max(same_id or [r for r in known if _is_without_id(r, job)], key=lambda r: r.submitted or 0.0, default=None)


def _shares_only_id(row: JobRow, job: Ticket) -> bool:
    """Whether the row with the id of ``job`` is the job: a controller that crashes gives ids out again.

    Nobody else's job writes to its log or has its token. Accounting may show neither: then the time of submission says
    it, unless another job's token stands there.
    """
    submitted = row.submitted or job.submitted_at
    if row.comment == job.token:
        return True
    if row.output:
        return _writes_to(row, job) and submitted >= job.submitted_at - _CLOCKS_SECONDS
    others = re.fullmatch(r"[0-9a-f]{32}", row.comment) is not None
    return not others and job.submitted_at > 0 and abs(submitted - job.submitted_at) <= _ANSWERED_SECONDS


def _is_without_id(row: JobRow, job: Ticket) -> bool:
    """Whether a row is a ``job`` whose id nobody knows: by its token, else by its log, else by its name."""
    submitted = row.submitted or job.submitted_at
    if row.comment == job.token:
        return row.name == job.name or _writes_to(row, job)
    if job.job_id:
        return False
    if _writes_to(row, job):
        return 0 < job.submitted_at <= submitted + WHOLE_SECONDS
    unmarked = not row.comment and not row.output  # where the cluster shows neither, a name and its time are all
    return unmarked and row.name == job.name and submitted >= job.submitted_at - _CLOCKS_SECONDS


def _writes_to(row: JobRow, job: Ticket) -> bool:
    log = AttemptPaths(job.folder).log
    return row.output in (str(log), str(log).replace("%", "%%"))  # Slurm expands a %


def _plain(text: str) -> str:
    """Slurm's words for nothing, as nothing."""
    return "" if text in NOTHING else text


def _count(text: str) -> int | None:
    """A whole number as Slurm prints one; None for anything else, such as other scripts' digits."""
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
    """squeue shows the raw status of wait(2): a code in the high byte, a signal in the low one (as 128 + signal)."""
    raw = _count(text)
    if raw is None:
        return None
    return 128 + (raw & 0x7F) if raw & 0x7F else raw >> 8


def _worse(*codes: str) -> int | None:
    """The first ``code:signal`` pair that is not 0:0, a signal as 128 + signal; None where none is given."""
    known = [tuple(int(x) for x in c.split(":")) for c in codes if re.fullmatch(r"[0-9]{1,18}:[0-9]{1,18}", c)]
    for code, signal in known:
        if code or signal:
            return 128 + signal if signal else code
    return 0 if known else None
