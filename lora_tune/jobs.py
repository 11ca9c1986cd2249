"""An attempt in the terms of those who run it: as a proposal, as a job, as a ticket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lora_tune.launchers.base import Ticket
from lora_tune.mllog import LogReader
from lora_tune.paths import SweepPaths
from lora_tune.records import Attempt, Trial
from lora_tune.workloads.base import Job, Proposal, Workload


def proposal(trial: Trial, attempt: int) -> Proposal:
    """What a workload is told of a trial."""
    return Proposal(
        number=trial.number,
        attempt=attempt,
        seed=trial.seed,
        parameters=trial.parameters,
        replicates=trial.replicates,
        probe=trial.probe,
    )


class Jobs:
    """Makes jobs and tickets of the attempts of one sweep."""

    def __init__(self, workload: Workload, paths: SweepPaths) -> None:
        self._workload, self._paths = workload, paths

    def job(self, trial: Trial, attempt: Attempt) -> Job:
        """What the launcher is given."""
        made = self._workload.job(proposal(trial, attempt.number), self._paths.root / attempt.folder)
        return replace(made, exclude_nodes=attempt.exclude_nodes)

    def reader(self, trial: Trial, attempt: Attempt) -> Callable[[], LogReader]:
        """Makes fresh readers for the attempt's log."""
        return lambda: self._workload.reader(proposal(trial, attempt.number))

    def ticket(self, attempt: Attempt) -> Ticket:
        """By what the launcher finds its job again."""
        return Ticket(
            name=attempt.job_name,
            folder=self._paths.root / attempt.folder,
            job_id=attempt.job_id,
            submitted_at=attempt.submitted_at or attempt.intended_at,
        )


def write_files(job: Job) -> None:
    """Make the job's folder and write its files. Raises OSError."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for name, text in job.files.items():
        (job.folder / name).write_text(text, encoding="utf-8")
