"""Jobs on a Slurm cluster. submitit submits them; status, cancellation and success are determined here.

An existing batch script is submitted unchanged, as ``env -i ... sbatch FLAGS run.sub``: with the variables of an
enclosing job it would deadlock or silently start one task. Built-in recipes use submitit's usual way, with srun.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lora_tune.base.errors import LauncherError, LimitError, RefusedError, SetupError
from lora_tune.base.files import read_json, text_of, write_json
from lora_tune.base.host import hostnames
from lora_tune.base.paths import AttemptPaths
from lora_tune.base.sbatch_options import sbatch_options
from lora_tune.config.study import Study
from lora_tune.config.tables import Site
from lora_tune.launchers.base import JobState, JobStatus, Launcher, LauncherKind, Ticket
from lora_tune.launchers.files import file_in_memory, secret_values
from lora_tune.launchers.job_records import foreign, read_pauses, read_records
from lora_tune.launchers.job_runner import command_record, run_job_once
from lora_tune.launchers.slurm import parse
from lora_tune.launchers.slurm.client import ask, clean_environment, cluster_of
from lora_tune.launchers.slurm.parse import refusal
from lora_tune.launchers.slurm.submission import PendingSubmissions, as_submitted, executor, preview, submission_command
from lora_tune.workloads.base import Job
from lora_tune.workloads.walltime import minutes_of

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "srun")
"""Commands required on PATH. sacct is optional."""

_ELSEWHERE = (
    "run it on the cluster's login node, where python -m lora_tune.doctor says what else it needs; "
    "--study tiny runs on this machine"
)

_NULL = subprocess.DEVNULL


class SlurmLauncher(Launcher):
    """Submits to the cluster that SLURM_CONF or this machine's configuration names.

    Raises SetupError without Slurm.
    """

    def __init__(self, site: Site) -> None:
        absent = [command for command in COMMANDS if shutil.which(command) is None]
        if absent:
            raise SetupError(f"this study runs on Slurm, and {', '.join(absent)} are not on PATH; {_ELSEWHERE}")
        self._cluster = cluster_of(site)
        self._ask = functools.partial(ask, cluster=self._cluster)
        try:
            shown = self._ask("sinfo", "--all", "--noheader", "--format=%P")
            partitions = [line.strip(" *") for line in shown.splitlines()]
        except LauncherError as error:
            raise SetupError(f"this study runs on Slurm, and no cluster answers: {error}; {_ELSEWHERE}") from error
        if site.partition and not set(site.partition.split(",")) <= set(partitions):
            raise SetupError(
                f"site.partition: the cluster has no partition {site.partition}; it has {', '.join(partitions)}"
            )
        self._limit = functools.cache(self._ask)
        self._pending = PendingSubmissions()
        self._cancelling: list[subprocess.Popen[bytes]] = []
        self._cancelled: set[str] = set()
        self._renamed: dict[str, str] = {}
        self._site = _only_these_nodes(
            site, {row[0] for row in parse.node_rows(self._ask(*parse.NODES), site.partition)}
        )

    def submit(self, job: Job) -> str:
        """Submit the job and return Slurm's id; a job that an earlier call submitted is found instead."""
        if self._pending.has(job.name):
            return self._pending.answer(job.name, lambda: "")
        before = _token(Ticket(name=job.name, folder=job.folder, token=job.token))
        if before:
            known = self.poll([Ticket(name=job.name, folder=job.folder, token=job.token)])[job.name]
            if known.state is not JobState.LOST:
                return known.job_id
        token = job.token or before or uuid.uuid4().hex
        return self._pending.answer(job.name, functools.partial(self._submit, job, token))

    def _submit(self, job: Job, token: str) -> str:
        """Run sbatch for the job, for as long as it takes, and return the id."""
        attempt = AttemptPaths(job.folder)
        self._refuse_beyond_limits(job)
        # Before sbatch: after a crash between the two the job is found by its name and this token.
        write_json(attempt.slurm, {"token": token, "command": submission_command(job, self._site, token)})
        write_json(attempt.job, command_record(job, job.environment))
        try:
            with file_in_memory(secret_values(job)) as secrets:
                submitter = executor(job, self._site, token, secrets)
                submitted = submitter.submit(run_job_once, str(job.folder), job.token)
        except OSError as error:
            raise LauncherError(f"{job.name} was not submitted: {error}") from error
        except RuntimeError as error:  # sbatch's message, or a missing srun
            refused = refusal(job.name, _answer(error))
            if job.exclude_nodes and isinstance(refused, RefusedError) and refused.by_size:
                # Too few other nodes match the request; a suspect node is better than waiting for ever.
                return self._submit(replace(job, exclude_nodes=()), token)
            if isinstance(refused, RefusedError) and not refused.permanent and (jobs := self._jobs_in_queue()):
                raise LimitError(job.name, refused.answer, jobs) from error
            raise refused from error
        return str(submitted.job_id)

    def _refuse_beyond_limits(self, job: Job) -> None:
        """Raise RefusedError if the job's time limit would keep it pending for ever; each limit is queried once."""
        site, minutes, too_long, outlives = as_submitted(job, self._site), job.resources.minutes, "", ""
        with contextlib.suppress(LauncherError):  # the submission reports a controller that does not answer
            if minutes and site.reservation:
                shown = self._limit(*parse.reservation(site))
                outlives = parse.beyond_reservation(shown, minutes, time.time())
            if minutes and not site.qos:  # a QOS may allow more
                too_long = parse.beyond_limit(self._limit(*parse.LIMITS), site, minutes)
        if too_long:
            raise RefusedError(job.name, too_long, parse.REMEDY)
        if outlives:
            raise RefusedError(job.name, outlives, parse.RESERVATION_REMEDY)

    def poll(self, tickets: Sequence[Ticket]) -> Mapping[str, JobStatus]:
        """One squeue for all tickets; ``scontrol show job`` for each ended job, and one sacct for vanished ones.

        Queries by id, since sites and users may rename jobs. Tickets without an id, or not found by it, are looked up
        among all jobs of this user.
        """
        if not tickets:
            return {}
        row_of: dict[str, parse.JobRow | None] = {}
        for job_ids in dict.fromkeys((",".join(sorted({t.job_id for t in tickets if t.job_id})), "")):
            if absent := [ticket for ticket in tickets if row_of.get(ticket.name) is None]:
                rows = self._shown(job_ids)
                row_of |= {ticket.name: _row(rows, ticket) for ticket in absent}
        self._renamed |= {name: row.name for name, row in row_of.items() if row is not None}
        vanished = [ticket for ticket in tickets if row_of[ticket.name] is None]
        statuses = {t.name: self._of_row(row, t) for t in tickets if (row := row_of[t.name]) is not None}
        return statuses | self._from_accounting(vanished, str(os.getuid()))

    def jobs_below(self, folder: Path) -> Sequence[Ticket]:
        """Queued and running jobs of this user with standard output below ``folder``."""
        shown = self._ask("squeue", "--all", "--noheader", f"--user={os.getuid()}", f"--Format={parse.OUTPUT_FORMAT}")
        tickets = []
        for job_id, name, output in parse.output_rows(shown):
            if output.is_relative_to(folder):
                # The name at submission, by which the sweep knows the job.
                first = text_of(read_json(AttemptPaths(output.parent).job).content or {}, "name") or name
                self._renamed[first] = name
                tickets.append(Ticket(name=first, folder=output.parent, job_id=job_id))
        return tickets

    def _of_row(self, row: parse.JobRow, ticket: Ticket) -> JobStatus:
        status = parse.status(row, ticket.submitted_at)
        if row.restarts and status.state.alive:
            # Requeued from outside. The sweep makes a new attempt instead, with a separate log.
            self._scancel(row.job_id, ticket.name)
        if status.state is JobState.CANCELLED and ticket.name not in self._cancelled:
            accounted = self._accounted([ticket], str(os.getuid())) or {}
            return self._ended(row, ticket, accounted.get(ticket.name))
        return self._with_end_record(status, ticket)

    def cancel(self, ticket: Ticket, *, force: bool = False) -> None:
        """``scancel``; with ``force`` SIGKILL to the batch script and every step. The job's name must match."""
        job_id = ticket.job_id
        if not job_id or ticket.name not in self._renamed:
            job_id = self.poll([ticket])[ticket.name].job_id
        if job_id:
            self._scancel(job_id, ticket.name, *(("--signal=KILL", "--full") if force else ()))

    def _scancel(self, job_id: str, name: str, *options: str) -> None:
        """Start scancel for ``job_id`` without waiting, provided that its name is the one squeue last showed.

        A busy controller takes 1/6 s for each, and a sweep may stop dozens of trials in one tick. scancel's result is
        not needed: a job counts as gone only when poll no longer shows it.
        """
        self._cancelling = [process for process in self._cancelling if process.poll() is None]
        command = ["scancel", "--quiet", *options, f"--name={self._renamed.get(name, name)}", job_id]
        try:
            process = subprocess.Popen(
                command,
                env=clean_environment(self._cluster),
                stdin=_NULL,
                stdout=_NULL,
                stderr=_NULL,
                start_new_session=True,
            )
        except OSError as error:
            raise LauncherError(f"scancel cannot be started: {error.strerror}") from error
        self._cancelling.append(process)
        self._cancelled.add(name)

    def _jobs_in_queue(self) -> int:
        """Number of this user's jobs on the cluster, except the one that this process runs in."""
        try:
            shown = self._ask("squeue", "--all", "--noheader", f"--user={os.getuid()}", "--format=%A").split()
        except LauncherError:
            return 0
        return len({job_id for job_id in shown if job_id.isdigit()} - {os.environ.get("SLURM_JOB_ID")})

    def _shown(self, job_ids: str) -> list[parse.JobRow]:
        """This user's jobs as squeue shows them, including hidden partitions. job_ids: which ones, "" for all."""
        which = (f"--jobs={job_ids}",) if job_ids else ()
        columns = f"--Format={parse.SQUEUE_FORMAT}"
        try:
            shown = self._ask("squeue", "--all", "--noheader", "--states=all", f"--user={os.getuid()}", *which, columns)
        except LauncherError as error:
            if job_ids and "Invalid job id" in str(error):
                return []  # a query for one job that squeue no longer knows
            raise
        return parse.squeue_rows(shown)

    def _accounted(self, tickets: Sequence[Ticket], user: str) -> dict[str, parse.JobRow | None] | None:
        """The accounting's row of each job by name; None without accounting (slurmdbd)."""
        ids = ",".join(sorted({ticket.job_id for ticket in tickets}))
        names = ",".join(sorted({ticket.name for ticket in tickets}))
        which = f"--jobs={ids}" if all(ticket.job_id for ticket in tickets) else f"--name={names}"
        oldest = max(0, int(min(ticket.submitted_at for ticket in tickets)) - 3600)
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(oldest))  # sacct accepts local time only
        command = ("sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", f"--user={user}")
        try:
            shown = self._ask(*command, which, f"--starttime={since}", f"--format={parse.SACCT_FORMAT}")
        except LauncherError:
            return None
        rows = parse.sacct_rows(shown)
        return {ticket.name: _row(rows, ticket) for ticket in tickets}

    def _from_accounting(self, tickets: Sequence[Ticket], user: str) -> dict[str, JobStatus]:
        """Jobs that the controller no longer shows: their last state from sacct if available, else LOST."""
        if not tickets:
            return {}
        rows, why = self._accounted(tickets, user), "neither squeue nor sacct knows it"
        if rows is None:
            rows, why = {}, "squeue does not know it, and there is no accounting to ask"
        return {
            t.name: self._ended(row, t, row) if (row := rows.get(t.name)) else self._by_its_record(t, why)
            for t in tickets
        }

    def _by_its_record(self, ticket: Ticket, why: str) -> JobStatus:
        """Status of a job unknown to Slurm: from its end record, else LOST."""
        if ticket.token and (end := read_records(AttemptPaths(ticket.folder), ticket.token).ended) is not None:
            ended = JobStatus(
                state=JobState.ENDED, job_id=ticket.job_id, ended_at=end.at, reason=f"{why}; its record does"
            )
            return self._with_end_record(replace(ended, exit_code=end.exit_code), ticket)
        return JobStatus(state=JobState.LOST, reason=why)

    def _ended(self, row: parse.JobRow, ticket: Ticket, accounted: parse.JobRow | None) -> JobStatus:
        """The status of a row; for a cancelled job also whether Slurm itself ended it."""
        status = parse.status(row, ticket.submitted_at)
        if status.state is JobState.CANCELLED:
            slurmctld = parse.Controller()
            with contextlib.suppress(LauncherError):  # the other evidence still applies
                slurmctld = parse.controller(self._ask("scontrol", "show", "config"))
            by = parse.canceller(accounted.state) if accounted else None
            output = AttemptPaths(ticket.folder).log.exists()
            why = parse.by_cluster(row, slurmctld, by, user=os.getuid(), output=output)
            status = replace(status, by_cluster=bool(why), reason=why or status.reason)
        return self._with_end_record(status, ticket)

    def _with_end_record(self, status: JobStatus, ticket: Ticket) -> JobStatus:
        """Add what the runner recorded: pauses, and for an ended job its end.

        A job with exit code 0 may have failed: a batch script may ignore its training's exit code, and submitit's step
        always succeeds. The exit code is then the runner's, or that of the job's worst step.
        """
        if pauses := read_pauses(AttemptPaths(ticket.folder), ticket.token):
            longest = max(pauses["paused_seconds"], status.paused_seconds)
            status = replace(status, **{**pauses, "paused_seconds": longest})
        if status.state.alive:
            return status
        attempt = AttemptPaths(ticket.folder)
        if why := _limit_lowered(status, attempt):
            status = replace(status, state=JobState.PREEMPTED, reason=why)
        records = read_records(attempt, ticket.token)
        ended = records.ended
        if status.state in (JobState.NODE_FAILED, JobState.PREEMPTED) and not (
            attempt.log.exists() or records.claim or records.started or ended
        ):
            return _not_begun(status)
        if ended is not None:
            status = replace(
                status,
                seconds=ended.seconds or status.seconds,
                seconds_error=0.0 if ended.seconds else status.seconds_error,
                clock_steps=ended.clock_steps,
                log_bytes=ended.log_bytes,
            )
        if ended is not None and status.state is JobState.ENDED and (why := ended.short_of_host_memory):
            # Without memory confinement Slurm only reports FAILED, and COMPLETED for submitit's step.
            return replace(status, state=JobState.HOST_MEMORY, exit_code=ended.exit_code, reason=why)
        if status.state is not JobState.ENDED or status.exit_code != 0:
            return status
        if ended is not None:
            return replace(status, exit_code=ended.exit_code)
        try:
            detail = self._ask("scontrol", "--details", "--oneliner", "show", "job", status.job_id)
        except LauncherError:
            return status  # it left the controller's memory between the two queries
        code = parse.detail_exit_code(detail) or 0
        return replace(status, exit_code=code, step_failed=code != 0)


