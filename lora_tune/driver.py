"""The loop that drives a sweep.

Each tick reads rows, job states and new log lines, decides (``decide``), acts, and records. A restart is an ordinary
tick: jobs that run are adopted, none is lost, none is started twice. The driver is the only writer.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from lora_tune import decide, open_schedule
from lora_tune.book import Book
from lora_tune.diagnose import diagnose
from lora_tune.errors import InputError, LauncherError, StoreError, SurroundingsError
from lora_tune.facts import Eval
from lora_tune.follow import FollowedLog
from lora_tune.journal import Journal
from lora_tune.launchers.base import JobState, JobStatus, Launcher, Ticket
from lora_tune.paths import SweepPaths
from lora_tune.records import Attempt, StopKind, Sweep, Trial, TrialState, Verdict
from lora_tune.store import Changes, Lease, Records
from lora_tune.study import Study
from lora_tune.workloads.base import Job, Proposal, Workload

if TYPE_CHECKING:
    from lora_tune.search.session import Asked

FILL_SECONDS = 0.5
"""Time of one tick for proposals: with a thousand slots to fill, running trials must not wait for the last of them."""


class Clock(Protocol):
    """Time as the driver sees it; epoch seconds."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class RealClock:
    """This machine's clock."""

    def now(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class View(Protocol):
    """Somebody who watches. Neither call may fail the sweep."""

    def update(self, study: Study, sweep: Sweep, now: float) -> None: ...

    def line(self, text: str) -> None: ...


class Search(Protocol):
    """Who proposes and is told: the sampler of a sweep (``search.session``), or a race (``confirm.race``).

    Raises StoreError where its side of the database does not answer.
    """

    def ask(self) -> Asked | str:
        """A proposal, or why there is none now, in words; with nothing open that ends the loop."""
        ...

    def unknown(self, known: Collection[int]) -> list[Asked]:
        """Proposals that were made and are not among ``known``: a driver died in between."""
        ...

    def report(self, number: int, evals: Sequence[Eval]) -> None: ...

    def tell(self, record: Trial) -> None: ...

    def flush(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of the driver ended. reason: a sentence. interrupted: jobs may still run."""

    reason: str
    interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Everything outside that the driver speaks to."""

    workload: Workload
    launcher: Launcher
    store: Records
    session: Search
    clock: Clock
    view: View


class Driver:
    """Drives one sweep until its budget is spent. Construct, then :meth:`run`.

    ``interrupt`` may be set at any time (from a signal handler): the loop ends after the tick in progress.
    settle: seconds after an unanswered submission before it counts as not made (a scheduler answers late).
    """

    def __init__(
        self, study: Study, paths: SweepPaths, ports: Ports, lease: Lease, *, period: float, settle: float = 0.0
    ) -> None:
        self.interrupt = False
        self._study, self._paths, self._ports, self._lease = study, paths, ports, lease
        self._period, self._settle = period, settle
        self._journal = Journal(paths.driver_log)
        found = ports.store.load(study.name)
        assert found is not None, "the sweep's row is made before its driver"
        self._book = Book(found)
        self._logs: dict[tuple[int, int], FollowedLog] = {}
        self._unsaved = Changes()
        self._trouble = ""

    @property
    def sweep(self) -> Sweep:
        """The records as they are now."""
        return self._book.sweep

    def run(self) -> Outcome:
        """Tick until nothing is left to do or to wait for."""
        self._adopt()
        while True:
            reason = self.tick()
            if reason:
                return Outcome(reason)
            if self.interrupt:
                return Outcome("interrupted", interrupted=True)
            self._ports.clock.sleep(self._period)

    def _adopt(self) -> None:
        """Take in what an earlier driver left: proposals that Optuna knows and we do not."""
        for asked in self._ports.session.unknown(self.sweep.trials.keys()):
            self._note(f"trial {asked.number} was proposed and not written down: adopted", "adopted", asked.number)
            self._new_trial(asked)
        for trial in self._book.open_trials():
            if trial.state is TrialState.RUNNING:
                self._journal.write(self._now(), "adopted", trial=trial.number)

    def tick(self) -> str:
        """One round. Returns why the sweep is over, "" while it is not."""
        self._look_at_jobs()
        for trial in self._book.open_trials():
            if trial.state is TrialState.WAITING:
                self._submit(trial)
        reason = self._refill()
        self._save()
        self._tell()
        self._ports.view.update(self._study, self.sweep, self._now())
        if self._book.open_trials() or self._book.untold() or self._unsaved:
            return ""
        return reason

    # -- jobs ------------------------------------------------------------------------------------------------

    def _look_at_jobs(self) -> None:
        live = [self._newest(t) for t in self._book.open_trials() if t.state is TrialState.RUNNING]
        if not live:
            return
        try:
            statuses = self._ports.launcher.poll([self._ticket(a) for a in live])
        except LauncherError as error:
            self._say_once(str(error))
            return
        self._trouble = ""
        fresh = {a.trial: self._advance(a, statuses[a.job_name]) for a in live}
        # Optuna hears of evals when everything is decided: a tenth of a second each, and jobs wait to be stopped.
        for number, evals in fresh.items():
            if evals:
                self._guard(functools.partial(self._ports.session.report, number, evals))
        if any(fresh.values()):
            self._guard(self._ports.session.flush)

    def _advance(self, attempt: Attempt, status: JobStatus) -> Sequence[Eval]:
        """Act on what one job did since the last look; returns its new evals."""
        now = self._now()
        if status.state is JobState.LOST and attempt.submitted_at is None:
            if now - attempt.intended_at >= self._settle:
                self._launch(attempt)
            return ()
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
        trial = self.sweep.trials[attempt.trial]
        evals = log.run().evals if trial.replicates == 1 else tuple(e for run in log.runs() for e in run.evals)
        fresh = self._book.see_evals(attempt, evals)
        self._book.put_attempt(attempt)
        if status.state.alive:
            self._watch(trial, attempt, status, log, judge=bool(fresh))
        else:
            self._conclude(trial, attempt, status, log)
        return fresh

    def _watch(self, trial: Trial, attempt: Attempt, status: JobStatus, log: FollowedLog, *, judge: bool) -> None:
        run, now = log.run(), self._now()
        look = decide.Look(
            attempt=attempt,
            status=status,
            run=run,
            grew_at=log.grew_at,
            replicates=trial.replicates,
            begun=sum(r.run_start_ms is not None for r in log.runs()) if trial.replicates > 1 else 1,
        )
        action = decide.watch(self._study, look, now)
        if action is None and attempt.stop is StopKind.NONE and (judge or log.train_is_new()):
            action = decide.judge_curve(self._study, self.sweep, trial, run)
        if isinstance(action, decide.Stop):
            self._note(f"trial {trial.number}: stopping it: {action.sentence}", "stop", trial.number)
            self._book.put_attempt(replace(attempt, stop=action.kind, stop_sentence=action.sentence, stop_at=now))
            self._cancel(attempt, force=False)
        elif isinstance(action, decide.Kill):
            self._note(f"trial {trial.number} does not end: kill", "kill", trial.number)
            self._book.put_attempt(replace(attempt, killed_at=now))
            self._cancel(attempt, force=True)

    def _cancel(self, attempt: Attempt, *, force: bool) -> None:
        try:
            self._ports.launcher.cancel(self._ticket(attempt), force=force)
        except LauncherError as error:
            self._say_once(str(error))  # the kill that follows tries again

    def _conclude(self, trial: Trial, attempt: Attempt, status: JobStatus, log: FollowedLog) -> None:
        now, target = self._now(), self._study.objective.target
        runs = log.runs() if trial.replicates > 1 else ()
        run = next((r for r in runs if r.reached(target)), log.run())
        attempt = replace(attempt, ended_at=attempt.ended_at or now)
        state, code = status.state.value, status.exit_code
        found = diagnose(log.failures(), state=state, exit_code=code, reason=status.reason, run=run)
        attempts = [*self.sweep.attempts_of(trial.number)[:-1], attempt]
        action = decide.conclude(self._study, attempts, status, run, found)
        failed = isinstance(action, decide.Retry) or action.verdict in (Verdict.FAILED, Verdict.INFEASIBLE)
        if failed:
            kind = found.kind or "unknown"
            attempt = replace(attempt, failure=kind, line=found.line, remedy=found.remedy)
        self._book.put_attempt(attempt)
        self._logs.pop((attempt.trial, attempt.number), None)
        attempts[-1] = attempt
        if isinstance(action, decide.Retry):
            self._note(f"trial {trial.number}: again: {action.sentence}", "retry", trial.number)
            self._book.put_trial(replace(trial, state=TrialState.WAITING, sentence=action.sentence))
            return
        stop = run.reached(target) if not self._study.maximise else None
        if stop is not None and stop.samples <= 0:
            raise InputError(f"objective.target {target:g} is met at step 0; give a lower one")
        done = replace(
            trial,
            seconds=stop.seconds if stop else None,
            samples=stop.samples if stop else None,
            facts=decide.facts(self._study, trial, attempts, run, now)
            | ({"runs": decide.several(self._study, trial, runs)} if runs else {}),
        ).finished(action.verdict, action.sentence, now)
        self._book.put_trial(done)
        self._note(f"trial {trial.number}: {action.verdict.value}: {action.sentence}", "finished", trial.number)

    # -- proposals and submissions -----------------------------------------------------------------------------

    def _refill(self) -> str:
        """Propose until the slots are full; returns why no more, which ends the sweep once nothing runs."""
        if (failed := decide.hopeless(self.sweep)) is not None:
            self._save()
            raise SurroundingsError(
                f"{decide.SAME_FAILURES} trials in a row failed: {failed.sentence}; "
                f"{self._newest(failed).remedy or 'see the job logs'}; mend it and run the same command again"
            )
        until = self._now() + FILL_SECONDS
        while not self.interrupt and self._now() <= until:
            reason = decide.may_propose(self._study, self.sweep, self._now())
            if reason:
                return reason
            try:
                asked = self._ports.session.ask()
            except StoreError as error:
                self._say_once(str(error))
                return ""
            if isinstance(asked, str):
                return asked
            self._submit(self._new_trial(asked))
        return ""

    def _new_trial(self, asked: Asked) -> Trial:
        parameters = asked.parameters or self._study.search_space.resolve(asked.tuned)
        schedule, reason = ({}, "") if asked.parameters else open_schedule.chosen(self._study, self.sweep, parameters)
        trial = Trial(
            number=asked.number,
            seed=self._study.trial_seed(asked.number),
            tuned=asked.tuned,
            parameters={**parameters, **schedule},
            why="; ".join(filter(None, (asked.why, reason))),
            proposed_at=self._now(),
            replicate_of=asked.replicate_of,
            replicates=asked.replicates,
        )
        self._book.put_trial(trial)
        return trial

    def _submit(self, trial: Trial) -> None:
        """A new attempt: the intention is on record before the launcher hears of it."""
        earlier = self.sweep.attempts_of(trial.number)
        number = len(earlier)
        attempt = Attempt(
            trial=trial.number,
            number=number,
            job_name=f"{self._study.name}-{trial.number:04d}-{number}",
            folder=str(self._paths.attempt(trial.number, number).folder.relative_to(self._paths.root)),
            intended_at=self._now(),
            node_count=self._study.search_space.node_count(trial.parameters),
            exclude_nodes=tuple(
                sorted({n for a in earlier for n in a.nodes if a.failure in ("infrastructure", "flaky", "infeasible")})
            ),
        )
        self._book.put_attempt(attempt)
        self._book.put_trial(replace(trial, state=TrialState.RUNNING, sentence=""))
        self._save()
        if not self._unsaved:
            self._launch(attempt)

    def _launch(self, attempt: Attempt) -> None:
        trial = self.sweep.trials[attempt.trial]
        job = replace(self._job(trial, attempt), exclude_nodes=attempt.exclude_nodes)
        write_files(job)
        now = self._now()
        try:
            job_id = self._ports.launcher.submit(job)
        except LauncherError as error:
            self._say_once(str(error))
            return
        self._book.put_attempt(replace(attempt, job_id=job_id, submitted_at=now, state=JobState.QUEUED.value))
        self._journal.write(now, "submitted", trial=trial.number, attempt=attempt.number, job=job_id)

    def cancel_all(self, limit: float) -> bool:
        """Cancel every open trial and wait at most ``limit`` seconds for the jobs; True when all are gone."""
        deadline = self._now() + limit
        for trial in self._book.open_trials():
            if trial.state is TrialState.WAITING:
                self._book.put_trial(trial.finished(Verdict.CANCELLED, "cancelled by the user", self._now()))
                continue
            attempt = replace(self._newest(trial), stop=StopKind.USER, stop_at=self._now())
            self._book.put_attempt(attempt)
            self._cancel(attempt, force=False)
        while self._book.open_trials() and self._now() < deadline:
            self._look_at_jobs()
            self._ports.clock.sleep(self._period)
        self._save()
        self._tell()
        return not self._book.open_trials()

    # -- records -----------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self._unsaved = self._unsaved + self._book.take_changes()
        try:
            self._ports.store.save(self._lease, self._unsaved, self._now())
        except StoreError as error:
            self._say_once(f"{error}; going on, {len(self._unsaved.trials)} trial changes wait to be written")
            return
        self._unsaved = Changes()

    def _tell(self) -> None:
        """Tell the search of trials whose end is on record; telling again after a crash changes nothing."""
        untold = self._book.untold()
        if self._unsaved or not untold:
            return
        told = [t for t in untold if self._guard(functools.partial(self._ports.session.tell, t))]
        if self._guard(self._ports.session.flush):
            for trial in told:
                self._book.put_trial(replace(trial, told=True))
        self._save()

    def _guard(self, action: Callable[[], None]) -> bool:
        """True when done. Optuna's side may be away; our tables hold the facts, and ends are told later."""
        try:
            action()
        except StoreError as error:
            self._say_once(str(error))
            return False
        return True

    def _newest(self, trial: Trial) -> Attempt:
        return self.sweep.attempts_of(trial.number)[-1]

    def _ticket(self, attempt: Attempt) -> Ticket:
        return Ticket(
            name=attempt.job_name,
            folder=self._paths.root / attempt.folder,
            job_id=attempt.job_id,
            submitted_at=attempt.submitted_at or attempt.intended_at,
        )

    def _job(self, trial: Trial, attempt: Attempt) -> Job:
        return self._ports.workload.job(proposal(trial, attempt.number), self._paths.root / attempt.folder)

    def _log(self, attempt: Attempt) -> FollowedLog:
        key = (attempt.trial, attempt.number)
        if key not in self._logs:
            trial = self.sweep.trials[attempt.trial]
            make_reader = functools.partial(self._ports.workload.reader, proposal(trial, attempt.number))
            self._logs[key] = FollowedLog(self._job(trial, attempt).log, make_reader, self._now())
        return self._logs[key]

    def _now(self) -> float:
        return self._ports.clock.now()

    def _note(self, text: str, event: str, trial: int) -> None:
        self._journal.write(self._now(), event, trial=trial, text=text)
        self._ports.view.line(text)

    def _say_once(self, trouble: str) -> None:
        """Trouble that may last is said when it begins, not every tick."""
        if trouble != self._trouble:
            self._trouble = trouble
            self._journal.write(self._now(), "trouble", text=trouble)
            self._ports.view.line(trouble)


def proposal(trial: Trial, attempt: int) -> Proposal:
    """What a workload is told of a trial."""
    return Proposal(
        number=trial.number,
        attempt=attempt,
        seed=trial.seed,
        parameters=trial.parameters,
        replicates=trial.replicates,
    )


def write_files(job: Job) -> None:
    """Make the job's folder and write its files."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for name, text in job.files.items():
        (job.folder / name).write_text(text, encoding="utf-8")
