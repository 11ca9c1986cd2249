"""What the driver does about the jobs that are on the cluster: reads their logs, stops them, concludes their trials."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lora_tune.base.errors import LauncherError
from lora_tune.config.study import Study
from lora_tune.controller import conclusion, healing, node_faults, policy, pruning, queueing, results
from lora_tune.controller.acceptance import impossible_times, other_log, why_untrue
from lora_tune.controller.dependencies import Dependencies
from lora_tune.controller.event_log import EventLog
from lora_tune.controller.jobs import Jobs
from lora_tune.controller.shared_jobs import SharedJobs
from lora_tune.controller.verdict_line import first_clause, verdict_line
from lora_tune.launchers.base import JobState, JobStatus, Widens
from lora_tune.logs.arrival_times import LOOK_SECONDS
from lora_tune.logs.failures import Diagnosis, FailureKind, diagnose
from lora_tune.logs.follower import LogFollower
from lora_tune.logs.run import Eval, RunLog
from lora_tune.objectives import objective_of
from lora_tune.search.study_physics import far_over
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Attempt, StopKind, Trial, TrialState, Verdict
from lora_tune.store.unit_of_work import UnitOfWork


@dataclass(frozen=True, slots=True)
class PollResult:
    """What one look at the jobs showed. fresh: new evals by trial. absent: intended, and never on the cluster."""

    fresh: Mapping[int, Sequence[Eval]]
    absent: tuple[Attempt, ...] = ()


def _never_began(status: JobStatus) -> bool:
    """Whether a job was never heard of: one that has begun is over, also where the record of its end is gone."""
    return status.state is JobState.LOST and status.started_at is None


class JobMonitor:
    """Looks at jobs and writes what it sees and does into the book. It submits nothing."""

    def __init__(
        self, study: Study, dependencies: Dependencies, work: UnitOfWork, jobs: Jobs, events: EventLog
    ) -> None:
        self._study, self._dependencies, self._work, self._jobs, self._events = study, dependencies, work, jobs, events
        self._logs: dict[tuple[int, int], LogFollower] = {}
        self._ran_at: dict[tuple[int, int], float] = {}
        self._adopted = frozenset(work.sweep.attempts)
        self.shared = SharedJobs(dependencies.launcher, work, events)

    def look(self, live: Sequence[Attempt]) -> PollResult:
        """One question to the launcher for all, and then each job's log."""
        if not live:
            return PollResult({})
        try:
            statuses = self._dependencies.launcher.poll([self._jobs.ticket(a) for a in live])
        except LauncherError as error:
            self._events.trouble("cluster", str(error))
            return PollResult({})
        self._events.trouble("cluster", "")
        absent = tuple(a for a in live if a.submitted_at is None and _never_began(statuses[a.job_name]))
        fresh = {a.trial: self._advance(a, statuses[a.job_name]) for a in live if a not in absent}
        self.shared.book(self._dependencies.clock.now())
        return PollResult(fresh, absent)

    def _advance(self, attempt: Attempt, status: JobStatus) -> Sequence[Eval]:
        """Act on what one job did since the last look; returns its new evals."""
        now = self._dependencies.clock.monotonic_now()
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
        log.poll(now, drain=not status.state.alive, started=attempt.started_at)
        if (unseen := log.newly_guessed()) >= LOOK_SECONDS:
            text = f"its log was not read for {unseen:.0f} s, and it has no time stamps"
            self._events.note(
                f"trial {attempt.trial}: {text}: times of that stretch are estimated", "guessed", trial=attempt.trial
            )
        trial = self._work.sweep.trials[attempt.trial]
        self._events.trouble(f"log of trial {trial.number}", log.unreadable)
        evals = log.run().evals if trial.replicates == 1 else tuple(e for run in log.runs() for e in run.evals)
        fresh = self._work.see_evals(attempt, evals)
        self._work.put_attempt(attempt)
        if status.state.alive:
            self._watch(trial, attempt, status, log, fresh=bool(fresh))
        else:
            self._conclude(trial, attempt, status, log)
        return fresh

    def _watch(self, trial: Trial, attempt: Attempt, status: JobStatus, log: LogFollower, *, fresh: bool) -> None:
        run, now = log.run(), self._dependencies.clock.monotonic_now()
        look = policy.JobSnapshot(
            attempt=attempt,
            status=status,
            run=run,
            grew_at=log.grew_at,
            ran_at=self._ran_at.setdefault((attempt.trial, attempt.number), now)
            if status.state is JobState.RUNNING
            else 0.0,
            begun=sum(r.run_start_ms is not None for r in log.runs()) if trial.replicates > 1 else 1,
            unreadable=log.unreadable,
            unmatched=log.unmatched(ended=False),
            log=str(log.path),
            trial=trial,
        )
        action = policy.watch(self._study, look, now)
        if action is None and attempt.stop is StopKind.NONE and (fresh or log.train_is_new()):
            # What is judged by times that cannot be true is judged when the job is over, and measured again.
            trusted = impossible_times(run, status, stamped=log.stamped) is None
            judgement = pruning.judge_curve(self._study, self._work.sweep, trial, run) if trusted else None
            if isinstance(judgement, pruning.Audited):
                self._audit(trial, judgement, run)
            else:
                action = judgement
        if isinstance(action, policy.Stop):
            # Not shown: the verdict follows, with the same words.
            self._events.log("stop", trial=trial.number, text=f"trial {trial.number}: stopping it: {action.sentence}")
            self._stop(attempt, action, now)
        elif isinstance(action, policy.Kill):
            self._events.log("kill", trial=trial.number, text=f"trial {trial.number} does not end: kill")
            self._remark(trial, action.sentence or trial.sentence)
            self._work.put_attempt(replace(attempt, killed_at=now))
            self._cancel(attempt, force=True)
        elif attempt.stop is StopKind.NONE:
            self._remark(trial, queueing.waiting(status) or policy.quiet(self._study, look, now))

    def _audit(self, trial: Trial, audited: pruning.Audited, run: RunLog) -> None:
        """Remember that the rule would stop a trial that goes on; said once."""
        if trial.metrics.audited:
            return
        metrics = replace(trial.metrics, audited=audited.sentence, audited_samples=run.evals[-1].samples)
        self._work.put_trial(replace(trial, metrics=metrics))
        self._events.note(
            f"trial {trial.number}: an audit, continues although {audited.sentence}", "audit", trial=trial.number
        )

    def _remark(self, trial: Trial, sentence: str) -> None:
        """Show with the trial what a person should know of its job; said once."""
        if sentence != trial.sentence:
            self._work.put_trial(replace(trial, sentence=sentence))
            if sentence:
                self._events.note(f"trial {trial.number}: {sentence}", "remark", trial=trial.number)

    def _stop(self, attempt: Attempt, action: policy.Stop, now: float) -> None:
        why = action.diagnosis
        stopped = replace(attempt, stop=action.kind, stop_sentence=action.sentence, stop_at=now)
        self._work.put_attempt(replace(stopped, failure=why.kind.value, line=why.line, remedy=why.remedy))
        self._cancel(attempt, force=False)

    def give_up(self, attempt: Attempt, sentence: str = "") -> None:
        """Ask a job to end because a person wants it; sentence: who, "" for who drives the sweep."""
        self._stop(attempt, policy.Stop(StopKind.USER, sentence), self._dependencies.clock.monotonic_now())

    def follow(self, study: Study) -> None:
        """Go by this study from now on: a person has changed its budget."""
        self._study = study
        if isinstance(self._dependencies.launcher, Widens):
            self._dependencies.launcher.widen(study.budget.parallel)

    def _cancel(self, attempt: Attempt, *, force: bool) -> None:
        try:
            self._dependencies.launcher.cancel(self._jobs.ticket(attempt), force=force)
        except LauncherError as error:
            self._events.trouble("cluster", str(error))  # the kill that follows tries again

    def _conclude(self, trial: Trial, attempt: Attempt, status: JobStatus, log: LogFollower) -> None:
        now = self._dependencies.clock.monotonic_now()
        runs = log.runs() if trial.replicates > 1 else ()
        run = next((r for r in runs if r.reached(self._study.target)), log.run())
        attempt = replace(attempt, ended_at=attempt.ended_at or now)
        status = conclusion.of_training(status, run)
        diagnosis = self._found(attempt, status, log, run)
        attempts = [*self._work.sweep.attempts_of(trial.number)[:-1], attempt]
        suspect = node_faults.may_be_the_nodes(self._work.sweep, attempt, now)
        over = diagnosis.kind is FailureKind.INFEASIBLE and far_over(self._study, trial.parameters)
        action = conclusion.conclude(
            self._study, attempts, status, run, diagnosis, trial=trial, node_at_fault=suspect, far_over=over
        )
        if isinstance(action, conclusion.Finish) and action.verdict in conclusion.BELIEVED:
            untrue = self._untrue(trial, attempt, status, log, (*runs, run))
            if untrue is not None:
                diagnosis, action = untrue, conclusion.refuse(self._study, attempts, untrue)
        failed = isinstance(action, conclusion.Retry) or action.verdict in (Verdict.FAILED, Verdict.INFEASIBLE)
        kind = (diagnosis.kind or FailureKind.UNKNOWN) if failed else FailureKind.NONE
        told = diagnosis if failed else Diagnosis()
        attempt = replace(attempt, failure=kind.value, line=told.told, remedy=told.remedy)
        self._work.put_attempt(attempt)
        self._logs.pop((attempt.trial, attempt.number), None)
        self._ran_at.pop((attempt.trial, attempt.number), None)
        self._events.trouble(f"log of trial {trial.number}", "")
        attempts[-1] = attempt
        if isinstance(action, conclusion.Retry):
            line = verdict_line(trial, "again", action.sentence)
            self._events.note(
                f"trial {trial.number}: again: {action.sentence}", "retry", shown=line, trial=trial.number
            )
            self._work.put_trial(replace(trial, state=TrialState.WAITING, sentence=action.sentence))
            return
        self._finish(trial, action, attempts, run, runs, log)

    def _untrue(
        self, trial: Trial, attempt: Attempt, status: JobStatus, log: LogFollower, runs: Sequence[RunLog]
    ) -> Diagnosis | None:
        """Why one of the attempt's runs cannot be believed, or None."""
        if foreign := self._jobs.foreign_record(attempt):
            remedy = "files of different trials were swapped; the trial is run again"
            return Diagnosis(FailureKind.FOREIGN, foreign, remedy)
        if incomplete := log.incomplete():
            return _incomplete(incomplete)
        if other := other_log(attempt, status, *log.ends()):
            return other
        for run in runs:
            at_once = functools.partial(log.read_at_once, run)
            untrue = why_untrue(self._study, trial, attempt, status, run, stamped=log.stamped, read_at_once=at_once)
            if untrue is not None:
                return untrue
        return None

    def _found(self, attempt: Attempt, status: JobStatus, log: LogFollower, run: RunLog) -> Diagnosis:
        """Why the attempt failed, if it did."""
        if log.unreadable:
            remedy = "check the file and its disk; the trial is run again"
            return Diagnosis(FailureKind.INFRASTRUCTURE, log.unreadable, remedy)
        state, code = status.state.value, status.exit_code
        if code == 0 and attempt.stop is StopKind.NONE and (unmatched := log.unmatched(ended=True)):
            # A log that is gone, or of which a part is, says nothing about the study's pattern.
            gone = _incomplete(incomplete) if (incomplete := log.incomplete()) else None
            return (
                gone or other_log(attempt, status, *log.ends()) or policy.unread(self._study, unmatched, str(log.path))
            )
        seen = diagnose(
            status.output or log.failures(), state=state, exit_code=code, reason=status.reason, run=run,
            unit=self._study.progress_unit,
        )  # fmt: skip
        return conclusion.cause(attempt, status, seen, log_cut=log.cut)

    def _finish(
        self,
        trial: Trial,
        action: conclusion.Finish,
        attempts: Sequence[Attempt],
        run: RunLog,
        runs: Sequence[RunLog],
        log: LogFollower,
    ) -> None:
        now = self._dependencies.clock.monotonic_now()
        stop = None if trial.probe else objective_of(self._study).stop(run)
        change = healing.healing_samples(trial, run, self._work.sweep)
        if change > 0 and math.isfinite(change):
            trial = replace(trial, metrics=replace(trial.metrics, healing_samples=change))
        metrics = trial.metrics | results.measured(self._study, trial, attempts, run, now)
        metrics |= TrialMetrics(runs=results.several(self._study, trial, runs))
        sentence, end = action.sentence, stop or (run.evals[-1] if run.evals else None)
        if end is not None and (estimated := log.estimated_seconds(run, end.seconds)):
            metrics = replace(metrics, estimated_seconds=round(estimated, 3))
            sentence = f"{sentence}; {results.estimate_words(metrics)}"
        done = replace(
            trial, seconds=stop.seconds if stop else None, samples=stop.samples if stop else None, metrics=metrics
        ).finished(action.verdict, sentence, now)
        self._work.put_trial(done)
        word = objective_of(self._study).word(action.verdict)
        failed = action.verdict is Verdict.FAILED
        told = "; ".join(filter(None, (sentence, attempts[-1].remedy))) if failed else first_clause(sentence)
        self._events.note(
            f"trial {trial.number}: {word}: {sentence}", "finished",
            shown=verdict_line(trial, word, told), trial=trial.number,
        )  # fmt: skip

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


def _incomplete(what: str) -> Diagnosis:
    remedy = "it was changed while the job ran, so part of the run is unknown; the trial is run again"
    return Diagnosis(FailureKind.INFRASTRUCTURE, what, remedy)
