"""What can be told before any trial of a sweep runs."""

from __future__ import annotations

from collections.abc import Sequence

from lora_tune.base.errors import LoraTuneError
from lora_tune.base.paths import SweepPaths
from lora_tune.config.study import Study
from lora_tune.workloads.base import ChecksBeforehand, Workload, some_proposal
from lora_tune.workloads.script_needs import path_doubts


def doubts(workload: Workload, study: Study, paths: SweepPaths) -> Sequence[str]:
    """What its trials need and may not find, a sentence each. Raises SetupError for what is surely missing."""
    checked = workload.check() if isinstance(workload, ChecksBeforehand) else ()
    try:
        job = workload.job(some_proposal(study), paths.attempt(0, 0).folder)
    except LoraTuneError:  # of these values; what is wrong with a trial's own is said when it is made
        return checked
    return (*checked, *path_doubts(job))
