"""Launchers of jobs. ``make_launcher(study)`` returns the one that a study's site names."""

from __future__ import annotations

from pathlib import Path

from lora_tune.base.registry import LAUNCHERS
from lora_tune.config.study import Study
from lora_tune.launchers.base import Launcher, launcher_kind
from lora_tune.workloads.base import Job

MOST_SLOTS = 64
"""Maximum trials per pack if ``site.slots`` is "auto"; GPU memory decides how many train at once."""


def make_launcher(study: Study, packs: Path) -> Launcher:
    """Return the launcher of the study's site. Raises SetupError if this machine cannot run it.

    packs: parent folder of the folders of shared jobs.
    """
    slots = MOST_SLOTS if study.site.slots == "auto" else study.site.slots
    if slots is None:
        return _plain(study, jobs=study.budget.parallel)
    from lora_tune.launchers.packed import PackedLauncher

    launcher = PackedLauncher(_plain(study, jobs=1), slots, packs, study.site.packs)
    launcher.widen(study.budget.parallel)
    return launcher


def _plain(study: Study, jobs: int) -> Launcher:
    """Return the launcher of at most ``jobs`` concurrent jobs."""
    launcher: Launcher = LAUNCHERS.make(study.site.launcher, launcher_kind(study.site).make, study, jobs)
    return launcher


def preview(study: Study, job: Job) -> list[str]:
    """The command line that starts ``job``, for display; nothing is started."""
    return launcher_kind(study.site).preview(job, study.site)
