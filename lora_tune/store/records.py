"""What is remembered of a sweep: its trials, attempts and evals; in memory, with what is not saved yet, and as rows."""

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
    """Where a trial is on its way."""

    WAITING = "waiting"
    """Proposed; its next attempt is to be submitted."""
    RUNNING = "running"
    """An attempt is queued, running or being stopped."""
    FINISHED = "finished"


class Verdict(enum.StrEnum):
    """How a finished trial ended."""

    REACHED = "reached"
    CENSORED = "censored"
    """Ran to its end without reaching the target: its time-to-target is longer than what was seen."""
    PRUNED = "pruned"
    CAPPED = "capped"
    """Could no longer beat the best one: censored, not bad."""
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    """Its attempts failed for reasons that say nothing about its parameters."""
    CANCELLED = "cancelled"


class StopKind(enum.StrEnum):
    """Why the driver asked a job to end."""

    NONE = ""
    PRUNED = "pruned"
    CAPPED = "capped"
    REACHED = "reached"
    """The target is in the log and the job did not end by itself."""
    TIME_LIMIT = "time limit"
    SILENT = "silent"
    """Its log stopped growing."""
    QUEUE = "queue"
    """It waited in the queue for too long."""
    USER = "user"
    UNREAD = "unread"
    """Its log holds lines that look like evals, and the study's pattern matches none."""
    PROBED = "probed"
    """A throughput probe has seen what it was for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One job of one trial. Times are epoch seconds; None while unknown.

    token: names this attempt among all of all sweeps; its job's files carry it. "" in records of an earlier release.
    node_share: how much of its nodes' time was its own; less than 1 where trials share a job.
    overhead_seconds: for which the job that was started for it, and that later ones shared, held its nodes while it
    trained nobody; 0 where trials share no job. A cost of the sweep, not of this trial.
    state: a JobState, or "intended" from the moment of the intention until the launcher has answered.
    failure, line, remedy: the diagnosis of an attempt that failed or is being given up, empty otherwise.
    fixed_at: when a person gave the command again after it had failed of the set-up; it counts for no budget then.
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
    """One proposal and what came of it.

    tuned: values as the search proposed them. parameters: all resolved values.
    seconds, samples: time and samples to the target as the log states them (first eval at the target), None if not
    reached. metrics: what else was measured.
    replicate_of: trial of the sweep whose configuration is run again, None for a proposal of the search. replicates:
    runs in this one job, with seeds ``seed``, ``seed + 1``, ...; each is remembered in ``metrics.runs``.
    probe: a short run that only measures its layout's speed.
    base_values: of the trial that measures the machine's own config, every variable that this set, by name.
    request: number of the person's request that it answers, None for every other trial. point: the values of the
    study's enqueued point that it is, as the study names them, None for every other trial.
    sampler_attributes: what the sampler stored of itself when it proposed this, by where: "user" and "system"
    attributes of the trial, "study" (system attributes of the study).
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
        """What trials are compared by. Raises InputError for a trial that has none: it runs, or ended without one."""
        if self.metrics.objective is None:
            why = f"it ended as {self.verdict.value}" if self.verdict else "it has not ended"
            raise InputError(f"trial {self.number} has no objective: {why}; metrics.objective is None there")
        return self.metrics.objective

    @property
    def has_value(self) -> bool:
        """Whether it reached the target, or measured what was asked of it, and has a result."""
        return self.verdict is Verdict.REACHED and self.metrics.objective is not None

    @property
    def reference_seconds(self) -> float | None:
        """Its seconds to the target as they would be at the sweep's reference pace; None where it was not reached."""
        return None if self.seconds is None else self.seconds / (self.metrics.slower or 1.0)

    @property
    def passed_over(self) -> bool:
        """Whether further runs have shown that it is no better than the one that was chosen."""
        return self.metrics.confirmed is not None and self.metrics.confirmed.choice is ConfirmedChoice.PASSED_OVER

    def finished(self, verdict: Verdict, sentence: str, now: float) -> Trial:
        """This trial with its end written down."""
        return replace(self, state=TrialState.FINISHED, verdict=verdict, sentence=sentence, finished_at=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorRun:
    """A run of an old log that the search starts from.

    source: who ran it where; runs of one source are alike. log, digest: the file and the SHA-256 of its bytes.
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
    """All records of one study: trials by number, attempts and evals by (trial, attempt); old runs it starts from.

    id: names this sweep among all; its folder carries it. folder: the one that it was last driven in. Both are "" for
    one that was never in a database.
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
    """The next number by how many trials and attempts there are, of which a driver's view gains more."""

    @property
    def next_number(self) -> int:
        """The number of the next trial. One whose record is lost, as its attempts show, is not given out again."""
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
        """The nodes of a trial's newest attempt, in the order of their names; none where no cluster names any."""
        attempts = self.attempts_of(trial)
        return tuple(sorted(attempts[-1].nodes)) if attempts else ()

    def last_evals(self, trial: int) -> tuple[Eval, ...]:
        """The evals of the trial's newest attempt that has any."""
        for attempt in reversed(self.attempts_of(trial)):
            if evals := self.evals.get((trial, attempt.number)):
                return evals
        return ()

    def ranked(self, *, maximise: bool = False) -> Sequence[Trial]:
        """All trials that have ended, the best first: the one ranking of a sweep, of which all others are parts.

        First those with a value, by it; then by the lowest eval, and of equal ones by the samples that it took. Those
        without an eval that is a number are left out.
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
        """The lowest eval of the trial's newest attempt, the earliest of equal ones; None without one."""
        known = [e for e in self.last_evals(trial) if math.isfinite(e.loss) and e.samples > 0]
        return min(known, key=lambda e: (e.loss, e.samples), default=None)

    def best(self, *, maximise: bool = False) -> Trial | None:
        """The best trial with a value of those that more seeds have not shown to be worse than the one they chose."""
        return next((t for t in self.ranked(maximise=maximise) if t.has_value and not t.passed_over), None)

    def reached(self) -> list[Trial]:
        """The trials that reached the target."""
        return self.once("reached", lambda: [t for t in self.trials.values() if t.verdict is Verdict.REACHED])

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()``, which may depend on finished trials only; computed once until another one finishes.

        With thousands of trials the same is asked for at each eval of each that runs.
        """
        if key not in self._cache:
            self._cache[key] = make()
        derived: T = self._cache[key]
        return derived

    def is_cached(self, key: Hashable) -> bool:
        """Whether :meth:`once` has computed it."""
        return key in self._cache

    def carry_cache(self, earlier: StudyRecords) -> None:
        """Go on with what :meth:`once` makes of ``earlier``, in which the same trials have finished."""
        object.__setattr__(self, "_cache", earlier._cache)  # shared: what is being made now serves both

    def forget(self) -> None:
        """What :meth:`once` has kept is out of date."""
        self._cache.clear()

    def node_hours(self, now: float) -> float:
        """Node-hours of all attempts up to ``now``, and of the jobs that they shared."""
        return sum(attempt.node_hours(now) for attempt in self.attempts.values()) + self.overhead_hours

    def charged_hours(self, now: float) -> float:
        """Those of :meth:`node_hours` that a budget counts: without attempts that failed of a set-up since fixed."""
        fixed = sum(attempt.node_hours(now) for attempt in self.attempts.values() if attempt.fixed_at is not None)
        return self.node_hours(now) - fixed

    @property
    def overhead_hours(self) -> float:
        """Node-hours for which jobs that trials share were held and trained nobody, as the driver last saw them."""
        return sum(attempt.overhead_hours for attempt in self.attempts.values())


# Records as rows and JSON, and back.


@dataclass(frozen=True, slots=True)
class Changes:
    """What one tick changed."""

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
    return json.dumps(plain)  # in ASCII: half a surrogate pair from a log could not be stored as it is


METRICS = "facts"
"""Where a trial's metrics stand in its row: by the name that all releases read and write."""


def trial_from(text: str) -> Trial:
    """The reverse of :func:`to_json`; fields that a later release added are passed over, further metrics are kept.

    Raises StoreError for metrics of a wrong kind.
    """
    data = json.loads(text)
    data["metrics"] = from_mapping(data.get(METRICS, {}))
    data["state"] = TrialState(data["state"])
    data["verdict"] = Verdict(data["verdict"]) if data["verdict"] else None
    return Trial(**_known(Trial, data))


def attempt_from(text: str) -> Attempt:
    """The reverse of :func:`to_json`; fields that a later release added are passed over."""
    data = json.loads(text)
    data["stop"] = StopKind(data["stop"])
    data["nodes"], data["exclude_nodes"] = tuple(data["nodes"]), tuple(data["exclude_nodes"])
    return Attempt(**_known(Attempt, data))


def _known(kind: type[Trial] | type[Attempt], data: dict[str, Any]) -> dict[str, Any]:
    return {f.name: data[f.name] for f in fields(kind) if f.name in data}


def number(value: float | None) -> float:
    """A column's number; databases hand NaN back as nothing."""
    return float("nan") if value is None else value


class UnitOfWork:
    """Records by key, kept whole in memory; ``take_changes`` hands over what is new since the last call.

    ``sweep`` is a live view: the same object all along, showing every later change.
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
        """The attempts, by the names of their jobs; a live view."""

    def put_trial(self, trial: Trial) -> None:
        """Remember a trial in its new form."""
        self._trials[trial.number] = self._changed_trials[trial.number] = trial
        if trial.state is TrialState.FINISHED:
            self._ended[trial.number] = trial
            self.sweep.forget()

    def put_attempt(self, attempt: Attempt) -> None:
        """Remember an attempt in its new form; one that did not change costs nothing."""
        key = (attempt.trial, attempt.number)
        if self._attempts.get(key) != attempt:
            self._attempts[key] = self._changed_attempts[key] = self.by_job_name[attempt.job_name] = attempt

    def see_evals(self, attempt: Attempt, evals: Sequence[Eval]) -> Sequence[Eval]:
        """Remember the evals of an attempt so far; returns those that are new.

        A log that was truncated or started over replaces what was known from its first differing eval on.
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
        """What changed since the last call."""
        changes = Changes(
            tuple(self._changed_trials.values()), tuple(self._changed_attempts.values()), tuple(self._new_evals)
        )
        self._changed_trials, self._changed_attempts, self._new_evals = {}, {}, []
        return changes

    def open_trials(self) -> list[Trial]:
        """Trials that are not finished, by number."""
        return [t for t in self._trials.values() if t.state is not TrialState.FINISHED]

    def take_ended(self) -> list[Trial]:
        """Trials that have finished since the last call."""
        ended, self._ended = [*self._ended.values()], {}
        return ended
