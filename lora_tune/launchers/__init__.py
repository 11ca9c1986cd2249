"""Where jobs run. ``make_launcher(study)`` gives the one that a study's site names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_tune.config.study import Study

if TYPE_CHECKING:
    from lora_tune.launchers.base import Launcher
    from lora_tune.workloads.base import Job


def make_launcher(study: Study) -> Launcher:
    """The launcher of the study's site. Raises SetupError when this machine cannot do it."""
    if study.site.launcher == "slurm":
        from lora_tune.launchers.slurm.launcher import SlurmLauncher

        return SlurmLauncher(study.site)
    if study.site.launcher == "simulated":
        from lora_tune.simulation.launcher import of_study

        return of_study(study)
    from lora_tune.launchers.local import LocalLauncher

    return LocalLauncher(range(study.site.gpus_per_node * study.budget.parallel))


def preview(study: Study, job: Job) -> list[str]:
    """The command line that starts ``job``, for people to read; nothing is started."""
    if study.site.launcher == "slurm":
        from lora_tune.launchers.slurm import submission

        return submission.preview(job, study.site)
    return list(job.argv)
