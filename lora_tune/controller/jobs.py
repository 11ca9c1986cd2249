"""An attempt in the terms of those who run it: as a proposal, as a job, as a ticket."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace

from lora_tune.base.paths import AttemptPaths, SweepPaths
from lora_tune.base.small_files import read_json, text_of
from lora_tune.launchers.base import Ticket
from lora_tune.launchers.job_records import foreign
from lora_tune.logs.mllog import LogReader
from lora_tune.store.records import Attempt, Trial
from lora_tune.workloads.base import Job, Proposal, Workload

SWEEP_VARIABLE, ATTEMPT_VARIABLE = "LORA_TUNE_SWEEP", "LORA_TUNE_ATTEMPT"
"""The variables in which a job finds the id of its sweep and the token of its attempt."""


def new_token() -> str:
    """A token that no other attempt of any sweep has."""
    return uuid.uuid4().hex


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
    """Makes jobs and tickets of the attempts of one sweep. sweep: its id."""

    def __init__(self, workload: Workload, paths: SweepPaths, sweep: str = "") -> None:
        self._workload, self._paths, self._sweep = workload, paths, sweep

    def job(self, trial: Trial, attempt: Attempt) -> Job:
        """What the launcher is given."""
        made = self._workload.job(proposal(trial, attempt.number), self._paths.root / attempt.folder)
        identity = {SWEEP_VARIABLE: self._sweep, ATTEMPT_VARIABLE: attempt.token} if attempt.token else {}
        environment = {**made.environment, **identity}
        return replace(made, exclude_nodes=attempt.exclude_nodes, token=attempt.token, environment=environment)

    def foreign_folder(self, attempt: Attempt) -> str:
        """What in the folder of an attempt that nobody has submitted yet is of another one; "" where nothing is."""
        files = AttemptPaths(self._paths.root / attempt.folder)
        if not attempt.token or not files.folder.exists():
            return ""
        ours = False
        for path in (files.job, files.slurm, files.claim, files.started, files.ended):
            content = read_json(path).content
            if content is not None and (other := foreign(path.name, text_of(content, "token"), attempt.token)):
                return f"{attempt.folder}: {other}"
            ours = ours or content is not None
        return f"{attempt.folder} has a log that this attempt did not write" if files.log.exists() and not ours else ""

    def elsewhere(self, attempt: Attempt) -> Attempt:
        """The attempt in a folder that no other one has."""
        first = self._paths.attempt(attempt.trial, attempt.number).folder.relative_to(self._paths.root)
        return replace(attempt, folder=f"{first}-{attempt.token[:8]}")

    def reader(self, trial: Trial, attempt: Attempt) -> Callable[[], LogReader]:
        """Makes fresh readers for the attempt's log."""
        return lambda: self._workload.reader(proposal(trial, attempt.number))

    def ticket(self, attempt: Attempt) -> Ticket:
        """By what the launcher finds its job again."""
        return Ticket(
            name=attempt.job_name,
            folder=self._paths.root / attempt.folder,
            token=attempt.token,
            job_id=attempt.job_id,
            submitted_at=attempt.submitted_at or attempt.intended_at,
        )


def write_files(job: Job) -> None:
    """Make the job's folder and write its files. Raises OSError."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for name, text in job.files.items():
        (job.folder / name).write_text(text, encoding="utf-8")
