"""The product's own early stopping, as the driver applies it: the stall test, then the cap."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.laboratory.problem import Problem
from lora_tune.base.scatter import STOP_SD
from lora_tune.curves import Timing
from lora_tune.curves.comparison import ComparedRun
from lora_tune.curves.points import usable
from lora_tune.curves.published import contradicts
from lora_tune.curves.stopping import Evidence, verdict
from lora_tune.logs.run import Eval
from lora_tune.mlperf import convergence
from lora_tune.search.capping import Incumbent, cap
from lora_tune.search.noise import KNOWN_WIDTH, UNKNOWN_WIDTH, Noise

RISK = 0.01
"""False-prune rate of the stall test and risk of the cap: the defaults of a study."""


class Stopper:
    """Remembers finished runs and says which running one to stop. published: compare with the public curves."""

    def __init__(self, problem: Problem, *, published: bool) -> None:
        self._problem, self._published = problem, published
        self._whole: list[tuple[float, ComparedRun]] = []
        self._best: tuple[float, list[float], tuple[Any, ...]] = (math.inf, [], ())

    def stop(self, tuned: Mapping[str, Any], evals: list[Eval], timing: Timing, *, start: bool) -> str:
        """Why a run with these evals so far is stopped, as a verdict: "pruned", "capped", or "" to let it go on.

        start: it is the one that the search begins with, of which the published curves say nothing.
        """
        batch = self._problem.coordinates.batch(tuned)
        envelope = convergence.published(batch) if self._published else None
        finished = [run for _, run in sorted(self._whole, key=lambda one: one[0])]
        evidence = Evidence(finished=finished, rate=RISK, published=None if start else envelope)
        length = self._length(tuned)
        if verdict(evals, self._problem.target, evidence, length=length, task=batch).stop:
            return "pruned"
        family = envelope.family if envelope else None
        seconds = tuple(self._best[1])
        before = Noise(STOP_SD, KNOWN_WIDTH if family else UNKNOWN_WIDTH)
        incumbent = Incumbent("the best", seconds, before.after([[math.log(s) for s in seconds]]))
        now = evals[-1].seconds
        capped = cap(evals, timing, incumbent, now, RISK, target=self._problem.target, family=family)
        return "capped" if capped.stop else ""

    def _length(self, tuned: Mapping[str, Any]) -> float | None:
        """Samples after which training ends; None where nothing says it."""
        total = self._problem.coordinates.total_samples(tuned)
        return total if math.isfinite(total) else None

    def finished(self, tuned: Mapping[str, Any], evals: list[Eval], seconds: float) -> None:
        """A run reached the target."""
        batch, length = self._problem.coordinates.batch(tuned), self._length(tuned)
        run = ComparedRun(curve=usable(evals), length=length, task=batch)
        envelope = convergence.published(batch) if self._published else None
        if envelope is not None and contradicts(run, self._problem.target, envelope, RISK):
            self._published = False
        self._whole.append((seconds, run))
        key = tuple(sorted(tuned.items()))
        if key == self._best[2]:
            self._best[1].append(seconds)
        elif seconds < self._best[0]:
            self._best = (seconds, [seconds], key)
