"""Submission of a job by sbatch: submitit turns requirements into options and parses the answer."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lora_tune.base.errors import LauncherError, RefusedError
from lora_tune.base.paths import AttemptPaths
from lora_tune.base.sbatch_options import sbatch_options
from lora_tune.config.tables import Site
from lora_tune.launchers.files import SOURCING, pickle_folder
from lora_tune.launchers.slurm.client import handed_on, run_bounded
from lora_tune.workloads.base import Job
from lora_tune.workloads.script_needs import job_header

# Submissions in a thread, so that running jobs are watched meanwhile.
#
# A busy controller, a site's wrapper or its filter may block ``sbatch`` for minutes. One job is submitted at a time;
# the caller waits briefly for the answer, and otherwise calls again.

ANSWER_SECONDS = 120.0
"""Timeout of sbatch in seconds; the client itself retries a busy controller for about a minute."""

PATIENCE_SECONDS = 3.0
"""Seconds that a tick waits for an answer."""


def sbatch_answer(command: list[str]) -> str:
    """Output of an sbatch ``command``. Raises RuntimeError with its error text, LauncherError on a timeout.

    A killed sbatch may have submitted the job all the same, which is then found by its token.
    """
    done = run_bounded(command, ANSWER_SECONDS, None, name="sbatch")
    if done.returncode:
        raise RuntimeError(done.stderr or done.stdout)
    return done.stdout


class PendingSubmissions:
    """The submissions of one launcher by job name; one runs at a time."""

    def __init__(self) -> None:
        self._begun: dict[str, _Submission] = {}

    def has(self, job: str) -> bool:
        """Whether the answer for ``job`` is still to be fetched."""
        return job in self._begun

    def answer(self, job: str, submit: Callable[[], str]) -> str:
        """Return or raise the result of ``submit`` for ``job``. Raises LauncherError while it runs: call again."""
        begun = self._begun.get(job)
        if begun is None:
            if any(other.is_alive() for other in self._begun.values()):
                raise LauncherError(f"{job} is not submitted yet: sbatch has not answered for the job before it")
            begun = self._begun[job] = _Submission(submit)
            begun.start()
            begun.join(PATIENCE_SECONDS)
        if begun.is_alive():
            raise LauncherError(f"{job}: sbatch has not answered yet; jobs that run are watched meanwhile")
        del self._begun[job]
        if begun.error is not None:
            raise begun.error
        return begun.job_id


class _Submission(threading.Thread):
    """One call of sbatch, with its result."""

    def __init__(self, submit: Callable[[], str]) -> None:
        super().__init__(name="sbatch", daemon=True)  # daemon: Ctrl-C does not wait for it
        self._submit = submit
        self.job_id = ""
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.job_id = self._submit()
        except BaseException as error:  # noqa: BLE001  # raised again by PendingSubmissions.answer
            self.error = error


_ELSEWHERE = "use another sweeps folder (--output)"


def submission_command(job: Job, site: Site, token: str = "TOKEN") -> list[str]:
    """The command that submits ``job``: environment, sbatch, options, and script (``FILE`` for built-in recipes)."""
    from submitit.slurm.slurm import _make_sbatch_string

    text = _make_sbatch_string(command="", folder=job.folder, **_parameters(job, site, token))
    return _command(job, site, _options(text, job), job.argv if job.script else ("FILE",))


def as_submitted(job: Job, site: Site) -> Site:
    """The site with the partition, QOS and reservation of ``job``: from arguments, the site, or its script's header."""
    header, arguments = ({o.name: o.value for o in x} for x in (job_header(job), sbatch_options(site.sbatch_args)))
    named = {name: getattr(site, name) for name in ("partition", "qos", "reservation")}
    return site.model_copy(update={n: arguments.get(n) or own or header.get(n) for n, own in named.items()})


def question(job: Job, site: Site) -> list[str]:
    """The ``sbatch --test-only`` command for ``job``, which submits nothing; a built-in recipe has no script yet."""
    command = submission_command(job, site)
    options = command[command.index("sbatch") + 1 :]
    return ["sbatch", "--test-only", *(options if job.script else (*options[:-1], "--wrap=:"))]


def preview(job: Job, site: Site) -> list[str]:
    """The submission without the job's environment, for display: the steps' variables and the sbatch command."""
    command = submission_command(job, site)
    return [*(f"{k}={v}" for k, v in site.step_variables().items()), *command[command.index("sbatch") :]]


def _parameters(job: Job, site: Site, token: str) -> dict[str, Any]:
    """The job's requirements as submitit parameters; ones unknown to submitit are passed through.

    Raises RefusedError for a folder name with line breaks or the like: each value becomes a line of a batch file.
    """
    for place in (job.folder, job.log, job.cwd or job.folder):
        if not str(place).isprintable():
            raise RefusedError(job.name, f"{str(place)!r} holds characters that no batch file can", _ELSEWHERE)
    need = job.resources
    whole_nodes = need.gpus_per_node > 0 and need.gpus_per_node >= site.gpus_per_node
    default_gres = f"gpu:{need.gpus_per_node}" if need.gpus_per_node and not job.script else None
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
        "gres": site.gres or default_gres,
        # Two trials on one node would share ports, caches and container names.
        "exclusive": whole_nodes or None,
        "mem": "0" if whole_nodes else None,
    }
    further = {
        "reservation": site.reservation,
        "chdir": str(job.cwd or job.folder),
        "output": _literal(job.log),
        "open-mode": "append",
        # A requeued job would run twice into one log; the sweep itself decides on new attempts.
        "no-requeue": True,
    }
    options = {key: value for key, value in parameters.items() if value is not None}
    return options | {"additional_parameters": {key: value for key, value in further.items() if value is not None}}


