"""What can be told before any trial of a sweep runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lora_tune.base.errors import LoraTuneError, SetupError
from lora_tune.base.paths import SweepPaths
from lora_tune.base.sbatch_options import sbatch_options
from lora_tune.config.study import Study
from lora_tune.launchers.base import launcher_kind
from lora_tune.launchers.slurm.shell import functions_of, handed_on, held_back
from lora_tune.workloads.base import ChecksBeforehand, Job, Prepares, Workload, some_proposal
from lora_tune.workloads.script_header import environment_options, header_options, refusals
from lora_tune.workloads.script_needs import environment_doubts, function_doubts, path_doubts, script_text


def doubts(workload: Workload, study: Study, paths: SweepPaths) -> Sequence[str]:
    """What its trials need and may not find, a sentence each.

    Raises SetupError for what is surely missing, and for options of ``sbatch`` under which no job is its trial's.
    """
    checked = workload.check() if isinstance(workload, ChecksBeforehand) else ()
    try:
        job = workload.job(some_proposal(study), paths.attempt(0, 0).folder)
        before = workload.preparation(paths.preparation(0).folder) if isinstance(workload, Prepares) else None
    except LoraTuneError:  # of these values; what is wrong with a trial's own is said when it is made
        return checked
    for each in (job, *([before] if before else [])):
        for sentence in option_refusals(each, study):
            raise SetupError(f"study {study.name}: {sentence}")
    return (*checked, *path_doubts(job), *_shell_doubts(job, study, checked))


def _shell_doubts(job: Job, study: Study, checked: Sequence[str]) -> list[str]:
    """What a job's scripts have in the shell that starts the sweep, and a job lacks. checked: doubts so far."""
    if not launcher_kind(study.site).slurm:
        return []
    inherited = handed_on(os.environ)
    known = {*inherited, *job.environment, *job.secrets, *study.site.step_variables()}
    needs = [d for d in environment_doubts(job, known, os.environ) if not any(d.split(",")[0] in s for s in checked)]
    held = [name for name in held_back(os.environ) if name not in job.secrets and name not in job.environment]
    secrets = [
        f"{name} of this shell reaches no trial, since it is a secret; "
        f'if they need it, write {name} = {{ env = "{name}" }} in [site.environment]'
        for name in held
    ]
    return [*function_doubts(job, functions_of(inherited)), *needs, *secrets]


def option_refusals(job: Job, study: Study) -> list[str]:
    """Under which options of its script and its site a job would not be its trial's, a sentence each."""
    if not launcher_kind(study.site).slurm:
        return []
    words = (study.workload.model_extra or {}).get("argv", ())
    by_environment = {
        name for name in study.search_space.resolve(study.search_space.corner()) if name in job.environment
    }
    unnamed = {name for name in by_environment if not any(f"{{{name}}}" in word for word in words)}
    return refusals(
        header_options(script_text(job, job.argv[0])) if job.script else (),
        sbatch_options(study.site.sbatch_args),
        script=Path(job.argv[0]).name if job.script else "",
        needed={*(unnamed if job.script else ()), *job.secrets},
        nodes=job.resources.nodes,
        environment=environment_options({**study.site.step_variables(), **job.environment}),
    )
