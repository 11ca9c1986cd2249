"""Users steer a running sweep: the driver reads their requests, acts on them, and answers.

Accepted requests are recorded with user and time, so that a later driver applies them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from lora_tune.base.errors import InputError, StoreError
from lora_tune.config.parameters import Conditions, Value
from lora_tune.config.space import range_text, within
from lora_tune.config.study import Study
from lora_tune.controller import commits
from lora_tune.controller.dependencies import Dependencies
from lora_tune.controller.jobs import JobStops
from lora_tune.controller.monitor import JobMonitor
from lora_tune.controller.sweep_records import EventLog
from lora_tune.store.port import Request
from lora_tune.store.records import Trial, TrialState, UnitOfWork, Verdict

SETTINGS = ("parallel", "trials", "node_hours", "wall_hours", "trial_minutes")
"""Keys of ``[budget]`` that may change while a sweep runs."""


@runtime_checkable
class Enqueues(Protocol):
    """A search that accepts a user's proposals."""

    def enqueue(self, values: Mapping[str, Value], why: str, request: int) -> None:
        """Propose this next; the search completes missing values. request: its number."""
        ...


@dataclass(frozen=True, slots=True)
class SteeredStudy:
    """A study with the accepted requests applied. paused: propose nothing."""

    study: Study
    paused: bool = False


def apply_requests(study: Study, requests: Sequence[Request]) -> SteeredStudy:
    """The study with the requests' budget changes applied in order. Pure."""
    steered = SteeredStudy(study)
    for request in requests:
        if request.accepted and request.kind == "set":
            steered = SteeredStudy(steered.study.with_options({"budget": request.what}), steered.paused)
        elif request.accepted and request.kind in ("pause", "resume"):
            steered = SteeredStudy(steered.study, request.kind == "pause")
    return steered


def refusal_of_values(study: Study, values: Mapping[str, Value]) -> str:
    """Why these tuned values are not a point of the space; "" if they are (some may be missing). Pure."""
    space = study.search_space
    tuned, absent = space.distributions(), space.conditions.absent(values)
    for name, value in values.items():
        if name not in tuned:
            return f"{name} is not tuned; tuned are {', '.join(tuned)}"
        if not within(tuned[name], value):
            return f"{name} = {value!r} is not {range_text(tuned[name])}"
        if name in absent:
            return f"{name} exists only where {space.conditions.describe(name)}; leave it out"
    return "" if values else "no values are given; name one that is tuned, the search fills in the others"


def describe(request: Request) -> str:
    """The request in words."""
    what = request.what
    values = " ".join(f"{name}={value}" for name, value in what.get("values", what).items())
    return {
        "enqueue": f"try {values}"
        + (f" at commit {what['commit'][:12]}" if what.get("commit") else "")
        + (f" (trial {what['clone_of']} changed)" if what.get("clone_of") is not None else ""),
        "stop": f"stop trial {what.get('trial')}",
        "set": f"set {values}",
    }.get(request.kind, request.kind)


def request_reason(request: Request) -> str:
    """The reason of a trial that a user requested."""
    return f"asked for by {request.who}: {describe(request)}"


def fulfilled(requests: Iterable[Request], trials: Iterable[Trial], conditions: Conditions) -> frozenset[int]:
    """Numbers of the requests for which one of these trials was made; each trial counts for one request. Pure.

    Records of earlier releases have no request number: they match by their reason, or if the sampler set another
    reason, by their values. No trial counts for a request made after it was proposed, because numbers restarted when an
    earlier release rescued a database. An answer earlier than its request comes from different clocks.
    """
    known, pending, run = list(trials), list(requests), set()
    for matches_request in (_by_number, _by_reason, partial(_by_values, conditions)):
        for request in [r for r in pending if r.number not in run]:
            since = request.asked_at if request.answered_at is None else min(request.asked_at, request.answered_at)
            trial = next((t for t in known if t.proposed_at >= since and matches_request(request, t)), None)
            if trial is not None:
                known.remove(trial)
                run.add(request.number)
    return frozenset(run)


def _by_number(request: Request, trial: Trial) -> bool:
    return trial.request == request.number


def _by_reason(request: Request, trial: Trial) -> bool:
    why = request_reason(request)
    return trial.request is None and (trial.why == why or trial.why.startswith(f"{why}; "))


def _by_values(conditions: Conditions, request: Request, trial: Trial) -> bool:
    """Whether a trial of an earlier release has the values; later trials name their request."""
    unnamed = trial.request is None and trial.point is None and trial.metrics.base is None
    return unnamed and conditions.agrees(trial.tuned, request.what["values"])


