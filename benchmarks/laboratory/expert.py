"""What somebody who knows the published results does without any of this: nothing, or two stages in forty lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import MedianPruner

from benchmarks.laboratory.arena import Ask, Result
from benchmarks.laboratory.optuna_methods import OptunaMethod, tpe
from benchmarks.laboratory.problem import Problem
from lora_tune.config.layout import parse_layout
from lora_tune.curves import Timing

PROBES = 10
"""Layouts that the expert probes."""


class AsPublished:
    """Keeps the start: what no search at all is worth."""

    def __init__(self, problem: Problem) -> None:
        assert problem.start is not None, "a problem without a start has nothing to keep"
        self._start = problem.start

    def ask(self) -> Ask:
        return Ask(None, self._start)

    def report(self, _handle: Any, _samples: float, _loss: float, _second: float, _timing: Timing) -> bool:
        return False

    def tell(self, _handle: Any, _result: Result) -> None:
        return None

    def recommend(self) -> Mapping[str, Any]:
        return self._start


class TwoStages:
    """Runs the start, probes the layouts nearest to its own, then TPE with MedianPruner over the rest on the fastest.

    On a problem without layouts only the last of these is left.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        self._problem, self._seed = problem, seed
        self._layout = problem.coordinates.layout
        self._waiting = _nearest(problem, self._layout) if self._layout else []
        self._times: dict[str, float] = {}
        self._fixed: dict[str, Any] = {}
        self._method = None if self._layout else _last_stage(problem, seed, problem.distributions)
        self._first = True

    def ask(self) -> Ask:
        start = dict(self._problem.start or {})
        if self._method is not None:
            ask = self._method.ask()
            return Ask(ask.handle, {**ask.tuned, **self._fixed})
        assert self._layout is not None
        if self._first:
            self._first = False
            return Ask(None, start)
        if self._waiting:
            layout = self._waiting.pop(0)
            return Ask(layout, {**start, self._layout: layout}, "probe")
        fastest = min(self._times, key=self._times.__getitem__, default=start[self._layout])
        self._fixed = {self._layout: fastest}
        rest = {n: d for n, d in self._problem.distributions.items() if n != self._layout}
        self._method = _last_stage(self._problem, self._seed, rest)
        return self.ask()

    def report(self, handle: Any, samples: float, loss: float, second: float, timing: Timing) -> bool:
        return isinstance(handle, optuna.Trial) and self._last().report(handle, samples, loss, second, timing)

    def tell(self, handle: Any, result: Result) -> None:
        if isinstance(handle, optuna.Trial):
            self._last().tell(handle, result)
        elif result.verdict != "infeasible" and self._layout is not None:
            layout = handle or dict(self._problem.start or {})[self._layout]
            speed, evals = result.facts["samples_per_second"], result.facts.get("seconds_per_eval", 0.0)
            self._times[layout] = 384 / speed + evals

    def recommend(self) -> Mapping[str, Any] | None:
        found = self._method.recommend() if self._method else None
        if found is not None:
            return {**found, **self._fixed}
        fastest = min(self._times, key=self._times.__getitem__, default=None)
        start = dict(self._problem.start or {})
        return start if fastest is None or self._layout is None else {**start, self._layout: fastest}

    def _last(self) -> OptunaMethod:
        assert self._method is not None
        return self._method


def _last_stage(problem: Problem, seed: int, distributions: Mapping[str, BaseDistribution]) -> OptunaMethod:
    return OptunaMethod(problem, tpe(seed), MedianPruner(), distributions=distributions)


def _nearest(problem: Problem, layout: str) -> list[str]:
    """The layouts of the start's batch with the fewest doublings from its own, splits that leave most memory first."""
    assert problem.start is not None
    own = parse_layout(str(problem.start[layout]))
    batch = problem.coordinates.batch(problem.start)

    def doublings(text: str) -> tuple[float, float]:
        other = parse_layout(text)
        pairs = ((own.tp, other.tp), (own.pp, other.pp), (own.cp, other.cp), (own.mbs, other.mbs))
        return sum(abs(math.log2(a / b)) for a, b in pairs), other.tp * other.pp * other.cp

    known = [c for c, size in problem.coordinates.batches_by_layout.items() if size == batch and c != str(own)]
    return sorted(known, key=doublings)[:PROBES]


METHODS: dict[str, Callable[[Problem, int], AsPublished | TwoStages]] = {
    "as published": lambda p, _seed: AsPublished(p),
    "two stages": TwoStages,
}
"""Name -> a method for (problem, seed)."""
