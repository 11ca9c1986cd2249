"""Turns a trial into a job: records the intention, submits it, and handles the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lora_tune.base.errors import LauncherError, LimitError, RefusedError
from lora_tune.base.paths import SweepPaths, new_token
from lora_tune.base.registry import on_this_machine
from lora_tune.config.study import Study
from lora_tune.controller import changed_study, healing, node_faults, shared_jobs
from lora_tune.controller.commits import at_commit
from lora_tune.controller.dependencies import Dependencies
from lora_tune.controller.jobs import Jobs
from lora_tune.controller.sweep_records import EventLog
from lora_tune.launchers.base import JobState
from lora_tune.launchers.files import write_files
from lora_tune.logs.failures import FailureKind
from lora_tune.store.records import Attempt, Trial, TrialState, UnitOfWork, Verdict

# A scheduler that accepts no more jobs: how long to retry, and what becomes of the trial.

UNKNOWN_SECONDS = 600.0
"""How long an unknown refusal is retried before it counts as permanent."""


LIMIT_SECONDS = 60.0
"""Longest pause between submissions while a scheduler's job limit is reached."""


class Refusal:
    """Tracks refusals since the last accepted job. final: why nothing more is submitted, None: continue."""

    def __init__(self) -> None:
        self.final: RefusedError | None = None
        self._since: float | None = None
        self._limited_since: float | None = None
        self._queried_at = 0.0

    def taken(self) -> None:
        """Record an accepted job."""
        self._since = self._limited_since = None

    def limited(self, now: float) -> None:
        """Record that at ``now`` (epoch seconds) a job limit was reached: a present job must end first.

        However long that takes, it is not a permanent refusal.
        """
        self._since = None
        self._limited_since = now if self._limited_since is None else self._limited_since
        self._queried_at = now

    def may_ask(self, now: float) -> bool:
        """Whether to retry at ``now``: under a limit at growing intervals, at most a minute."""
        if self._limited_since is None:
            return True
        wait = min(LIMIT_SECONDS, (self._queried_at - self._limited_since) / 4)
        return abs(now - self._queried_at) >= wait  # abs: a clock change must not block submissions

    def refused(
        self, study: Study, trial: Trial, attempt: Attempt, error: RefusedError, now: float
    ) -> tuple[Trial, Attempt]:
        """The trial and its attempt after a refusal at ``now`` (epoch seconds).

        A trial that requests too much, while others request less, has failed. All others stay open at no cost to any
        budget: once a user has fixed the cause, the same attempt is submitted.
        """
        refused = replace(attempt, failure=FailureKind.CONFIGURATION.value, line=error.answer, remedy=error.remedy)
        if error.by_size and study.search_space.varies_nodes:
            ended = replace(refused, state=JobState.LOST.value, ended_at=now)
            return trial.finished(Verdict.FAILED, f"configuration: {error.answer}", now), ended
        if error.permanent:
            self.final = error
        self.delayed(error, now)
        return replace(trial, sentence=str(error)), refused

    def delayed(self, error: RefusedError, now: float) -> None:
        """Record that nothing can be submitted at ``now``; the temporary ``error`` becomes final if it lasts."""
        self._since = now if self._since is None else self._since
        if now - self._since >= UNKNOWN_SECONDS:
            self.final = self.final or error


