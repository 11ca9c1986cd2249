"""The loop that drives a sweep.

Each tick reads rows, job states and new log lines, decides (``policy``), acts, and records. A restart is an ordinary
tick: running jobs are adopted, none is lost, none is started twice. The driver is the only writer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lora_tune.base.errors import LauncherError, SetupError, SweepBusyError
from lora_tune.base.paths import SweepPaths
from lora_tune.config.study import Study
from lora_tune.controller import limits
from lora_tune.controller.dependencies import Clock, Dependencies, Proposer, RealClock, View
from lora_tune.controller.jobs import Jobs, JobStops, proposal
from lora_tune.controller.monitor import JobMonitor
from lora_tune.controller.proposals import Proposals
from lora_tune.controller.steering import Steering
from lora_tune.controller.submissions import Submissions
from lora_tune.controller.sweep_records import EventLog, SweepRecords
from lora_tune.launchers.base import JobState, Launcher
from lora_tune.store import LEASE_SECONDS, Lease
from lora_tune.store.port import Request
from lora_tune.store.records import Attempt, StopKind, StudyRecords, Trial, TrialState, UnitOfWork, Verdict

# Orphaned jobs of a sweep, which belong to no open trial, such as those of lost records: found and cancelled.


SURVEY_SECONDS = 600.0
"""Interval between searches for them."""


class OrphanJobs:
    """Searches the launcher's jobs in the sweep's folder, if the launcher can list them."""

    def __init__(self, launcher: Launcher, paths: SweepPaths, events: EventLog) -> None:
        self._launcher, self._paths, self._events = launcher, paths, events
        self.surveyed_at = -math.inf

    def look_now(self) -> None:
        """Search at once, after a job was lost."""
        self.surveyed_at = -math.inf

    def due(self, now: float) -> bool:
        """Whether a search is due at ``now``, in epoch seconds."""
        return now - self.surveyed_at >= SURVEY_SECONDS

    def cancel(self, open_names: Collection[str], now: float) -> None:
        """Cancel the sweep's jobs that are not among ``open_names``."""
        self.surveyed_at = now
        try:
            for ticket in self._launcher.jobs_below(self._paths.trials.absolute()):
                if ticket.name not in open_names:
                    text = f"job {ticket.job_id} ({ticket.name}) belongs to no open trial of this sweep: cancelled"
                    self._events.note(text, "orphan", job=ticket.job_id)
                    self._launcher.cancel(ticket)
        except LauncherError as error:
            self._events.warn_once("cluster", str(error))


__all__ = ["Clock", "Dependencies", "Driver", "Outcome", "Proposer", "RealClock", "View", "proposal"]

PROJECTION_ATTEMPTS = 3
"""Attempts to publish the records to other programs at the end of a run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of the driver ended. reason: a sentence. interrupted: jobs may still run."""

    reason: str
    interrupted: bool = False


