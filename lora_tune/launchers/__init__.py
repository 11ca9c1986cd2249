"""Where jobs run. ``make_launcher(study)`` gives the one that a study's site names."""

from __future__ import annotations

from pathlib import Path

from lora_tune.base.registry import LAUNCHERS
from lora_tune.config.study import Study
from lora_tune.launchers.base import Launcher, launcher_kind
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

    launcher = PackedLauncher(_plain(study, jobs=1), slots, packs, study.site.packs)
    launcher.widen(study.budget.parallel)
    return launcher


def _plain(study: Study, jobs: int) -> Launcher:
    """The launcher of at most this many ``jobs`` at one time."""
    launcher: Launcher = LAUNCHERS.make(study.site.launcher, launcher_kind(study.site).make, study, jobs)
    return launcher


def preview(study: Study, job: Job) -> list[str]:
    """The command line that starts ``job``, for people to read; nothing is started."""
    return launcher_kind(study.site).preview(job, study.site)
