"""What a job's end means for its trial: its verdict and metrics on record, or another attempt."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from lora_tune.config.study import Study
from lora_tune.controller import conclusion, healing, node_faults, pauses, policy, queueing, results
from lora_tune.controller.acceptance import other_log, why_untrue
from lora_tune.controller.dependencies import Clock
from lora_tune.controller.doubted_times import why_doubted
from lora_tune.controller.jobs import Jobs
from lora_tune.controller.sweep_records import EventLog
from lora_tune.controller.verdict_line import first_clause, verdict_line
from lora_tune.launchers.base import JobStatus
from lora_tune.logs.failures import Diagnosis, FailureKind, diagnose
from lora_tune.logs.follower import LogFollower
from lora_tune.logs.run import RunLog
from lora_tune.search import pace
from lora_tune.search.objectives import objective_of
from lora_tune.search.physics import far_over
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Attempt, StopKind, Trial, TrialState, Verdict
from lora_tune.store.unit_of_work import UnitOfWork


class EndedJobs:
    """Concludes the trials of one sweep whose jobs are over. It submits and stops nothing."""

    def __init__(self, study: Study, clock: Clock, work: UnitOfWork, jobs: Jobs, events: EventLog) -> None:
        self._study, self._clock, self._work, self._jobs, self._events = study, clock, work, jobs, events

    def follow(self, study: Study) -> None:
        """Go by this study from now on."""
        self._study = study

    def conclude(self, trial: Trial, attempt: Attempt, status: JobStatus, log: LogFollower) -> None:
        """Put on record what one job's end means. log: read to its end."""
        now = self._clock.monotonic_now()
        runs = log.runs() if trial.replicates > 1 else ()
        run = next((r for r in runs if r.reached(self._study.target)), log.run())
        attempt = replace(attempt, ended_at=attempt.ended_at or now)
        status = conclusion.of_training(status, run)
        diagnosis = self._diagnosis(attempt, status, log, run)
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
        shown = diagnosis if failed else Diagnosis()
        attempt = replace(attempt, failure=kind.value, line=shown.told, remedy=shown.remedy)
        self._work.put_attempt(attempt)
        self._events.trouble(f"log of trial {trial.number}", "")
        attempts[-1] = attempt
        if isinstance(action, conclusion.Retry) and kind is FailureKind.CAPACITY:
            self._events.log("retry", trial=trial.number, text=f"trial {trial.number}: again: {action.sentence}")
            self._events.trouble("capacity", queueing.NO_NODES)
            self._work.put_trial(replace(trial, state=TrialState.WAITING, sentence=action.sentence))
            return
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
        if mixed_in := pauses.unplaced(status, runs[-1], left_out=log.leaves_out_pauses):
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
        return why_doubted(self._study, self._work.sweep, trial, status, runs[-1], attempt.number)

    def _diagnosis(self, attempt: Attempt, status: JobStatus, log: LogFollower, run: RunLog) -> Diagnosis:
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
        now = self._clock.monotonic_now()
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
        if run.paused_seconds:
            metrics = replace(metrics, paused_seconds=round(run.paused_seconds, 3))
            sentence = f"{sentence}; {results.pause_words(metrics)}"
        done = replace(
            trial, seconds=stop.seconds if stop else None, samples=stop.samples if stop else None, metrics=metrics
        ).finished(action.verdict, sentence, now)
        self._work.put_trial(done)
        for other in pace.at_reference_pace(self._study, self._work.sweep):
            self._work.put_trial(other)
        word = objective_of(self._study).word(action.verdict)
        failed = action.verdict is Verdict.FAILED
        shown = "; ".join(filter(None, (sentence, attempts[-1].remedy))) if failed else first_clause(sentence)
        self._events.note(
            f"trial {trial.number}: {word}: {sentence}", "finished",
            shown=verdict_line(trial, word, shown), trial=trial.number,
        )  # fmt: skip


def _incomplete(evidence: str) -> Diagnosis:
    remedy = "it was changed while the job ran, so part of the run is unknown; the trial is run again"
    return Diagnosis(FailureKind.INFRASTRUCTURE, evidence, remedy)