class Driver:
    """Drives one sweep until its budget is spent. Construct, then :meth:`run`.

    ``interrupt`` may be set at any time to a signal (from its handler): the loop ends after the current tick.
    submit_grace_seconds: time after an unanswered submission before it counts as lost (a scheduler may answer late).
    fixed_at: epoch seconds when a user fixed what made trials fail before.
    """

    def __init__(
        self,
        study: Study,
        paths: SweepPaths,
        dependencies: Dependencies,
        lease: Lease,
        *,
        period: float,
        submit_grace_seconds: float = 0.0,
        fixed_at: float = -math.inf,
    ) -> None:
        self.interrupt = 0
        self._study, self._dependencies = study, dependencies
        self._period, self._submit_grace = period, submit_grace_seconds
        sweep = dependencies.store.load(study.name)
        assert sweep is not None, "the sweep's row is made before its driver"
        self._work = UnitOfWork(sweep)
        self._jobs = Jobs(dependencies.workload, paths, sweep.id)
        self._events = EventLog(paths.driver_log, dependencies.view.line, dependencies.clock.now)
        self._stops = JobStops(dependencies.launcher, dependencies.clock, self._work, self._jobs, self._events)
        self._monitor = JobMonitor(study, dependencies, self._work, self._jobs, self._events, self._stops)
        self._steering = Steering(study, dependencies, self._work, self._monitor, self._stops, self._events)
        self._records = SweepRecords(
            dependencies.store, lease, self._work.sweep, paths, self._events, self._now, lambda: self.requests
        )
        self._orphans = OrphanJobs(dependencies.launcher, paths, self._events)
        self._submissions = Submissions(study, paths, dependencies, self._work, self._jobs, self._events, self._save)
        self._proposals = Proposals(
            dependencies, self._work, self._submissions, self._events, may_ask=self._may_ask, save=self._save,
            fixed_at=fixed_at, requests=lambda: self.requests,
        )  # fmt: skip

    @property
    def study(self) -> Study:
        """The study with users' changes."""
        return self._study

    @property
    def sweep(self) -> StudyRecords:
        """The present records."""
        return self._work.sweep

    @property
    def requests(self) -> Sequence[Request]:
        """Users' requests to the sweep that were read, with the answers."""
        return self._steering.requests

    def run(self) -> Outcome:
        """Tick until nothing is left to do or to wait for."""
        self._adopt()
        try:
            outcome = self._drive()
        except SweepBusyError:
            raise
        except SetupError:
            self._show_at_last()
            raise
        self._show_at_last()
        return outcome

    def _drive(self) -> Outcome:
        while True:
            reason = self.tick()
            if reason and self._monitor.shared.let_go(self._now()):
                return Outcome(reason)
            if self.interrupt:
                return Outcome("interrupted", interrupted=True)
            if not self._proposals.unfilled:  # else free slots wait only for proposals
                self._dependencies.clock.sleep(self._period)

    def _adopt(self) -> None:
        """Log trials that an earlier driver left running."""
        for trial in self._work.open_trials():
            if trial.state is TrialState.RUNNING:
                self._events.log("adopted", trial=trial.number)

    def tick(self) -> str:
        """One round. Returns why the sweep has ended, "" while it has not."""
        if self._now() - self._records.queried_at >= LEASE_SECONDS:
            self._save()  # after so long a pause another driver may have taken over: then this raises
        self._cancel_orphans()
        if not self._records.away:
            self._steering.poll(self._now())
            self._study = self._steering.steered.study
        self._look_at_jobs()
        self._submit_waiting()
        reason = self._proposals.refill(self._study, lambda: bool(self.interrupt))
        self._save()
        if self._records.database_error and not self._on_cluster():
            raise SetupError(self._records.database_error)
        ended = self._tell()
        self._dependencies.view.update(self._study, self.sweep, self._now())
        if self._submissions.refused is not None and not (self._on_cluster() or self._records.unsaved):
            raise SetupError(f"{self._submissions.refused}; fix it and rerun the same command")
        # If the search gave the reason before it knew the last results, it is asked again.
        return "" if self._work.open_trials() or self._records.unsaved or ended else reason

    def _submit_waiting(self) -> None:
        """Submit further attempts in order while slots are free; after a set-up fault there may be more than slots."""
        hopeless = self._proposals.hopeless() is not None
        for trial in self._work.open_trials():
            if trial.state is not TrialState.WAITING:
                continue
            if reason := limits.spent(self._study, self.sweep, self._dependencies.clock.monotonic_now()):
                sentence = f"{trial.sentence or 'proposed'}; {limits.UNSUBMITTED}{reason}"
                self._work.put_trial(trial.finished(Verdict.CANCELLED, sentence, self._now()))
                continue
            ready = limits.may_be_submitted(self.sweep.attempts_of(trial.number), self._now())
            stopped = hopeless or self._submissions.refused is not None or self._records.away
            if ready and not stopped and self._slot_free():
                self._submissions.submit(trial)

    def _slot_free(self) -> bool:
        running = sum(trial.state is TrialState.RUNNING for trial in self._work.open_trials())
        return running < self._study.budget.parallel

    def _look_at_jobs(self) -> None:
        live = [self._newest(t) for t in self._work.open_trials() if t.state is TrialState.RUNNING]
        poll = self._monitor.poll(live)
        now = self.sweep.attempts
        if any(a.submitted_at and now[a.trial, a.number].state == JobState.LOST for a in live):
            self._orphans.look_now()  # it may still run unnoticed, alongside the next attempt
        for attempt in poll.absent:
            if self._submissions.unanswered_seconds(attempt) < self._submit_grace:
                continue
            if attempt.stop is StopKind.USER:
                self._work.put_attempt(replace(attempt, ended_at=self._now()))
                self._cancelled(self.sweep.trials[attempt.trial])
            elif self._submissions.refused is None and not self._records.away:
                self._submissions.launch(attempt)
        # The search gets new evals last, because stopping jobs is urgent.
        for number, evals in poll.fresh.items():
            if evals:
                self._dependencies.session.report(number, self.sweep.last_evals(number))

    def _cancel_orphans(self) -> None:
        """Only with the lease and the database: otherwise an unknown job may be another driver's."""
        if self._orphans.due(self._now()) and not self._records.away and self._save():
            job_names = {self._newest(t).job_name for t in self._work.open_trials() if t.state is TrialState.RUNNING}
            self._orphans.cancel(job_names, self._now())

    def _may_ask(self) -> bool:
        """Not during a database outage, because another driver may have taken over and propose as well."""
        return not (self._steering.steered.paused or self._records.away)

    def cancel_all(self, limit: float) -> bool:
        """Cancel every open trial and wait at most ``limit`` seconds for the jobs; True if all have ended."""
        deadline = self._now() + limit
        for trial in self._work.open_trials():
            if trial.state is TrialState.WAITING:
                self._cancelled(trial)
                continue
            self._stops.give_up(self._newest(trial))
        while self._work.open_trials() and self._now() < deadline:
            self._look_at_jobs()
            self._dependencies.clock.sleep(self._period)
        self._monitor.shared.let_go(self._now())
        self._save()
        self._tell()
        self._show_at_last()
        return not self._work.open_trials()

    def _cancelled(self, trial: Trial) -> None:
        """Finish a trial without a job as cancelled."""
        self._work.put_trial(trial.finished(Verdict.CANCELLED, "cancelled by the user", self._now()))

    # -- records -----------------------------------------------------------------------------------------------

    def _save(self) -> bool:
        """Save changes; returns whether all are saved. Raises SweepBusyError if the lease is lost."""
        return self._records.save(self._work.take_changes())

    def _tell(self) -> bool:
        """Tell the search about trials whose end is saved, and publish the records to other programs.

        Returns whether there were any.
        """
        if self._records.away:
            return False
        ended = self._work.take_ended()
        for trial in ended:
            self._dependencies.session.tell(trial)
        self._events.warn_once("optuna", self._show())
        return bool(ended)

    def _show(self) -> str:
        """Publish the records to other programs; returns why that failed, "" if it did not."""
        projection = self._dependencies.projection
        return "" if projection is None else projection.follow(self.sweep)

    def _show_at_last(self) -> None:
        """As :meth:`_show`, with retries, because no later tick repeats it."""
        for left in reversed(range(PROJECTION_ATTEMPTS)):
            if self._records.away or not (problem := self._show()):
                return
            if left:
                self._dependencies.clock.sleep(self._period)
        self._events.note(f"{problem}; the sweep's next start does so, its records are whole", "trouble")

    def _on_cluster(self) -> bool:
        """Whether a trial has a job that was submitted and has not ended."""
        running = [t for t in self._work.open_trials() if t.state is TrialState.RUNNING]
        return any(self._newest(trial).submitted_at is not None for trial in running)

    def _newest(self, trial: Trial) -> Attempt:
        return self.sweep.attempts_of(trial.number)[-1]

    def _now(self) -> float:
        return self._dependencies.clock.now()
