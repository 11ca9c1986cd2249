"""Converts an attempt to a proposal, a job or a ticket, and stops its job."""

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

# Stops of jobs: the intention is recorded first, then passed to the launcher.


class JobStops:
    """Stops jobs of one sweep."""

    def __init__(self, launcher: Launcher, clock: Clock, work: UnitOfWork, jobs: Jobs, events: EventLog) -> None:
        self._launcher, self._clock, self._work, self._jobs, self._events = launcher, clock, work, jobs, events

    def stop(self, attempt: Attempt, action: policy.Stop) -> None:
        """Ask a job to end, for the reason in ``action``."""
        why, now = action.diagnosis, self._clock.monotonic_now()
        stopped = replace(attempt, stop=action.kind, stop_sentence=action.sentence, stop_at=now)
        self._work.put_attempt(replace(stopped, failure=why.kind.value, line=why.line, remedy=why.remedy))
        self._cancel(attempt, force=False)

    def give_up(self, attempt: Attempt, sentence: str = "") -> None:
        """Ask a job to end for a user; sentence: who, "" for the one who drives the sweep."""
        self.stop(attempt, policy.Stop(StopKind.USER, sentence))

    def kill(self, attempt: Attempt) -> None:
        """Kill a job that was asked to end and has not."""
        self._events.log("kill", trial=attempt.trial, text=f"trial {attempt.trial} does not end: kill")
        self._work.put_attempt(replace(attempt, killed_at=self._clock.monotonic_now()))
        self._cancel(attempt, force=True)

    def _cancel(self, attempt: Attempt, *, force: bool) -> None:
        try:
            self._launcher.cancel(self._jobs.ticket(attempt), force=force)
        except LauncherError as error:
            self._events.warn_once("cluster", str(error))  # the kill that follows retries


def proposal(trial: Trial, attempt: int) -> Proposal:
    """The trial as a workload's input."""
    return Proposal(
        number=trial.number,
        attempt=attempt,
        seed=trial.seed,
        parameters=trial.parameters,
        replicates=trial.replicates,
        probe=trial.probe,
    )


class Jobs:
    """Creates jobs and tickets of the attempts of one sweep. sweep: its id."""

    def __init__(self, workload: Workload, paths: SweepPaths, sweep: str = "") -> None:
        self._workload, self._paths, self._sweep = workload, paths, sweep

    def job(self, trial: Trial, attempt: Attempt) -> Job:
        """The job for the launcher."""
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
        """The values that the trial's jobs receive, with which its log is compared."""
        return self._workload.written(proposal(trial, 0))

    def foreign_record(self, attempt: Attempt) -> str:
        """A message about a record of another attempt in an attempt's folder; "" if there is none."""
        for path, token in self._records(attempt):
            if attempt.token and (other := foreign(path.name, token, attempt.token)):
                return f"{attempt.folder}: {other}"
        return ""

    def foreign_folder(self, attempt: Attempt) -> str:
        """A message about files of another attempt in the folder of an unsubmitted one; "" if there are none."""
        if sentence := self.foreign_record(attempt):
            return sentence
        log = AttemptPaths(self._paths.root / attempt.folder).log
        foreign_log = attempt.token and log.exists() and not self._records(attempt)
        return f"{attempt.folder} has a log that this attempt did not write" if foreign_log else ""

    def _records(self, attempt: Attempt) -> list[tuple[Path, str]]:
        """The readable records in an attempt's folder, each with its token."""
        files = AttemptPaths(self._paths.root / attempt.folder)
        paths = (files.job, files.slurm, files.claim, files.started, files.ended)
        contents = ((path, read_json(path).content) for path in paths)
        return [(path, text_of(content, "token")) for path, content in contents if content is not None]

    def elsewhere(self, attempt: Attempt) -> Attempt:
        """The attempt moved to a new folder."""
        first = self._paths.attempt(attempt.trial, attempt.number).folder.relative_to(self._paths.root)
        return replace(attempt, folder=f"{first}-{attempt.token[:8]}")

    def reader(self, trial: Trial, attempt: Attempt) -> Callable[[], LogReader]:
        """A factory of readers for the attempt's log."""
        return lambda: self._workload.reader(proposal(trial, attempt.number))

    def ticket(self, attempt: Attempt) -> Ticket:
        """The launcher's key to find the attempt's job again."""
        return Ticket(
            name=attempt.job_name,
            folder=self._paths.root / attempt.folder,
            token=attempt.token,
            job_id=attempt.job_id,
            submitted_at=attempt.submitted_at or attempt.intended_at,
        )
