"""Runs one method on one problem on a virtual clock, with any number of nodes, and records what it would recommend."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.laboratory.problem import Problem
from lora_tune.curves import Timing

RESOLUTION = 300
"""Looks at the recommendation over a whole budget, at most."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A method's proposal: tuned values and "full" or "probe"."""

    handle: Any
    tuned: Mapping[str, Any]
    kind: str = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a trial ended. verdict: reached, censored, pruned, infeasible or probed. Facts under the driver's names."""

    verdict: str
    score: float
    samples: float
    facts: Mapping[str, Any]


class Method(Protocol):
    """A search method as the arena uses it."""

    def ask(self) -> Ask: ...

    def report(self, handle: Any, samples: float, loss: float, second: float, timing: Timing) -> bool:
        """An eval came in, ``second`` after run_start, of a run of this speed; True stops the trial."""
        ...

    def tell(self, handle: Any, result: Result) -> None: ...

    def recommend(self) -> Mapping[str, Any] | None:
        """Tuned values of the configuration that it would hand over now; None before there is any."""
        ...


@dataclass(slots=True)
class Trace:
    """What a method did: (node-hours spent, regret of its recommendation) over time, and (node-hours, claimed regret,
    regret) where it makes claims; trials started."""

    points: list[tuple[float, float]] = field(default_factory=list)
    claims: list[tuple[float, float, float]] = field(default_factory=list)
    trials: int = 0


@dataclass(slots=True)
class _Trial:
    ask: Ask
    outcome: Any
    began: float
    events: list[tuple[float, str, Any]]
    timing: Timing
    at: int = 0


def play(
    problem: Problem, method: Method, *, slots: int, budget: float, seed: int, looks: Sequence[float] | None = None
) -> Trace:
    """Let ``method`` spend ``budget`` node-hours with ``slots`` trials at a time; trial seeds follow ``seed``.

    looks: node-hours at which the recommendation is looked at, in order; None: whenever a trial has ended.
    """
    trace = Trace()
    due = deque(looks or ())
    heap: list[tuple[float, int, _Trial]] = []
    count = itertools.count()
    done_hours = 0.0
    now = 0.0

    def start() -> None:
        ask = method.ask()
        number = next(count)
        parameters = problem.space.resolve(ask.tuned)
        outcome = problem.surface.outcome(parameters, seed * 100_003 + number)
        timing = Timing(outcome.samples_per_second, outcome.seconds_per_eval)
        trial = _Trial(ask, outcome, now, _events(problem, ask, outcome), timing)
        heapq.heappush(heap, (now + trial.events[0][0], number, trial))
        trace.trials += 1

    def spent() -> float:
        return done_hours + sum(now - t.began for _, _, t in heap) * problem.nodes / 3600

    for _ in range(slots):
        start()
    while heap:
        now, number, trial = heapq.heappop(heap)
        second, what, value = trial.events[trial.at]
        due_now = _due(due, spent() + (now - trial.began) * problem.nodes / 3600)
        if due_now:
            _look(problem, method, trace, due_now)
            if not due:
                return trace
        stopped = False
        if what == "eval":
            samples, loss, at = value
            stopped = method.report(trial.ask.handle, samples, loss, at, trial.timing)
        if what == "eval" and not stopped:
            trial.at += 1
            heapq.heappush(heap, (trial.began + trial.events[trial.at][0], number, trial))
            continue
        done_hours += second * problem.nodes / 3600
        method.tell(trial.ask.handle, _result(problem, trial, "pruned" if stopped else what))
        total = spent()
        often = not trace.points or total >= budget or total - trace.points[-1][0] >= budget / RESOLUTION
        if looks is None and often:
            _look(problem, method, trace, [total])
        if total >= budget:
            return trace
        start()
    return trace


def _due(looks: deque[float], total: float) -> list[float]:
    """Takes the looks that ``total`` node-hours have passed: nothing has ended since."""
    passed = []
    while looks and looks[0] <= total:
        passed.append(looks.popleft())
    return passed


def _look(problem: Problem, method: Method, trace: Trace, totals: Sequence[float]) -> None:
    """Ask for the recommendation, and write down its regret at each of these node-hours."""
    tuned = method.recommend()
    regret = problem.regret(tuned) if tuned is not None else math.inf
    trace.points += [(total, regret) for total in totals]
    claim = getattr(method, "claimed_regret", None)
    if claim is not None and math.isfinite(claim) and tuned is not None:
        exact = problem.exact_regret(tuned)
        trace.claims += [(total, claim, exact) for total in totals]


def _events(problem: Problem, ask: Ask, outcome: Any) -> list[tuple[float, str, Any]]:
    """(seconds since start, kind, value) of a trial: evals, then its end as it would come without anybody's help."""
    if ask.kind == "probe":
        first = outcome.init_seconds + problem.probe_samples / outcome.samples_per_second + outcome.seconds_per_eval
        end = (
            min(first, outcome.end_seconds),
            "infeasible" if outcome.end == "oom" and outcome.end_seconds < first else "probed",
            None,
        )
        return [end]
    limit = problem.trial_minutes * 60
    blown = next((t for _, loss, t in outcome.train if math.isnan(loss)), math.inf)
    names = {"success": "reached", "aborted": "censored", "oom": "infeasible"}
    end = (outcome.end_seconds, names[outcome.end], None)
    end = min(end, (blown, "diverged", None), (limit, "censored", None), key=lambda e: e[0])
    shown = [e for e in outcome.evals if e[2] < end[0] or end[1] == "reached"]
    return [*((t, "eval", (s, loss, t - outcome.init_seconds)) for s, loss, t in shown), end]


def _result(problem: Problem, trial: _Trial, what: str) -> Result:
    outcome = trial.outcome
    second = trial.events[trial.at][0]
    seen = [e for e in outcome.evals if e[2] <= second + 1e-6]
    last = seen[-1][0] if seen else max([s for s, _, t in outcome.train if t <= second], default=0.0)
    facts: dict[str, Any] = {
        "node_hours": second * problem.nodes / 3600,
        "init_seconds": outcome.init_seconds,
    }
    if what != "infeasible":
        facts["samples_per_second"] = outcome.samples_per_second
        if seen or what == "probed":
            facts["seconds_per_eval"] = outcome.seconds_per_eval
        facts["last_samples"] = last
    score = math.inf
    if what == "reached":
        facts["stop_samples"] = seen[-1][0]
        score = second - outcome.init_seconds
        facts["stop_seconds"] = score
        score *= problem.single_run_factor(trial.ask.tuned, seen[-1][0])
    if what == "diverged":
        facts["diverged"] = True
    verdict = "pruned" if what == "diverged" else what
    facts["verdict"] = verdict
    return Result(verdict=verdict, score=score, samples=last, facts=facts)
