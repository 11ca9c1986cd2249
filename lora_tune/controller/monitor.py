"""Monitors jobs on the cluster: follows their logs, stops them, and concludes their trials."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lora_tune.base.errors import LauncherError
from lora_tune.config.study import Study
from lora_tune.controller import acceptance, conclusion, healing, limits, node_faults, policy, pruning
from lora_tune.controller.acceptance import (
    ObservedPauses,
    implausibility,
    impossible_times,
    other_log,
    suspended_text,
    unplaced,
    why_untrue,
)
from lora_tune.controller.dependencies import Clock, Dependencies
from lora_tune.controller.jobs import Jobs, JobStops
from lora_tune.controller.shared_jobs import SharedJobs
from lora_tune.controller.sweep_records import EventLog
from lora_tune.launchers.base import JobState, JobStatus
from lora_tune.logs.arrival import LOOK_SECONDS
from lora_tune.logs.failures import Diagnosis, FailureKind, diagnose
from lora_tune.logs.follower import LogFollower, ReadBudget
from lora_tune.logs.run import Eval, RunLog
from lora_tune.search import pace
from lora_tune.search.objectives import objective_of
from lora_tune.search.physics import far_over_memory
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Attempt, StopKind, Trial, TrialState, UnitOfWork, Verdict

# A verdict as one short line for the screen; the full sentence is in driver.log, status and the report.

_NUMBER, _OUTCOME = 9, 11
"""Widths of the columns "trial 12" and "infeasible", in characters."""


def verdict_line(trial: Trial, outcome: str, sentence: str) -> str:
    """``trial 3  pruned      diverged: ...``, with aligned columns.

    A replicate is ``run 3    reached     trial 13: ...``, because its number is not that of the repeated trial.
    outcome: display name of the verdict. sentence: why.
    """
    if trial.replicate_of is None:
        return f"{f'trial {trial.number}':<{_NUMBER}}{outcome:<{_OUTCOME}} {sentence}"
    return f"{f'run {trial.number}':<{_NUMBER}}{outcome:<{_OUTCOME}} trial {trial.replicate_of}: {sentence}"


def first_clause(sentence: str) -> str:
    """A sentence up to its first semicolon, without statistics and remedies."""
    return sentence.partition("; ")[0]


# Concludes trials whose jobs have ended: records a verdict and metrics, or another attempt.


class EndedJobs:
    """Concludes the trials of one sweep whose jobs have ended. It submits and stops nothing."""

    def __init__(self, study: Study, clock: Clock, work: UnitOfWork, jobs: Jobs, events: EventLog) -> None:
        self._study, self._clock, self._work, self._jobs, self._events = study, clock, work, jobs, events

    def follow(self, study: Study) -> None:
        """Use this study from now on."""
        self._study = study

    def conclude(self, trial: Trial, attempt: Attempt, status: JobStatus, log: LogFollower) -> None:
        """Record the conclusion of one job's end. log: read to its end."""
        now = self._clock.monotonic_now()
        runs = log.runs() if trial.replicates > 1 else ()
        run = next((r for r in runs if r.reached(self._study.target)), log.run())
        attempt = replace(attempt, ended_at=attempt.ended_at or now)
        status = conclusion.of_training(status, run)
        diagnosis = self._diagnosis(attempt, status, log, run)
        attempts = [*self._work.sweep.attempts_of(trial.number)[:-1], attempt]
        suspect = node_faults.may_be_the_nodes(self._work.sweep, attempt, now)
        over = diagnosis.kind is FailureKind.INFEASIBLE and far_over_memory(self._study, trial.parameters)
        action = conclusion.conclude(
            self._study, attempts, status, run, diagnosis, trial=trial, node_at_fault=suspect, far_over_memory=over
        )
        if isinstance(action, conclusion.Finish) and action.verdict in conclusion.PLAUSIBLE_VERDICTS:
            untrue = self._untrue(trial, attempt, status, log, (*runs, run))
            if untrue is not None:
                diagnosis, action = untrue, conclusion.refuse(self._study, attempts, untrue)
        failed = isinstance(action, conclusion.Retry) or action.verdict in (Verdict.FAILED, Verdict.INFEASIBLE)
        kind = (diagnosis.kind or FailureKind.UNKNOWN) if failed else FailureKind.NONE
        shown = diagnosis if failed else Diagnosis()
        attempt = replace(attempt, failure=kind.value, line=shown.sentence, remedy=shown.remedy)
        self._work.put_attempt(attempt)
        self._events.warn_once(f"log of trial {trial.number}", "")
        attempts[-1] = attempt
        if isinstance(action, conclusion.Retry):
            text = f"trial {trial.number}: again: {action.sentence}"
            if kind is FailureKind.CAPACITY:
                self._events.log("retry", trial=trial.number, text=text)
                self._events.warn_once("capacity", limits.NO_NODES)
            else:
                line = verdict_line(trial, "again", action.sentence)
                self._events.note(text, "retry", shown=line, trial=trial.number)
            self._work.put_trial(replace(trial, state=TrialState.WAITING, sentence=action.sentence))
            return
        self._finish(trial, action, attempts, run, runs, log)

    def _untrue(
        self, trial: Trial, attempt: Attempt, status: JobStatus, log: LogFollower, runs: Sequence[RunLog]
    ) -> Diagnosis | None:
        """Why one of the attempt's runs is implausible, or None."""
        if foreign := self._jobs.foreign_record(attempt):
            remedy = "files of different trials were swapped; the trial is run again"
            return Diagnosis(FailureKind.FOREIGN, foreign, remedy)
        if incomplete := log.incomplete():
            return _incomplete(incomplete)
        if other := other_log(attempt, status, *log.ends()):
            return other
        if mixed_in := acceptance.unplaced(status, runs[-1], left_out=log.leaves_out_pauses):
            return mixed_in
        written = self._jobs.written(trial)
        for run in runs:
            at_once = functools.partial(log.read_at_once, run)
            untrue = why_untrue(
                self._study, trial, attempt, status, run,
                written=written, stamped=log.stamped, read_at_once=at_once,
            )  # fmt: skip
            if untrue is not None:
                return untrue
        if attempt.stop in (StopKind.PRUNED, StopKind.CAPPED):
            return None
        return implausibility(self._study, self._work.sweep, trial, status, runs[-1], attempt.number)

    def _diagnosis(self, attempt: Attempt, status: JobStatus, log: LogFollower, run: RunLog) -> Diagnosis:
        """Why the attempt failed, if it did."""
        if log.unreadable:
            remedy = "check the file and its disk; the trial is run again"
            return Diagnosis(FailureKind.INFRASTRUCTURE, log.unreadable, remedy)
        state, code = status.state.value, status.exit_code
        lived = status.state in (JobState.ENDED, JobState.TIME_LIMIT)  # of what a node's fault ended Slurm says 0, too
        if lived and code == 0 and attempt.stop is StopKind.NONE and (unmatched := log.unmatched(ended=True)):
            # An incomplete or missing log says nothing about the study's pattern.
            truncated = _incomplete(incomplete) if (incomplete := log.incomplete()) else None
            return (
                truncated
                or other_log(attempt, status, *log.ends())
                or policy.unread(self._study, unmatched, str(log.path))
            )
        diagnosed = diagnose(
            status.output or log.failures(), state=state, exit_code=code, reason=status.reason, run=run,
            unit=self._study.progress_unit,
        )  # fmt: skip
        return conclusion.cause(attempt, status, diagnosed, log_cut=log.cut)

    def _finish(
        self,
        trial: Trial,
        action: conclusion.Finish,
        attempts: Sequence[Attempt],
        run: RunLog,
        runs: Sequence[RunLog],
        log: LogFollower,
    ) -> None:
        now = self._clock.monotonic_now()
        stop = None if trial.probe else objective_of(self._study).stop(run)
        change = healing.healing_samples(trial, run, self._work.sweep)
        if change > 0 and math.isfinite(change):
            trial = replace(trial, metrics=replace(trial.metrics, healing_samples=change))
        metrics = trial.metrics | conclusion.measured(self._study, trial, attempts, run, now)
        metrics |= TrialMetrics(runs=conclusion.several(self._study, trial, runs))
        again = conclusion.again_text(self._study, run)
        sentence, end = (
            "; ".join(filter(None, (action.sentence, again))),
            stop or (run.evals[-1] if run.evals else None),
        )
        if end is not None and (estimated := log.estimated_seconds(run, end.seconds)):
            metrics = replace(metrics, estimated_seconds=round(estimated, 3))
            sentence = f"{sentence}; {conclusion.estimate_text(metrics)}"
        if run.paused_seconds:
            metrics = replace(metrics, paused_seconds=round(run.paused_seconds, 3))
            sentence = f"{sentence}; {conclusion.pause_text(metrics)}"
        done = replace(
            trial, seconds=stop.seconds if stop else None, samples=stop.samples if stop else None, metrics=metrics
        ).finished(action.verdict, sentence, now)
        self._work.put_trial(done)
        for other in pace.at_reference_pace(self._study, self._work.sweep):
            self._work.put_trial(other)
        outcome = objective_of(self._study).verdict_name(action.verdict)
        failed = action.verdict is Verdict.FAILED
        shown = "; ".join(filter(None, (sentence, attempts[-1].remedy))) if failed else first_clause(sentence)
        self._events.note(
            f"trial {trial.number}: {outcome}: {sentence}", "finished",
            shown=verdict_line(trial, outcome, shown), trial=trial.number,
        )  # fmt: skip


