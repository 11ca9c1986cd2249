"""Jobs on a Slurm cluster, submitted through submitit; liveness, cancellation and success never are.

An existing batch script is submitted unchanged, as ``env -i ... sbatch FLAGS run.sub``: run from inside another
job it would deadlock or silently start one task. Our own recipes go submitit's ordinary way, with srun.
"""

from __future__ import annotations

import functools
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_tune.errors import LauncherError, SurroundingsError
from lora_tune.launchers import slurm_text
from lora_tune.launchers.base import JobState, JobStatus, Ticket
from lora_tune.launchers.command import read_json, run_job, write_json
from lora_tune.launchers.local import command_record
from lora_tune.paths import AttemptPaths
from lora_tune.site import Site
from lora_tune.workloads.base import Job

ANSWER_SECONDS = 30.0
"""How long a Slurm command may take; with the controller away the client itself gives up after about 9 s."""

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "srun")
"""What must be on PATH. sacct is used where it works and not missed where it does not."""

INHERITED = (
    *("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "XDG_RUNTIME_DIR"),
    *("LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "MODULEPATH", "ENROOT_CONFIG_PATH"),
    *("http_proxy", "https_proxy", "no_proxy", "SLURM_CONF"),
)
"""What a job takes from the submitting shell. Everything else stays out: a config sourced there would leak into
every trial, and SLURM_* or SBATCH_* of an enclosing job would change the submission."""


_COLUMNS = f"--Format={slurm_text.SQUEUE_FORMAT}"


class SlurmLauncher:
    """Submits to the cluster that SLURM_CONF, or this machine's configuration, names.

    Raises SurroundingsError where there is no Slurm.
    """

    def __init__(self, site: Site) -> None:
        absent = [command for command in COMMANDS if shutil.which(command) is None]
        if absent:
            raise SurroundingsError(
                f"this study runs on Slurm, and {', '.join(absent)} are not on PATH; run it on the cluster's login "
                "node (python -m lora_tune.doctor says what else it needs); --study tiny runs on this machine"
            )
        self._site = site

    def submit(self, job: Job) -> str:
        """Submit the job and return Slurm's id. A job that an earlier call did submit is found, not repeated."""
        attempt = AttemptPaths(job.folder)
        record = read_json(attempt.slurm)
        if record is not None:
            known = self.poll([Ticket(name=job.name, folder=job.folder)])[job.name]
            if known.state is not JobState.LOST:
                return known.job_id
        token = record["token"] if record else uuid.uuid4().hex
        # Before sbatch: after a crash between the two the job is found again by its name and this token.
        write_json(attempt.slurm, {"token": token, "command": submission_command(job, self._site, token)})
        write_json(attempt.job, command_record(job, job.environment))
        try:
            submitted = _executor(job, self._site, token).submit(run_job, str(job.folder))
        except (OSError, RuntimeError) as error:  # what sbatch says, or that srun is not installed
            raise LauncherError(f"{job.name} was not submitted: {_refusal(error)}") from error
        return str(submitted.job_id)

    def poll(self, tickets: Sequence[Ticket]) -> Mapping[str, JobStatus]:
        """One squeue for all; for jobs that ended one ``scontrol show job`` each, for vanished ones one sacct."""
        if not tickets:
            return {}
        names = ",".join(sorted({ticket.name for ticket in tickets}))
        user = str(os.getuid())
        shown = _ask("squeue", "--noheader", "--states=all", f"--user={user}", f"--name={names}", _COLUMNS)
        rows = slurm_text.squeue_rows(shown)
        found = {t.name: slurm_text.find(rows, t.name, _token(t.folder), t.submitted_at) for t in tickets}
        vanished = [ticket for ticket in tickets if found[ticket.name] is None]
        statuses = {t.name: self._of_row(row, t) for t in tickets if (row := found[t.name]) is not None}
        return statuses | _from_accounting(vanished, user)

    def _of_row(self, row: slurm_text.Row, ticket: Ticket) -> JobStatus:
        status = slurm_text.status(row)
        if row.restarts and status.state.alive:
            # Somebody requeued it. The sweep makes a new attempt instead, with a log of its own.
            _cancel(row.job_id, row.name)
        return _with_exit_code(status, ticket.folder)

    def cancel(self, ticket: Ticket, *, force: bool = False) -> None:
        """``scancel``; with ``force`` SIGKILL to the batch script and every step. Checked against the job's name."""
        job_id = ticket.job_id or self.poll([ticket])[ticket.name].job_id
        if job_id:
            _cancel(job_id, ticket.name, *(("--signal=KILL", "--full") if force else ()))


def submission_command(job: Job, site: Site, token: str = "TOKEN") -> list[str]:
    """The command that submits ``job``: environment, sbatch, its options, and the script (own recipes: ``FILE``)."""
    from submitit.slurm.slurm import _make_sbatch_string

    text = _make_sbatch_string(command="", folder=job.folder, **_parameters(job, site, token))
    return _command(job, site, _options(text, job), job.argv if job.script else ("FILE",))


def _parameters(job: Job, site: Site, token: str) -> dict[str, Any]:
    """What the job needs, in submitit's terms; what submitit has no word for goes through unchanged."""
    need = job.resources
    whole_nodes = need.gpus_per_node > 0 and need.gpus_per_node >= site.gpus_per_node
    own_gres = f"gpu:{need.gpus_per_node}" if need.gpus_per_node and not job.script else None
    parameters: dict[str, Any] = {
        "job_name": job.name,
        "comment": token,
        "nodes": need.nodes,
        "time": max(1, math.ceil(need.minutes)),
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "nodelist": site.nodelist,
        "exclude": ",".join(filter(None, (site.exclude, *job.exclude_nodes))) or None,
        # --exclusive alone gives a batch script its GPUs, but not submitit's step.
        "gres": site.gres or own_gres,
        # Two trials on one node would share ports, caches and container names.
        "exclusive": whole_nodes or None,
        "mem": "0" if whole_nodes else None,
    }
    further = {
        "reservation": site.reservation,
        "chdir": str(job.cwd or job.folder),
        "output": _literal(job.log),
        "open-mode": "append",
        # A requeued job would run twice into one log; a new attempt is the sweep's own decision.
        "no-requeue": True,
    }
    given = {key: value for key, value in parameters.items() if value is not None}
    return given | {"additional_parameters": {key: value for key, value in further.items() if value is not None}}


def _own_steps(job: Job, site: Site) -> dict[str, Any]:
    """How submitit starts our own recipes: one task that runs the recipe, in the site's container if it has one."""
    steps = [f"--output={_literal(job.log)}", "--open-mode=append", "--kill-on-bad-exit=1"]
    if site.container:
        mounts = ",".join((f"{job.folder}:{job.folder}", *site.container_mounts))
        steps += [f"--container-image={site.container}", f"--container-mounts={mounts}"]
    # A batch shell that dies of SIGTERM takes srun along, and the step then looks for it for seconds.
    return {"ntasks_per_node": 1, "srun_args": steps, "stderr_to_stdout": True, "setup": ["trap : TERM"]}


def _options(text: str, job: Job) -> list[str]:
    """The options in submitit's batch file, less those that would harm.

    ``--signal`` ends a training up to 150 s before its limit; ``--error`` would split the log; ``--wckey`` is refused
    by some clusters; ``--time`` where the job has no limit is submitit's own five minutes.
    """
    unwanted = ("--signal=", "--error=", "--wckey=", *(() if job.resources.minutes else ("--time=",)))
    options = [shlex.split(line)[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    return [option for option in options if not option.startswith(unwanted)]


def _command(job: Job, site: Site, options: Sequence[str], script: Sequence[str]) -> list[str]:
    """``env -i`` with exactly the job's environment, and sbatch. srun's own variables carry the site to every step."""
    inherited = {k: os.environ[k] for k in INHERITED if k in os.environ}
    steps = {"SLURM_GRES": site.gres, "SLURM_MPI_TYPE": site.mpi, "SLURM_CPU_BIND": site.cpu_bind}
    variables = inherited | {k: v for k, v in steps.items() if v} | dict(job.environment)
    pairs = [f"{key}={value}" for key, value in variables.items()]
    return ["env", "-i", *pairs, "sbatch", *options, *site.sbatch_args, *script]


def _executor(job: Job, site: Site, token: str) -> Any:
    """submitit's executor for this one job."""
    from submitit import SlurmExecutor  # 0.3 s to import, and only submitting needs it

    class Executor(SlurmExecutor):  # type: ignore[misc]  # submitit ships no types for mypy
        """submitit with the options above, and existing scripts in place of its own."""

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            text = submission_file_path.read_text(encoding="utf-8")
            options = _options(text, job)
            if job.script:
                return _command(job, site, options, job.argv)
            body = [line for line in text.splitlines() if not line.startswith("#SBATCH ")]
            submission_file_path.write_text("\n".join(body) + "\n", encoding="utf-8")
            return _command(job, site, options, (str(submission_file_path),))

    folder = AttemptPaths(job.folder).submitit
    if "%" in str(folder):
        raise LauncherError(f"{folder} holds a %, which submitit and Slurm expand; use another sweeps folder")
    executor = Executor(folder=folder, python=shlex.quote(site.python or sys.executable))
    executor.update_parameters(**_parameters(job, site, token), **({} if job.script else _own_steps(job, site)))
    return executor


def _literal(path: Path) -> str:
    """A path in which Slurm, and submitit, expand no ``%j``."""
    return str(path).replace("%", "%%")


def _from_accounting(tickets: Sequence[Ticket], user: str) -> dict[str, JobStatus]:
    """Jobs that the controller no longer shows: their last state from sacct where it works, else LOST."""
    if not tickets:
        return {}
    names = ",".join(sorted({ticket.name for ticket in tickets}))
    oldest = max(0, int(min(ticket.submitted_at for ticket in tickets)) - 3600)
    since = _local_time(oldest)
    command = ("sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", f"--user={user}")
    why = "neither squeue nor sacct knows it"
    try:
        shown = _ask(*command, f"--name={names}", f"--starttime={since}", f"--format={slurm_text.SACCT_FORMAT}")
    except LauncherError:
        # Without slurmdbd sacct always fails: then the controller's silence is all there is to know.
        shown, why = "", "squeue does not know it, and there is no accounting to ask"
    rows = slurm_text.sacct_rows(shown)
    statuses = {}
    for ticket in tickets:
        row = slurm_text.find(rows, ticket.name, _token(ticket.folder), ticket.submitted_at)
        known = _with_exit_code(slurm_text.status(row), ticket.folder) if row else None
        statuses[ticket.name] = known or JobStatus(state=JobState.LOST, reason=why)
    return statuses


def _with_exit_code(status: JobStatus, folder: Path) -> JobStatus:
    """For an ended job that says 0: the exit code that its recipe wrote down, or that of its worst step.

    A batch script may ignore that its training failed, and submitit's own step always ends well.
    """
    if status.state is not JobState.ENDED or status.exit_code != 0:
        return status
    ended = read_json(AttemptPaths(folder).ended)
    if ended is not None:
        return replace(status, exit_code=int(ended["exit_code"]))
    try:
        detail = _ask("scontrol", "--details", "--oneliner", "show", "job", status.job_id)
    except LauncherError:
        return status  # it left the controller's memory between the two questions
    return replace(status, exit_code=slurm_text.detail_exit_code(detail) or 0)


def _cancel(job_id: str, name: str, *options: str) -> None:
    """Cancel ``job_id`` if it still has this name; one that is over already is no error."""
    try:
        _ask("scancel", *options, f"--name={name}", job_id)
    except LauncherError as error:
        if not any(text in str(error) for text in ("Invalid job id", "already complet")):
            raise


def _ask(*command: str) -> str:
    """The standard output of a Slurm command. Raises LauncherError when it is missing, refuses or does not answer."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_"))}
    environment |= {k: os.environ[k] for k in ("SLURM_CONF",) if k in os.environ}
    environment |= {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=ANSWER_SECONDS
        )
    except FileNotFoundError as error:
        raise LauncherError(f"{command[0]} is not on PATH; run this where Slurm's commands are") from error
    except subprocess.TimeoutExpired as error:
        raise LauncherError(f"{command[0]} did not answer in {ANSWER_SECONDS:g} s; the jobs go on") from error
    if done.returncode:
        raise LauncherError(f"{command[0]} failed: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout


@functools.lru_cache(maxsize=4096)
def _cached_token(path: Path) -> str:
    record = read_json(path)
    if record is None:
        raise FileNotFoundError(path)  # not cached: it may be written any moment
    return str(record["token"])


def _token(folder: Path) -> str:
    """The token of the attempt in ``folder``, "" when nothing was submitted from there."""
    try:
        return _cached_token(AttemptPaths(folder).slurm)
    except FileNotFoundError:
        return ""


def _local_time(epoch: float) -> str:
    """sacct reads local time only."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(epoch))


def _refusal(error: Exception) -> str:
    """sbatch's own words within submitit's exception, on one line."""
    lines = [line.strip().removeprefix("sbatch: error: ") for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[-3:]) or type(error).__name__
