"""Records of a sweep: trials, attempts and evals, their in-memory changes, and their form as database rows."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from lora_tune.base.errors import InputError
from lora_tune.logs.run import Eval
from lora_tune.store.metrics import ConfirmedChoice, TrialMetrics, as_mapping, from_mapping

Value = str | int | float | bool
T = TypeVar("T")


class TrialState(enum.StrEnum):
    """Progress of a trial."""

    WAITING = "waiting"
    """Proposed; its next attempt is not submitted yet."""
    RUNNING = "running"
    """An attempt is queued, running or being stopped."""
    FINISHED = "finished"


class Verdict(enum.StrEnum):
    """Outcome of a finished trial."""

    REACHED = "reached"
    CENSORED = "censored"
    """Ended without reaching the target: its time to target is longer than observed."""
    PRUNED = "pruned"
    CAPPED = "capped"
    """Stopped because it could no longer beat the best trial: censored, not bad."""
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    """Its attempts failed for reasons unrelated to its parameters."""
    CANCELLED = "cancelled"


class StopKind(enum.StrEnum):
    """Why the driver stopped a job."""

    NONE = ""
    PRUNED = "pruned"
    CAPPED = "capped"
    REACHED = "reached"
    """The target is in the log, but the job kept running."""
    TIME_LIMIT = "time limit"
    SILENT = "silent"
    """Its log stopped growing."""
    QUEUE = "queue"
    """It was queued for too long."""
    USER = "user"
    UNREAD = "unread"
    """Its log has lines that look like evals, but the study's pattern matches none."""
    PROBED = "probed"
    """A throughput probe has measured enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One job of one trial. Times are epoch seconds, None while unknown.

    token: unique among all attempts of all sweeps, and stored in its job's files; "" in records of an earlier release.
    node_share: its share of its nodes' time; below 1 if trials share a job.
    overhead_seconds: how long the shared job that was started for it held its nodes without training; 0 without shared
    jobs. A cost of the sweep, not of this trial.
    state: a JobState, or "intended" from the recorded intention until the launcher answers.
    failure, line, remedy: diagnosis of a failed or abandoned attempt, else empty.
    fixed_at: when a user resumed the sweep after this attempt failed in set-up; it is not charged to the budget then.
    """

    trial: int
    number: int
    job_name: str
    folder: str
    token: str = ""
    job_id: str = ""
    state: str = "intended"
    intended_at: float = 0.0
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    node_count: int = 1
    node_share: float = 1.0
    overhead_seconds: float = 0.0
    nodes: tuple[str, ...] = ()
    exclude_nodes: tuple[str, ...] = ()
    exit_code: int | None = None
    stop: StopKind = StopKind.NONE
    stop_sentence: str = ""
    stop_at: float | None = None
    killed_at: float | None = None
    failure: str = ""
    line: str = ""
    remedy: str = ""
    fixed_at: float | None = None

    def node_hours(self, now: float) -> float:
        """Node-hours of this attempt up to ``now``, start-up included; 0 before it starts."""
        if self.started_at is None:
            return 0.0
        end = self.ended_at if self.ended_at is not None else now
        return max(0.0, end - self.started_at) * self.node_share * self.node_count / 3600

    @property
    def overhead_hours(self) -> float:
        """Node-hours of :attr:`overhead_seconds`."""
        return self.overhead_seconds * self.node_count / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One proposal and its outcome.

    tuned: values as proposed. parameters: all resolved values.
    seconds, samples: time and samples to the target as logged (first eval at the target), None if not reached. metrics:
    all other measurements.
    replicate_of: trial of the sweep whose configuration is run again, None for a proposal of the search. replicates:
    runs in this job, with seeds ``seed``, ``seed + 1``, ...; each is recorded in ``metrics.runs``.
    probe: a short run that only measures its layout's speed.
    base_values: if the trial measures a base config, every variable that this sets, by name.
    request: number of the user's request that it answers, else None. point: values of the study's enqueued point, by
    the study's names, else None.
    sampler_attributes: state that the sampler stored with this proposal, by place: "user" and "system" attributes of
    the trial, "study" (system attributes of the study).
    """

    number: int
    seed: int
    tuned: Mapping[str, Value]
    parameters: Mapping[str, Value]
    why: str = ""
    state: TrialState = TrialState.WAITING
    verdict: Verdict | None = None
    sentence: str = ""
    seconds: float | None = None
    samples: float | None = None
    metrics: TrialMetrics = field(default_factory=TrialMetrics)
    proposed_at: float = 0.0
    finished_at: float | None = None
    replicate_of: int | None = None
    replicates: int = 1
    probe: bool = False
    base_values: Mapping[str, str] = field(default_factory=dict)
    request: int | None = None
    point: Mapping[str, Value] | None = None
    sampler_attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def objective(self) -> float:
        """The value by which trials are compared. Raises InputError if the trial has none (yet)."""
        if self.metrics.objective is None:
            why = f"it ended as {self.verdict.value}" if self.verdict else "it has not ended"
            raise InputError(f"trial {self.number} has no objective: {why}; metrics.objective is None there")
        return self.metrics.objective

    @property
    def has_value(self) -> bool:
        """Whether it reached the target (or completed, without one) and has an objective."""
        return self.verdict is Verdict.REACHED and self.metrics.objective is not None

    @property
    def reference_seconds(self) -> float | None:
        """Seconds to the target at the sweep's reference pace; None if not reached."""
        return None if self.seconds is None else self.seconds / (self.metrics.slower or 1.0)

    @property
    def passed_over(self) -> bool:
        """Whether confirmation runs preferred another configuration."""
        return self.metrics.confirmed is not None and self.metrics.confirmed.choice is ConfirmedChoice.PASSED_OVER

    def finished(self, verdict: Verdict, sentence: str, now: float) -> Trial:
        """This trial, finished."""
        return replace(self, state=TrialState.FINISHED, verdict=verdict, sentence=sentence, finished_at=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorRun:
    """A run of an old log, used as prior data.

    source: who ran it and where; runs of one source share its conditions. log, digest: the file and its SHA-256.
    values: by this study's parameter names. taken_at: epoch seconds of the ingestion.
    """

    source: str
    log: str
    digest: str
    taken_at: float
    values: Mapping[str, Value]
    evals: tuple[Eval, ...]
    last_samples: float
    samples_per_second: float | None = None
    diverged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecords:
    """All records of one study: trials by number, attempts and evals by (trial, attempt), and prior runs.

    id: unique among all sweeps, and stored in its folder. folder: where it was last driven. Both are "" for a sweep
    that was never in a database.
    """

    name: str
    digest: str
    study_toml: str
    began_at: float
    id: str = ""
    folder: str = ""
    trials: Mapping[int, Trial] = field(default_factory=dict)
    attempts: Mapping[tuple[int, int], Attempt] = field(default_factory=dict)
    evals: Mapping[tuple[int, int], tuple[Eval, ...]] = field(default_factory=dict)
    priors: tuple[PriorRun, ...] = ()
    _cache: dict[Hashable, Any] = field(init=False, default_factory=dict, repr=False, compare=False)
    _next: dict[tuple[int, int], int] = field(init=False, default_factory=dict, repr=False, compare=False)
    """Cached next_number by the numbers of trials and attempts, which grow in a driver's live view."""

    @property
    def next_number(self) -> int:
        """The number of the next trial. Numbers of lost trials that still have attempts are not reused."""
        size = (len(self.trials), len(self.attempts))
        if size not in self._next:
            self._next.clear()
            self._next[size] = 1 + max((*self.trials, *(trial for trial, _ in self.attempts)), default=-1)
        return self._next[size]

    def attempts_of(self, trial: int) -> list[Attempt]:
        """The attempts of a trial, oldest first."""
        attempts: list[Attempt] = []
        while (attempt := self.attempts.get((trial, len(attempts)))) is not None:
            attempts.append(attempt)
        return attempts

    def nodes_of(self, trial: int) -> tuple[str, ...]:
        """The sorted nodes of a trial's newest attempt; empty if the launcher names none."""
        attempts = self.attempts_of(trial)
        return tuple(sorted(attempts[-1].nodes)) if attempts else ()

    def last_evals(self, trial: int) -> tuple[Eval, ...]:
        """The evals of the trial's newest attempt that has any."""
        for attempt in reversed(self.attempts_of(trial)):
            if evals := self.evals.get((trial, attempt.number)):
                return evals
        return ()

    def ranked(self, *, maximise: bool = False) -> Sequence[Trial]:
        """All ended trials, best first. All other rankings of a sweep are parts of this one.

        First trials with an objective, by it; then by lowest eval, then fewest samples to it. Trials without a finite
        eval are omitted.
        """
        return self.once(("ranked", maximise), lambda: self._ranked(-1.0 if maximise else 1.0))

    def _ranked(self, sign: float) -> list[Trial]:
        places: list[tuple[tuple[float, ...], Trial]] = []
        for trial in self.trials.values():
            if trial.has_value:
                places.append(((0.0, sign * trial.objective, 0.0), trial))
            elif trial.verdict is not None and (point := self.lowest_eval(trial.number)) is not None:
                places.append(((1.0, point.loss, point.samples), trial))
        return [trial for _, trial in sorted(places, key=lambda place: (place[0], place[1].number))]

    def lowest_eval(self, trial: int) -> Eval | None:
        """The lowest eval of the trial's newest attempt, the earliest if equal; None if there is none."""
        known = [e for e in self.last_evals(trial) if math.isfinite(e.loss) and e.samples > 0]
        return min(known, key=lambda e: (e.loss, e.samples), default=None)

    def best(self, *, maximise: bool = False) -> Trial | None:
        """The best trial with an objective that no confirmation has passed over."""
        return next((t for t in self.ranked(maximise=maximise) if t.has_value and not t.passed_over), None)

    def reached(self) -> list[Trial]:
        """The trials that reached the target."""
        return self.once("reached", lambda: [t for t in self.trials.values() if t.verdict is Verdict.REACHED])

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()``, which may depend on finished trials only; cached until another trial finishes.

        With thousands of trials the same values are needed at each eval of each running trial.
        """
        if key not in self._cache:
            self._cache[key] = make()
        derived: T = self._cache[key]
        return derived

    def carry_cache(self, earlier: StudyRecords) -> None:
        """Share the cache of :meth:`once` with ``earlier``, in which the same trials have finished."""
        object.__setattr__(self, "_cache", earlier._cache)  # shared: later values serve both

    def forget(self) -> None:
        """Clear the cache of :meth:`once`."""
        self._cache.clear()

    def node_hours(self, now: float) -> float:
        """Node-hours of all attempts and of shared jobs up to ``now``."""
        return sum(attempt.node_hours(now) for attempt in self.attempts.values()) + self.overhead_hours

    def charged_hours(self, now: float) -> float:
        """Node-hours that count against a budget: without attempts that failed in a set-up which was fixed since."""
        fixed = sum(attempt.node_hours(now) for attempt in self.attempts.values() if attempt.fixed_at is not None)
        return self.node_hours(now) - fixed

    @property
    def overhead_hours(self) -> float:
        """Node-hours of shared jobs without training, as the driver last observed them."""
        return sum(attempt.overhead_hours for attempt in self.attempts.values())


# Records as rows and JSON, and back.


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of one tick."""

    trials: tuple[Trial, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    evals: tuple[tuple[int, int, int, Eval], ...] = ()
    """(trial, attempt, position, eval)"""

    def __bool__(self) -> bool:
        return bool(self.trials or self.attempts or self.evals)

    def __add__(self, later: Changes) -> Changes:
        return Changes(self.trials + later.trials, self.attempts + later.attempts, self.evals + later.evals)


def trial_row(sweep: str, trial: Trial) -> dict[str, Any]:
    verdict = trial.verdict.value if trial.verdict else None
    row = {"sweep": sweep, "number": trial.number, "state": trial.state.value, "verdict": verdict}
    return row | {"seconds": trial.seconds, "samples": trial.samples, "record": to_json(trial)}


def attempt_row(sweep: str, attempt: Attempt) -> dict[str, Any]:
    plain = ("trial", "number", "state", "job_name", "job_id", "started_at", "ended_at")
    return {"sweep": sweep, "record": to_json(attempt)} | {name: getattr(attempt, name) for name in plain}


def eval_row(sweep: str, trial: int, attempt: int, position: int, point: Eval) -> dict[str, Any]:
    key = {"sweep": sweep, "trial": trial, "attempt": attempt, "position": position}
    return key | {"samples": point.samples, "loss": point.loss, "seconds": point.seconds}


def to_json(record: Trial | Attempt) -> str:
    plain = {f.name: getattr(record, f.name) for f in fields(record)}
    if isinstance(record, Trial):
        del plain["metrics"]
        plain |= {"tuned": dict(record.tuned), "parameters": dict(record.parameters)}
        plain["base_values"] = dict(record.base_values)
        plain["point"] = None if record.point is None else dict(record.point)
        plain["sampler_attributes"] = {
            where: dict(attributes) for where, attributes in record.sampler_attributes.items()
        }
        plain[METRICS] = as_mapping(record.metrics)
    return json.dumps(plain)  # ASCII: databases refuse the lone surrogates that logs may contain


METRICS = "facts"
"""Key of a trial's metrics in its row; fixed for compatibility with all releases."""


def trial_from(text: str) -> Trial:
    """The inverse of :func:`to_json`; unknown fields are ignored, unknown metrics kept.

    Raises StoreError for a metric of a wrong type.
    """
    data = json.loads(text)
    data["metrics"] = from_mapping(data.get(METRICS, {}))
    data["state"] = TrialState(data["state"])
    data["verdict"] = Verdict(data["verdict"]) if data["verdict"] else None
    return Trial(**_known(Trial, data))


def attempt_from(text: str) -> Attempt:
    """The inverse of :func:`to_json`; unknown fields are ignored."""
    data = json.loads(text)
    data["stop"] = StopKind(data["stop"])
    data["nodes"], data["exclude_nodes"] = tuple(data["nodes"]), tuple(data["exclude_nodes"])
    return Attempt(**_known(Attempt, data))


def _known(kind: type[Trial] | type[Attempt], data: dict[str, Any]) -> dict[str, Any]:
    return {f.name: data[f.name] for f in fields(kind) if f.name in data}


def number(value: float | None) -> float:
    """A column's number; databases return NaN as NULL."""
    return float("nan") if value is None else value


class UnitOfWork:
    """All records of a sweep in memory; ``take_changes`` returns what changed since its last call.

    ``sweep`` is a live view: always the same object, which shows later changes.
    """

    def __init__(self, sweep: StudyRecords) -> None:
        self._trials = dict(sweep.trials)
        self._attempts = dict(sweep.attempts)
        self._evals = dict(sweep.evals)
        self.sweep = replace(sweep, trials=self._trials, attempts=self._attempts, evals=self._evals)
        self._changed_trials: dict[int, Trial] = {}
        self._changed_attempts: dict[tuple[int, int], Attempt] = {}
        self._new_evals: list[tuple[int, int, int, Eval]] = []
        self._ended: dict[int, Trial] = {}
        self.by_job_name = {attempt.job_name: attempt for attempt in self._attempts.values()}
        """Live view of the attempts by job name."""

    def put_trial(self, trial: Trial) -> None:
        """Store a new version of a trial."""
        self._trials[trial.number] = self._changed_trials[trial.number] = trial
        if trial.state is TrialState.FINISHED:
            self._ended[trial.number] = trial
            self.sweep.forget()

    def put_attempt(self, attempt: Attempt) -> None:
        """Store a new version of an attempt, if it changed."""
        key = (attempt.trial, attempt.number)
        if self._attempts.get(key) != attempt:
            self._attempts[key] = self._changed_attempts[key] = self.by_job_name[attempt.job_name] = attempt

    def see_evals(self, attempt: Attempt, evals: Sequence[Eval]) -> Sequence[Eval]:
        """Store an attempt's evals so far; returns the new ones.

        A truncated or restarted log replaces the stored evals from the first difference on.
        """
        key = (attempt.trial, attempt.number)
        known = self._evals.get(key, ())
        grown = known == tuple(evals[: len(known)])
        fresh = evals[len(known) :] if grown else evals
        if fresh:
            first = len(evals) - len(fresh)
            self._evals[key] = tuple(evals) if len(evals) >= len(known) else (*evals, *known[len(evals) :])
            self._new_evals += [(*key, first + i, e) for i, e in enumerate(fresh)]
        return fresh

    def take_changes(self) -> Changes:
        """The changes since the last call."""
        changes = Changes(
            tuple(self._changed_trials.values()), tuple(self._changed_attempts.values()), tuple(self._new_evals)
        )
        self._changed_trials, self._changed_attempts, self._new_evals = {}, {}, []
        return changes

    def open_trials(self) -> list[Trial]:
        """Unfinished trials, by number."""
        return [t for t in self._trials.values() if t.state is not TrialState.FINISHED]

    def take_ended(self) -> list[Trial]:
        """Trials that finished since the last call."""
        ended, self._ended = [*self._ended.values()], {}
        return ended