def _incomplete(evidence: str) -> Diagnosis:
    remedy = "it was changed while the job ran, so part of the run is unknown; the trial is run again"
    return Diagnosis(FailureKind.INFRASTRUCTURE, evidence, remedy)


@dataclass(frozen=True, slots=True)
class PollResult:
    """The result of one poll. fresh: new evals by trial. absent: attempts intended but never seen on the cluster."""

    fresh: Mapping[int, Sequence[Eval]]
    absent: tuple[Attempt, ...] = ()


def _never_began(status: JobStatus) -> bool:
    """Whether a job was never seen; one that has begun counts as ended, even if the record of its end is lost."""
    return status.state is JobState.LOST and status.started_at is None


class JobMonitor:
    """Polls jobs and records their state; ``stops`` ends those to be stopped. It submits nothing."""

    def __init__(
        self, study: Study, dependencies: Dependencies, work: UnitOfWork, jobs: Jobs, events: EventLog, stops: JobStops
    ) -> None:
        self._study, self._dependencies, self._work, self._jobs, self._events = study, dependencies, work, jobs, events
        self._stops, self._ended = stops, EndedJobs(study, dependencies.clock, work, jobs, events)
        self._logs: dict[tuple[int, int], LogFollower] = {}
        self._ran_at: dict[tuple[int, int], float] = {}
        self._pauses: dict[tuple[int, int], ObservedPauses] = {}
        self._over: dict[tuple[int, int], JobStatus] = {}
        self._adopted = frozenset(work.sweep.attempts)
        self.shared = SharedJobs(dependencies.launcher, work, events)

    def poll(self, live: Sequence[Attempt]) -> PollResult:
        """Query the launcher once for all jobs, and then read each job's log."""
        if not live:
            return PollResult({})
        try:
            statuses = self._dependencies.launcher.poll([self._jobs.ticket(a) for a in live])
        except LauncherError as error:
            self._events.warn_once("cluster", str(error))
            return PollResult({})
        self._events.warn_once("cluster", "")
        absent = tuple(a for a in live if a.submitted_at is None and _never_began(statuses[a.job_name]))
        budget = ReadBudget(len(live))
        fresh = {a.trial: self._advance(a, statuses[a.job_name], budget) for a in live if a not in absent}
        self.shared.charge(self._dependencies.clock.now())
        return PollResult(fresh, absent)

    def _advance(self, attempt: Attempt, status: JobStatus, budget: ReadBudget) -> Sequence[Eval]:
        """Act on one job's changes since the last poll; returns its new evals."""
        now = self._dependencies.clock.monotonic_now()
        key = attempt.trial, attempt.number
        status = self._over.get(key, status)  # the cluster may forget a job while its log is still being read
        status = self._pauses.setdefault(key, ObservedPauses()).update(status, now)
        attempt = replace(
            attempt,
            state=status.state.value,
            job_id=status.job_id or attempt.job_id,
            submitted_at=attempt.submitted_at or attempt.intended_at,
            started_at=status.started_at or attempt.started_at,
            ended_at=status.ended_at if not status.state.alive else None,
            nodes=status.nodes or attempt.nodes,
            node_share=status.node_share,
            exit_code=status.exit_code,
        )
        log = self._log(attempt)
        log.exclude_pauses(status.pauses)
        limit = budget.allows(stamped=log.stamped)
        read = log.poll(now, drain=not status.state.alive, started=attempt.started_at, limit=limit)
        budget.spent(read, stamped=log.stamped)
        if (unseen := log.newly_guessed()) >= LOOK_SECONDS:
            text = f"its log was not read for {unseen:.0f} s, and it has no time stamps"
            self._events.note(
                f"trial {attempt.trial}: {text}: times of that stretch are estimated", "guessed", trial=attempt.trial
            )
        trial = self._work.sweep.trials[attempt.trial]
        self._events.warn_once(f"log of trial {trial.number}", log.unreadable)
        evals = log.run().evals if trial.replicates == 1 else tuple(e for run in log.runs() for e in run.evals)
        fresh = self._work.see_evals(attempt, evals)
        self._work.put_attempt(attempt)
        if status.state.alive:
            self._watch(trial, attempt, status, log, fresh=bool(fresh))
        elif read and log.unread:
            self._over[key] = status
            self._remark(trial, f"its job is over; {log.unread / 1e6:.0f} MB of its log are still to be read")
        else:
            self._ended.conclude(trial, attempt, status, log)
            for kept in (self._logs, self._ran_at, self._pauses, self._over):
                kept.pop(key, None)
        return fresh

    def _watch(self, trial: Trial, attempt: Attempt, status: JobStatus, log: LogFollower, *, fresh: bool) -> None:
        run, now = log.run(), self._dependencies.clock.monotonic_now()
        if status.state is JobState.RUNNING:
            self._events.warn_once("capacity", "")
        snapshot = policy.JobSnapshot(
            attempt=attempt,
            status=status,
            run=run,
            grew_at=max(log.grew_at, *(end for _, end in status.pauses), 0.0),
            ran_at=self._ran_at.setdefault((attempt.trial, attempt.number), now)
            if status.state is JobState.RUNNING
            else 0.0,
            begun=sum(r.run_start_ms is not None for r in log.runs()) if trial.replicates > 1 else 1,
            unreadable=log.unreadable,
            unmatched=log.unmatched(ended=False),
            log=str(log.path),
            trial=trial,
        )
        action = policy.watch(self._study, snapshot, now)
        if isinstance(action, policy.Stop):
            action = pruning.by_the_machine(self._study, self._work.sweep, trial, run, action)
        if action is None and attempt.stop is StopKind.NONE and (fresh or log.train_is_new()):
            # A curve with impossible times is judged after the job has ended, and measured again.
            impossible = impossible_times(run, status, stamped=log.stamped)
            trusted = impossible is None and unplaced(status, run, left_out=log.leaves_out_pauses) is None
            judgement = pruning.judge_curve(self._study, self._work.sweep, trial, run) if trusted else None
            if isinstance(judgement, pruning.Audited):
                self._audit(trial, judgement, run)
            else:
                action = judgement
        if isinstance(action, policy.Stop):
            # Not shown on screen, because the verdict follows with the same words.
            self._events.log("stop", trial=trial.number, text=f"trial {trial.number}: stopping it: {action.sentence}")
            self._stops.stop(attempt, action)
        elif isinstance(action, policy.Kill):
            self._stops.kill(attempt)
            self._remark(trial, action.sentence or trial.sentence)
        elif attempt.stop is StopKind.NONE:
            waits = limits.waiting(status) or suspended_text(status)
            self._remark(trial, waits or policy.silence_warning(self._study, snapshot, now))

    def _audit(self, trial: Trial, audited: pruning.Audited, run: RunLog) -> None:
        """Record once that the rule would stop a trial that continues as an audit."""
        if trial.metrics.audited:
            return
        metrics = replace(trial.metrics, audited=audited.sentence, audited_samples=run.evals[-1].samples)
        self._work.put_trial(replace(trial, metrics=metrics))
        self._events.note(
            f"trial {trial.number}: an audit, continues although {audited.sentence}", "audit", trial=trial.number
        )

    def _remark(self, trial: Trial, sentence: str) -> None:
        """Record a remark on a trial's job, and report it once."""
        if sentence != trial.sentence:
            self._work.put_trial(replace(trial, sentence=sentence))
            if sentence:
                self._events.note(f"trial {trial.number}: {sentence}", "remark", trial=trial.number)

    def follow(self, study: Study) -> None:
        """Use this study from now on, after a user changed its budget."""
        self._study = study
        self._ended.follow(study)
        self._dependencies.launcher.widen(study.budget.parallel)

    def _log(self, attempt: Attempt) -> LogFollower:
        key = (attempt.trial, attempt.number)
        if key not in self._logs:
            trial = self._work.sweep.trials[attempt.trial]
            job = self._jobs.job(trial, attempt)
            now = self._dependencies.clock.monotonic_now()
            unseen = key in self._adopted or now - (attempt.submitted_at or now) > LOOK_SECONDS
            begun = (attempt.started_at or attempt.intended_at) if unseen else None
            log = LogFollower(job.log, self._jobs.reader(trial, attempt), now, begun=begun)
            self._logs[key] = log
        return self._logs[key]
