"""An attempt in the terms of those who run it: as a proposal, as a job, as a ticket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from lora_tune.base.errors import LauncherError
from lora_tune.base.files import read_json, text_of
from lora_tune.base.paths import ATTEMPT_VARIABLE, SWEEP_VARIABLE, AttemptPaths, SweepPaths
from lora_tune.controller import policy
from lora_tune.controller.dependencies import Clock
from lora_tune.controller.sweep_records import EventLog
from lora_tune.launchers.base import Launcher, Ticket
from lora_tune.launchers.job_records import foreign
from lora_tune.logs.run import LogReader
from lora_tune.store.records import Attempt, StopKind, Trial, UnitOfWork
from lora_tune.workloads.base import Job, Proposal, Value, Workload

# Jobs that are asked to end: the wish on record first, then the launcher.


class JobStops:
    """Stops jobs of one sweep."""

    def __init__(self, launcher: Launcher, clock: Clock, work: UnitOfWork, jobs: Jobs, events: EventLog) -> None:
        self._launcher, self._clock, self._work, self._jobs, self._events = launcher, clock, work, jobs, events

    def stop(self, attempt: Attempt, action: policy.Stop) -> None:
        """Ask a job to end, for the reason that ``action`` gives."""
        why, now = action.diagnosis, self._clock.monotonic_now()
        stopped = replace(attempt, stop=action.kind, stop_sentence=action.sentence, stop_at=now)
        self._work.put_attempt(replace(stopped, failure=why.kind.value, line=why.line, remedy=why.remedy))
        self._cancel(attempt, force=False)

    def give_up(self, attempt: Attempt, sentence: str = "") -> None:
        """Ask a job to end because a person wants it; sentence: who, "" for who drives the sweep."""
        self.stop(attempt, policy.Stop(StopKind.USER, sentence))

    def kill(self, attempt: Attempt) -> None:
        """End a job that was asked to and has not."""
        self._events.log("kill", trial=attempt.trial, text=f"trial {attempt.trial} does not end: kill")
        self._work.put_attempt(replace(attempt, killed_at=self._clock.monotonic_now()))
        self._cancel(attempt, force=True)

    def _cancel(self, attempt: Attempt, *, force: bool) -> None:
        try:
            self._launcher.cancel(self._jobs.ticket(attempt), force=force)
        except LauncherError as error:
            self._events.warn_once("cluster", str(error))  # the kill that follows tries again


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
        built = self._workload.job(proposal(trial, attempt.number), self._paths.root / attempt.folder)
        identity = {SWEEP_VARIABLE: self._sweep, ATTEMPT_VARIABLE: attempt.token} if attempt.token else {}
        environment = {**built.environment, **identity}
        return replace(
            built,
            name=attempt.job_name,
            resources=replace(built.resources, nodes=attempt.node_count),
            exclude_nodes=attempt.exclude_nodes,
            token=attempt.token,
            environment=environment,
            sweep=self._sweep,
        )

    def written(self, trial: Trial) -> Mapping[str, Value]:
        """What the trial's jobs are written with: what its log is held against."""
        return self._workload.written(proposal(trial, 0))

    def foreign_record(self, attempt: Attempt) -> str:
        """Which record in the folder of an attempt is another one's; "" where none is."""
        for path, token in self._records(attempt):
            if attempt.token and (other := foreign(path.name, token, attempt.token)):
                return f"{attempt.folder}: {other}"
        return ""

    def foreign_folder(self, attempt: Attempt) -> str:
        """What in the folder of an attempt that nobody has submitted yet is of another one; "" where nothing is."""
        if sentence := self.foreign_record(attempt):
            return sentence
        log = AttemptPaths(self._paths.root / attempt.folder).log
        foreign_log = attempt.token and log.exists() and not self._records(attempt)
        return f"{attempt.folder} has a log that this attempt did not write" if foreign_log else ""

    def _records(self, attempt: Attempt) -> list[tuple[Path, str]]:
        """The readable records in the folder of an attempt, each with the token that it carries."""
        files = AttemptPaths(self._paths.root / attempt.folder)
        paths = (files.job, files.slurm, files.claim, files.started, files.ended)
        contents = ((path, read_json(path).content) for path in paths)
        return [(path, text_of(content, "token")) for path, content in contents if content is not None]

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
