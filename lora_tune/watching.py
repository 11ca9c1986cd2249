"""What the driver does about the jobs that are on the cluster: reads their logs, stops them, concludes their trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lora_tune import decide, judge, outcome
from lora_tune.book import Book
from lora_tune.controller import node_faults
from lora_tune.diagnose import Diagnosis, FailureKind, diagnose
from lora_tune.errors import InputError, LauncherError
from lora_tune.facts import Eval, Run
from lora_tune.follow import FollowedLog
from lora_tune.jobs import Jobs
from lora_tune.launchers.base import JobState, JobStatus
from lora_tune.ports import Ports
from lora_tune.records import Attempt, StopKind, Trial, TrialState, Verdict
from lora_tune.study import Study
from lora_tune.voice import Voice

GUESS_SAID = 2.0
"""Seconds for which nobody read a log, from which on that is said."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look at the jobs showed. fresh: new evals by trial. absent: intended, and not on the cluster."""

    fresh: Mapping[int, Sequence[Eval]]
    absent: tuple[Attempt, ...] = ()


class Watch:
    """Looks at jobs and writes what it sees and does into the book. It submits nothing."""

    def __init__(self, study: Study, ports: Ports, book: Book, jobs: Jobs, voice: Voice) -> None:
        self._study, self._ports, self._book, self._jobs, self._voice = study, ports, book, jobs, voice
        self._logs: dict[tuple[int, int], FollowedLog] = {}
        self._adopted = frozenset(book.sweep.attempts)

    def look(self, live: Sequence[Attempt]) -> Seen:
        """One question to the launcher for all, and then each job's log."""
        if not live:
            return Seen({})
        try:
            statuses = self._ports.launcher.poll([self._jobs.ticket(a) for a in live])
        except LauncherError as error:
            self._voice.trouble("cluster", str(error))
            return Seen({})
        self._voice.trouble("cluster", "")
        absent = tuple(a for a in live if a.submitted_at is None and statuses[a.job_name].state is JobState.LOST)
        fresh = {a.trial: self._advance(a, statuses[a.job_name]) for a in live if a not in absent}
        return Seen(fresh, absent)

    def _advance(self, attempt: Attempt, status: JobStatus) -> Sequence[Eval]:
        """Act on what one job did since the last look; returns its new evals."""
        now = self._ports.clock.unhurried()
        attempt = replace(
            attempt,
            state=status.state.value,
            job_id=status.job_id or attempt.job_id,
            submitted_at=attempt.submitted_at or attempt.intended_at,
            started_at=status.started_at or attempt.started_at,
            ended_at=status.ended_at if not status.state.alive else None,
            nodes=status.nodes or attempt.nodes,
            exit_code=status.exit_code,
        )
        log = self._log(attempt)
        log.poll(now, drain=not status.state.alive)
        trial = self._book.sweep.trials[attempt.trial]
        self._voice.trouble(f"log of trial {trial.number}", log.unreadable)
        evals = log.run().evals if trial.replicates == 1 else tuple(e for run in log.runs() for e in run.evals)
        fresh = self._book.see_evals(attempt, evals)
        self._book.put_attempt(attempt)
        if status.state.alive:
            self._watch(trial, attempt, status, log, fresh=bool(fresh))
        else:
            self._conclude(trial, attempt, status, log)
        return fresh

    def _watch(self, trial: Trial, attempt: Attempt, status: JobStatus, log: FollowedLog, *, fresh: bool) -> None:
        run, now = log.run(), self._ports.clock.unhurried()
        look = decide.Look(
            attempt=attempt,
            status=status,
            run=run,
            grew_at=log.grew_at,
            replicates=trial.replicates,
            begun=sum(r.run_start_ms is not None for r in log.runs()) if trial.replicates > 1 else 1,
            unreadable=log.unreadable,
            probe=trial.probe,
        )
        action = decide.watch(self._study, look, now)
        if action is None and attempt.stop is StopKind.NONE and (fresh or log.train_is_new()):
            action = judge.judge_curve(self._study, self._book.sweep, trial, run)
        if isinstance(action, decide.Stop):
            self._voice.note(f"trial {trial.number}: stopping it: {action.sentence}", "stop", trial=trial.number)
            self._stop(attempt, action, now)
        elif isinstance(action, decide.Kill):
            self._voice.log("kill", trial=trial.number, text=f"trial {trial.number} does not end: kill")
            self._remark(trial, action.sentence or trial.sentence)
            self._book.put_attempt(replace(attempt, killed_at=now))
            self._cancel(attempt, force=True)
        elif attempt.stop is StopKind.NONE:
            self._remark(trial, decide.waiting(status))

    def _remark(self, trial: Trial, sentence: str) -> None:
        """Show with the trial what a person should know of its job; said once."""
        if sentence != trial.sentence:
            self._book.put_trial(replace(trial, sentence=sentence))
            if sentence:
                self._voice.note(f"trial {trial.number}: {sentence}", "remark", trial=trial.number)

    def _stop(self, attempt: Attempt, action: decide.Stop, now: float) -> None:
        why = action.diagnosis
        stopped = replace(attempt, stop=action.kind, stop_sentence=action.sentence, stop_at=now)
        self._book.put_attempt(replace(stopped, failure=why.kind.value, line=why.line, remedy=why.remedy))
        self._cancel(attempt, force=False)

    def give_up(self, attempt: Attempt) -> None:
        """Ask a job to end because the user wants it."""
        self._stop(attempt, decide.Stop(StopKind.USER, ""), self._ports.clock.unhurried())

    def _cancel(self, attempt: Attempt, *, force: bool) -> None:
        try:
            self._ports.launcher.cancel(self._jobs.ticket(attempt), force=force)
        except LauncherError as error:
            self._voice.trouble("cluster", str(error))  # the kill that follows tries again

    def _conclude(self, trial: Trial, attempt: Attempt, status: JobStatus, log: FollowedLog) -> None:
        now = self._ports.clock.unhurried()
        runs = log.runs() if trial.replicates > 1 else ()
        run = next((r for r in runs if r.reached(self._study.objective.target)), log.run())
        attempt = replace(attempt, ended_at=attempt.ended_at or now)
        found = self._found(attempt, status, log, run)
        attempts = [*self._book.sweep.attempts_of(trial.number)[:-1], attempt]
        suspect = node_faults.may_be_the_nodes(self._book.sweep, attempt, now)
        action = decide.conclude(self._study, attempts, status, run, found, probe=trial.probe, node_at_fault=suspect)
        failed = isinstance(action, decide.Retry) or action.verdict in (Verdict.FAILED, Verdict.INFEASIBLE)
        kind = (found.kind or FailureKind.UNKNOWN) if failed else FailureKind.NONE
        told = found if failed else Diagnosis()
        attempt = replace(attempt, failure=kind.value, line=told.told, remedy=told.remedy)
        self._book.put_attempt(attempt)
        self._logs.pop((attempt.trial, attempt.number), None)
        self._voice.trouble(f"log of trial {trial.number}", "")
        attempts[-1] = attempt
        if isinstance(action, decide.Retry):
            self._voice.note(f"trial {trial.number}: again: {action.sentence}", "retry", trial=trial.number)
            self._book.put_trial(replace(trial, state=TrialState.WAITING, sentence=action.sentence))
            return
        self._finish(trial, action, attempts, run, runs)

    def _found(self, attempt: Attempt, status: JobStatus, log: FollowedLog, run: Run) -> Diagnosis:
        """Why the attempt failed, if it did."""
        if log.unreadable:
            remedy = "see to the file and its disk; the trial is run again"
            return Diagnosis(FailureKind.INFRASTRUCTURE, log.unreadable, remedy)
        state, code = status.state.value, status.exit_code
        seen = diagnose(log.failures(), state=state, exit_code=code, reason=status.reason, run=run)
        return decide.found(attempt, status, seen)

    def _finish(
        self, trial: Trial, action: decide.Finish, attempts: Sequence[Attempt], run: Run, runs: Sequence[Run]
    ) -> None:
        now, target = self._ports.clock.unhurried(), self._study.objective.target
        stop = run.reached(target) if not self._study.maximise and not trial.probe else None
        if stop is not None and stop.samples <= 0:
            raise InputError(f"objective.target {target:g} is met at step 0; give a lower one")
        done = replace(
            trial,
            seconds=stop.seconds if stop else None,
            samples=stop.samples if stop else None,
            facts=outcome.facts(self._study, trial, attempts, run, now)
            | ({"runs": outcome.several(self._study, trial, runs)} if runs else {}),
        ).finished(action.verdict, action.sentence, now)
        self._book.put_trial(done)
        self._voice.note(
            f"trial {trial.number}: {action.verdict.value}: {action.sentence}", "finished", trial=trial.number
        )

    def _log(self, attempt: Attempt) -> FollowedLog:
        key = (attempt.trial, attempt.number)
        if key not in self._logs:
            trial = self._book.sweep.trials[attempt.trial]
            job = self._jobs.job(trial, attempt)
            begun = (attempt.started_at or attempt.intended_at) if key in self._adopted else None
            log = FollowedLog(job.log, self._jobs.reader(trial, attempt), self._ports.clock.unhurried(), begun=begun)
            if log.guessed_seconds >= GUESS_SAID:
                text = f"nobody read its log for {log.guessed_seconds:.0f} s, and it has no time stamps"
                self._voice.note(
                    f"trial {trial.number}: {text}: times of that stretch are estimated", "guessed", trial=trial.number
                )
            self._logs[key] = log
        return self._logs[key]