class Steering:
    """Reads users' requests once per tick; disabled where nobody may steer, as in a race of replicates."""

    def __init__(
        self,
        study: Study,
        dependencies: Dependencies,
        work: UnitOfWork,
        monitor: JobMonitor,
        stops: JobStops,
        events: EventLog,
    ) -> None:
        self._from_file, self._store, self._search = study, dependencies.requests, dependencies.session
        self._work, self._monitor, self._stops, self._events = work, monitor, stops, events
        self._enqueued: set[int] = set()  # requests whose points the search has or had
        self._known: dict[int, Request] = {}
        self.steered = SteeredStudy(study)

    @property
    def requests(self) -> Sequence[Request]:
        """All requests ever read, oldest first, with their answers, even if the database lost them."""
        return tuple(self._known.values())

    def poll(self, now: float) -> None:
        """Answer new requests, and apply accepted ones. Retries later during a database outage."""
        if self._store is None:
            return
        try:
            self._read(self._store.all())
            for request in self.requests:
                if request.answered_at is None:
                    self._known[request.number] = self._answer(request, now)
        except StoreError as error:
            self._events.warn_once("requests", str(error))
            return
        self._events.warn_once("requests", "")
        self._enqueue_new([r for r in self.requests if r.accepted and r.kind == "enqueue"])
        self.steered = apply_requests(self._from_file, self.requests)
        self._monitor.follow(self.steered.study)

    def _read(self, requests: Iterable[Request]) -> None:
        """Add new requests. Requests that a reset database has lost are kept."""
        for request in requests:
            known = self._known.get(request.number)
            if known is None or known.answered_at is None:
                self._known[request.number] = request

    def _enqueue_new(self, requests: Sequence[Request]) -> None:
        """Pass the points of accepted requests to the search, except those that an earlier driver has run."""
        if not isinstance(self._search, Enqueues) or not (new := {r.number for r in requests} - self._enqueued):
            return
        self._enqueued |= new
        run = fulfilled(requests, self._work.sweep.trials.values(), self._from_file.search_space.conditions)
        for request in requests:
            if request.number in new - run:
                self._search.enqueue(request.what["values"], request_reason(request), request.number)

    def _answer(self, request: Request, now: float) -> Request:
        assert self._store is not None
        try:
            if request.kind not in KINDS:
                raise InputError(f"{request.kind!r} is nothing that this release can do")
            answer, accepted = KINDS[request.kind](self, request, now), True
        except InputError as error:
            answer, accepted = f"refused: {error}", False
        self._events.note(f"{request.who} asks to {describe(request)}: {answer}", "steer", request=request.number)
        return self._store.answer(request, answer, now, accepted=accepted)

    def _stop(self, request: Request, now: float) -> str:
        trial = self._work.sweep.trials.get(request.what["trial"])
        if trial is None:
            raise InputError(f"there is no trial {request.what['trial']}")
        if trial.state is TrialState.FINISHED:
            raise InputError(f"trial {trial.number} has ended: {trial.verdict}")
        sentence = f"stopped by {request.who}"
        if trial.state is TrialState.WAITING:
            self._work.put_trial(trial.finished(Verdict.CANCELLED, sentence, now))
        else:
            self._stops.give_up(self._work.sweep.attempts_of(trial.number)[-1], sentence)
        return f"trial {trial.number} is asked to end"

    def _enqueue(self, request: Request, now: float) -> str:
        values = request.what["values"]
        problem = refusal_of_values(self._from_file, values)
        if problem := problem or (commits.refusal(self._from_file) if request.what.get("commit") else ""):
            raise InputError(problem)
        if not isinstance(self._search, Enqueues):
            raise InputError("this search takes no proposals")
        return "the next free slot runs it"

    def _set(self, request: Request, now: float) -> str:
        if unknown := sorted(request.what.keys() - {*SETTINGS}):
            raise InputError(f"{unknown[0]} cannot change while a sweep runs; {', '.join(SETTINGS)} can")
        self.steered.study.with_options({"budget": request.what})  # raises InputError for an invalid value
        return "from now on"

    def _switch(self, request: Request, now: float) -> str:
        return "no trial is proposed until resume; what runs goes on" if request.kind == "pause" else "proposals go on"


Apply = Callable[[Steering, Request, float], str]

KINDS: Mapping[str, Apply] = {
    "stop": Steering._stop,
    "enqueue": Steering._enqueue,
    "set": Steering._set,
    "pause": Steering._switch,
    "resume": Steering._switch,
}
"""Kind of request -> handler, which returns what was done, and raises InputError for an invalid request."""
