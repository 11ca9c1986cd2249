"""What Slurm's commands print, turned into job statuses: pure functions, one table of states.

All times are asked for as epoch seconds (``SLURM_TIME_FORMAT=%s``), so neither time zone nor locale counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_tune.base.host import NOTHING, hostnames
from lora_tune.launchers.base import JobState, JobStatus, Waits

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
    own = re.search(r"\bExitCode=(\d+:\d+)", text)
    derived = re.search(r"\bDerivedExitCode=(\d+:\d+)", text)
    return _worse(own[1] if own else "", derived[1] if derived else "")


def status(row: JobRow, submitted_at: float) -> JobStatus:
    """A row in our own words. A state that Slurm may add one day counts as running: it is not known to be over.

    submitted_at: epoch seconds of our own submission, 0.0 when unknown.
    """
    word = row.state.split(" ", 1)[0]
    state = STATES.get(word, JobState.RUNNING)
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
        reason=row.reason if word in row.reason else " ".join(filter(None, (word, row.reason))),
        waits=waits(row.reason) if queued else Waits.NORMAL,
        seconds=max(0.0, (row.ended or 0.0) - (row.started or 0.0)) if over else None,
        seconds_error=WHOLE_SECONDS,
        paused=word in PAUSED,
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


@dataclass(frozen=True, slots=True)
class Sought:
    """What is known of a job of ours: as in Ticket, and the file that it writes to. token: in its comment."""

    name: str
    token: str
    submitted_at: float
    job_id: str
    log: Path


def find(rows: Iterable[JobRow], job: Sought) -> JobRow | None:
    """The row of ``job``: the one with its id; the newest if there are several. Without a token none was submitted.

    Only where no row has its id is it looked for by what a site or a person can change: an answer of sbatch that never
    came left no id, and a wrapper's words may have been taken for one. What sbatch refused for its constraints stays in
    the controller's memory as a job that failed, and is none.
    """
    if not job.token:
        return None
    known = [r for r in rows if not (r.state == "FAILED" and not r.nodes and not r.restarts)]
    ours = [r for r in known if r.job_id == job.job_id and _has_not_its_id_alone(r, job)]
    return max(ours or [r for r in known if _is_without_id(r, job)], key=lambda r: r.submitted or 0.0, default=None)


def _has_not_its_id_alone(row: JobRow, job: Sought) -> bool:
    """Whether the row with the id of ``job`` is the job: a controller that crashes gives ids out again.

    Nobody else's job writes to its log or has its token. Accounting may show neither: then the time of submission says
    it, unless another job's token stands there.
    """
    submitted = row.submitted or job.submitted_at
    if row.comment == job.token:
        return True
    if row.output:
        return _writes_to(row, job.log) and submitted >= job.submitted_at - _CLOCKS_SECONDS
    others = re.fullmatch(r"[0-9a-f]{32}", row.comment) is not None
    return not others and job.submitted_at > 0 and abs(submitted - job.submitted_at) <= _ANSWERED_SECONDS


def _is_without_id(row: JobRow, job: Sought) -> bool:
    """Whether a row is a ``job`` whose id nobody knows: by its token, else by its log, else by its name."""
    submitted = row.submitted or job.submitted_at
    if row.comment == job.token:
        return row.name == job.name or _writes_to(row, job.log)
    if job.job_id:
        return False
    if _writes_to(row, job.log):
        return 0 < job.submitted_at <= submitted + WHOLE_SECONDS
    unmarked = not row.comment and not row.output  # where the cluster shows neither, a name and its time are all
    return unmarked and row.name == job.name and submitted >= job.submitted_at - _CLOCKS_SECONDS


def _writes_to(row: JobRow, log: Path) -> bool:
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