def _step_options(job: Job, site: Site) -> dict[str, Any]:
    """submitit parameters of built-in recipes: one task that runs the recipe, in the site's container if it has one."""
    steps = [f"--output={_literal(job.log)}", "--open-mode=append", "--kill-on-bad-exit=1"]
    if site.container and job.contained:
        mounts = ",".join((f"{job.folder}:{job.folder}", *site.container_mounts))
        steps += [f"--container-image={site.container}", f"--container-mounts={mounts}"]
    # If the batch shell dies of SIGTERM it takes srun along, and the step then searches for it for seconds.
    return {"ntasks_per_node": 1, "srun_args": steps, "stderr_to_stdout": True, "setup": ["trap : TERM"]}


def _options(text: str, job: Job) -> list[str]:
    """The options in submitit's batch file, without harmful ones.

    ``--signal`` ends a training up to 150 s before its limit; ``--error`` would split the log; some clusters refuse
    ``--wckey``; ``--time`` for a job without a limit is submitit's default of five minutes.
    """
    unwanted = ("--signal=", "--error=", "--wckey=", *(() if job.resources.minutes else ("--time=",)))
    options = [shlex.split(line)[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    kept = [option for option in options if not option.startswith(unwanted)]
    if any(option.name == "error" for option in job_header(job)):
        kept.append(f"--error={_literal(job.log)}")  # one log, whatever the script's header sets
    return kept


def _command(job: Job, site: Site, options: Sequence[str], script: Sequence[str], secrets: str = "") -> list[str]:
    """``env -i`` with exactly the job's environment, and sbatch. secrets: a file of further variables, or ""."""
    variables = handed_on(os.environ) | site.step_variables() | dict(job.environment)
    pairs = [f"{key}={value}" for key, value in variables.items()]
    hidden = (*SOURCING, secrets) if secrets else ()
    return ["env", "-i", *pairs, *hidden, "sbatch", *options, *site.sbatch_args, *script]


def submitted_id(answer: str) -> str:
    """The job id in sbatch's output, or "".

    Uses the last line that has sbatch's form: a site's filter or wrapper may have mentioned other jobs before.
    """
    lines = re.findall(r"^Submitted batch job ([0-9]+)\b", answer, re.MULTILINE)
    return str(lines[-1] if lines else "")


def executor(job: Job, site: Site, token: str, secrets: str = "") -> Any:
    """submitit's executor for this job. secrets: a file of further variables, or ""."""
    from submitit import SlurmExecutor  # 0.3 s to import; needed only here
    from submitit.core.utils import JobPaths
    from submitit.slurm.slurm import _make_sbatch_string

    class Executor(SlurmExecutor):  # type: ignore[misc]  # submitit ships no types for mypy
        """submitit with the options above, and existing scripts in place of its own."""

        @staticmethod
        def _get_job_id_from_submission_command(string: str | bytes) -> str:
            """:func:`submitted_id`, as submitit takes the first number after "job" and names files by it."""
            answer = string if isinstance(string, str) else string.decode(errors="replace")
            return submitted_id(answer) or str(SlurmExecutor._get_job_id_from_submission_command(answer))

        def _submit_command(self, command: str) -> Any:
            """Like submitit's, but with a timeout, and without sbatch's output on the terminal."""
            text = _make_sbatch_string(command=command, folder=self.folder, **self.parameters)
            body = [line for line in text.splitlines() if not line.startswith("#SBATCH ")]
            file = JobPaths.get_first_id_independent_folder(self.folder) / f".submission_file_{uuid.uuid4().hex}.sh"
            file.write_text("\n".join(body) + "\n", encoding="utf-8")
            script = job.argv if job.script else (str(file),)
            answer = sbatch_answer(_command(job, site, _options(text, job), script, secrets))
            job_id = self._get_job_id_from_submission_command(answer)
            submitted = self.job_class(folder=self.folder, job_id=job_id, tasks=[0])
            submitted.paths.move_temporary_file(file, "submission_file", keep_as_symlink=True)
            return submitted

    folder = AttemptPaths(job.folder).submitit
    if "%" in str(folder):
        raise RefusedError(job.name, f"{folder} holds a %, which submitit and Slurm expand", _ELSEWHERE)
    slurm = Executor(
        folder=pickle_folder(AttemptPaths(job.folder), job.name), python=shlex.quote(site.python or sys.executable)
    )
    slurm.update_parameters(**_parameters(job, site, token), **({} if job.script else _step_options(job, site)))
    return slurm


def _literal(path: Path) -> str:
    """A path in which Slurm and submitit expand no ``%j``."""
    return str(path).replace("%", "%%")