class Submissions:
    """Creates attempts of one sweep. save: saves all changes; False during a database outage."""

    def __init__(
        self,
        study: Study,
        paths: SweepPaths,
        dependencies: Dependencies,
        work: UnitOfWork,
        jobs: Jobs,
        events: EventLog,
        save: Callable[[], bool],
    ) -> None:
        self._study, self._paths, self._dependencies = study, paths, dependencies
        self._work, self._jobs, self._events, self._save = work, jobs, events, save
        self._refusal = Refusal()
        self._unanswered_since: dict[str, float] = {}  # by job name

    @property
    def refused(self) -> RefusedError | None:
        """The permanent refusal by the cluster, if any: nothing more is submitted then."""
        return self._refusal.final

    def submit(self, trial: Trial) -> None:
        """Create a new attempt; its intention is recorded before it is launched."""
        sentence = changed_study.edited(self._dependencies.workload)
        self._events.warn_once("base", sentence and f"{sentence}; nothing is started until it is put back")
        if sentence:
            self._refusal.delayed(
                RefusedError(f"trial {trial.number}", sentence, changed_study.REMEDY), self._dependencies.clock.now()
            )
            return
        number = len(self._work.sweep.attempts_of(trial.number))
        attempt = Attempt(
            trial=trial.number,
            number=number,
            job_name=self._study.job_name(trial.number, number),
            folder=str(self._paths.attempt(trial.number, number).folder.relative_to(self._paths.root)),
            token=new_token(),
            intended_at=self._dependencies.clock.now(),
            node_count=self._study.search_space.node_count(trial.parameters),
            exclude_nodes=self._nodes_to_leave_out(trial),
        )
        self._work.put_attempt(attempt)
        self._work.put_trial(replace(trial, state=TrialState.RUNNING, sentence=""))
        if self._save():
            self.launch(attempt)

    def _nodes_to_leave_out(self, trial: Trial) -> tuple[str, ...]:
        """Nodes to exclude: those this trial failed on, and suspects; none on a single machine."""
        if on_this_machine(self._study.site.launcher):
            return ()
        suspect = node_faults.suspect_nodes(self._work.sweep, self._dependencies.clock.now())
        for node, why in suspect.items():
            self._events.warn_once(f"node {node}", f"node {node} is excluded for a day: {why}")
        earlier = [a for a in self._work.sweep.attempts_of(trial.number) if a.fixed_at is None]
        failed_nodes = {node for attempt in earlier for node in attempt.nodes if attempt.failure in node_faults.ANY}
        return tuple(sorted(failed_nodes | suspect.keys()))

    def unanswered_seconds(self, attempt: Attempt) -> float:
        """How long an intended attempt has been missing on the cluster, in seconds.

        An intention in the future means that the clock was set back: count from when it was first missed.
        """
        now = self._dependencies.clock.now()
        since = min(now, attempt.intended_at, self._unanswered_since.get(attempt.job_name, now))
        self._unanswered_since[attempt.job_name] = since
        return now - since

    def launch(self, attempt: Attempt) -> None:
        """Pass a recorded attempt to the launcher."""
        trial, now = self._work.sweep.trials[attempt.trial], self._dependencies.clock.now()
        if not self._refusal.may_ask(now):
            return
        if sentence := self._jobs.foreign_folder(attempt):
            attempt = self._jobs.elsewhere(attempt)
            text = f"trial {trial.number}: {sentence}; it is left as it is, and this attempt runs in {attempt.folder}"
            self._events.note(text, "foreign folder", trial=trial.number)
            self._work.put_attempt(attempt)
            if not self._save():
                return
        earlier = [a for a in self._work.sweep.attempts_of(trial.number) if a.number < attempt.number]
        job = shared_jobs.with_packing_limit(self._study, self._jobs.job(trial, attempt), earlier)
        stated = trial.metrics | healing.remembered({**trial.parameters, **job.environment})
        if stated != trial.metrics:
            trial = replace(trial, metrics=stated)
            self._work.put_trial(trial)
        try:
            job = at_commit(job, trial)
            write_files(job)
            job_id = self._dependencies.launcher.submit(job)
        except LimitError as error:
            self._refusal.limited(now)
            self._events.warn_once("limit", f"{error.limit}; trials wait for each other")
            if trial.sentence != str(error):
                self._work.put_trial(replace(trial, sentence=str(error)))
            return
        except (LauncherError, OSError) as error:  # such as a full disk; retried until it is fixed
            self._events.warn_once(f"submission of {attempt.job_name}", str(error))
            noted = replace(trial, sentence=str(error))
            if isinstance(error, RefusedError):
                noted, attempt = self._refusal.refused(self._study, trial, attempt, error, now)
                self._work.put_attempt(attempt)
            if noted != trial:
                self._work.put_trial(noted)
            return
        self._events.warn_once(f"submission of {attempt.job_name}", "")
        self._refusal.taken()
        if trial.sentence:
            self._work.put_trial(replace(trial, sentence=""))
        with_id = replace(attempt, job_id=job_id, submitted_at=now, state=JobState.QUEUED.value)
        self._work.put_attempt(replace(with_id, failure="", line="", remedy=""))
        self._events.log("submitted", trial=trial.number, attempt=attempt.number, job=job_id)
