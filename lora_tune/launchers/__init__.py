"""Where jobs run. ``make_launcher(study)`` gives the one that a study's site names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lora_tune.config.study import Study

if TYPE_CHECKING:
    from lora_tune.launchers.base import Launcher
    from lora_tune.workloads.base import Job


MOST_SLOTS = 64
"""Trials that a pack is asked for at most where ``site.slots`` is "auto"; its memory decides how many train."""


def make_launcher(study: Study, packs: Path) -> Launcher:
    """The launcher of the study's site. Raises SetupError when this machine cannot do it.

    packs: where the folders of jobs that several trials share are made.
    """
    slots = MOST_SLOTS if study.site.slots == "auto" else study.site.slots
    if slots is None:
        return _plain(study, jobs=study.budget.parallel)
    from lora_tune.launchers.packed import PackedLauncher

    return PackedLauncher(_plain(study, jobs=-(-study.budget.parallel // slots)), slots, packs)


def _plain(study: Study, jobs: int) -> Launcher:
    """The launcher of at most this many ``jobs`` at one time."""
    if study.site.launcher == "slurm":
        from lora_tune.launchers.slurm.launcher import SlurmLauncher

        return SlurmLauncher(study.site)
    if study.site.launcher == "simulated":
        from lora_tune.simulation.launcher import of_study

        return of_study(study)
    from lora_tune.launchers.local import LocalLauncher

    return LocalLauncher(range(study.site.gpus_per_node * jobs))


def preview(study: Study, job: Job) -> list[str]:
    """The command line that starts ``job``, for people to read; nothing is started."""
    if study.site.launcher == "slurm":
        from lora_tune.launchers.slurm import submission

        return submission.preview(job, study.site)
    return list(job.argv)
