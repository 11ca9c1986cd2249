"""What trials say of whole configurations: samples that count, seconds a sample, bounds, and deaths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from lora_tune.search.observations import UNIFORM_SD, Observation

NEVER = 1.0
"""ln(seconds) by which a run that diverged is worse than the best, at least."""
STALLED = 0.1
"""The same of a run that was stopped because it would not arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One trial. ln_score: of its objective, NaN when it has none. ln_pace: of seconds a sample, evals included.

    above: what ln(score) is known to exceed, NaN where nothing is. open: it still runs, to measure the whole. failed:
    it died of memory, diverged, or came to its end without reaching the target: more of the same are to be expected
    near it. died: of memory.
    spread: sd of ln(score) by how far its evals are apart.
    """

    values: Mapping[str, Any]
    ln_score: float = math.nan
    ln_pace: float = math.nan
    above: float = math.nan
    open: bool = False
    failed: bool = False
    died: bool = False
    spread: float = 0.0


def runs_of(
    trials: Sequence[FrozenTrial], read: Callable[[FrozenTrial], Observation | None], *, skip: int = -1
) -> list[Run]:
    """The runs among ``trials`` that say anything, in their order. read: a trial as an observation."""
    seen = [(t, o) for t in trials if t.number != skip and (o := read(t)) is not None]
    scores = [t.value for t, _ in seen if t.state is TrialState.COMPLETE and t.value is not None and t.value > 0]
    best = math.log(min(scores)) if scores else math.nan
    steps = [s for _, o in seen if (s := _step(o)) > 0]
    usual = float(np.median(steps)) if steps else math.nan
    return [_run(trial, o, best, usual) for trial, o in seen]


def _run(trial: FrozenTrial, o: Observation, best: float, usual: float) -> Run:
    pace, step = _ln_pace(o, usual), _step(o) or usual
    if o.infeasible or o.open:
        return Run(
            values=o.values, ln_pace=pace, above=_floor(o, pace), open=o.open and not o.probe, failed=o.infeasible,
            died=o.infeasible and not o.refused,
        )  # fmt: skip
    if trial.state is TrialState.COMPLETE and trial.value is not None and trial.value > 0:
        spread = UNIFORM_SD * step / o.reached if o.reached > 0 and step > 0 else 0.0
        return Run(values=o.values, ln_score=math.log(trial.value), ln_pace=pace, spread=min(spread, 0.3))
    if o.probe:
        return Run(values=o.values, ln_pace=pace)
    worse = NEVER if o.diverged else 0.0 if trial.user_attrs.get("verdict") == "capped" else STALLED
    failed = o.diverged or trial.user_attrs.get("verdict") == "censored"
    known = [x for x in (_floor(o, pace), best + worse) if math.isfinite(x)]
    return Run(values=o.values, ln_pace=pace, above=max(known, default=math.nan), failed=failed)


def _floor(o: Observation, ln_pace: float) -> float:
    """What ln(score) exceeds by the samples that it has had."""
    seen = max([e.samples for e in o.evals], default=o.bound)
    return math.log(seen) + ln_pace if seen > 0 and math.isfinite(ln_pace) else math.nan


def _ln_pace(o: Observation, usual: float) -> float:
    """ln of seconds a sample, evals included; NaN where no speed is known."""
    if not o.samples_per_second > 0:
        return math.nan
    step = _step(o) or usual
    evals = o.seconds_per_eval / step if o.seconds_per_eval > 0 and step > 0 else 0.0
    return math.log(1 / o.samples_per_second + evals)


def _step(o: Observation) -> float:
    return o.evals[1].samples - o.evals[0].samples if len(o.evals) > 1 else 0.0