def _only_these_nodes(site: Site, every: set[str]) -> Site:
    """Replace a node list longer than a trial needs by the exclusion of all other nodes.

    sbatch's --nodelist would demand all listed nodes for each job.
    """
    allowed = set(hostnames(site.nodelist or ""))
    if len(allowed) <= site.nodes:
        return site
    others = sorted(every - allowed)
    return site.model_copy(
        update={"nodelist": None, "exclude": ",".join(filter(None, (site.exclude, *others))) or None}
    )


def _row(rows: Sequence[parse.JobRow], ticket: Ticket) -> parse.JobRow | None:
    """The row of a ticket's job."""
    return parse.find(rows, replace(ticket, token=_token(ticket)))


def _not_begun(status: JobStatus) -> JobStatus:
    """Status of a job that lost its nodes before slurmd created its log, the first thing it does: nothing ran."""
    nodes = ", ".join(status.nodes) or "its nodes"
    what = "did not come up" if status.state is JobState.NODE_FAILED else "were taken back"
    reason = f"{nodes} {what} before it began (Slurm: {status.reason})"
    return replace(
        status, state=JobState.NOT_BEGUN, reason=reason, nodes=(), started_at=None, exit_code=None, seconds=None
    )


def _limit_lowered(status: JobStatus, attempt: AttemptPaths) -> str:
    """A sentence if a time limit ended a job before the requested time, i.e. the limit was lowered; else ""."""
    if status.state is not JobState.TIME_LIMIT or status.seconds is None:
        return ""
    command = (read_json(attempt.slurm).content or {}).get("command")
    words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
    minutes = [minutes_of(option.value) for option in sbatch_options(words) if option.name == "time"][-1:]
    if not minutes or minutes[0] is None or status.seconds >= 60 * minutes[0] - parse.WHOLE_SECONDS:
        return ""
    return f"somebody lowered its limit, which ended it after {status.seconds:.0f} s of {minutes[0]:g} minutes"


@functools.lru_cache(maxsize=4096)
def _recorded_token(path: Path) -> str:
    """The token in ``slurm.json``. Raises LookupError if unreadable; errors are not cached, as the file may appear
    later."""
    record = read_json(path)
    if record.content is None:
        raise LookupError(record.problem)
    return text_of(record.content, "token")


def _token(ticket: Ticket) -> str:
    """The token by which Slurm knows the job of a ticket; "" if its attempt was not submitted from its folder."""
    path = AttemptPaths(ticket.folder).slurm
    try:
        token = _recorded_token(path)
    except LookupError as error:
        return ticket.token if str(error) else ""  # a damaged file implies that the job was submitted
    return "" if foreign(path.name, token, ticket.token) else token


def _answer(error: Exception) -> str:
    """sbatch's message from submitit's exception, on one line."""
    lines = [line.strip().removeprefix("sbatch: error: ") for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[-3:]) or type(error).__name__


def _on_the_cluster(study: Study, jobs: int) -> SlurmLauncher:
    return SlurmLauncher(study.site)


KIND = LauncherKind(make=_on_the_cluster, preview=preview, slurm=True)
"""``site.launcher = "slurm"``."""
