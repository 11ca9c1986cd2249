"""The trial that came nearest to a target that nothing reached, and what it lacks. Pure functions of the records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lora_tune.base.format import number
from lora_tune.config.study import Study
from lora_tune.logs.run import Eval
from lora_tune.objectives import objective_of
from lora_tune.store.records import StudyRecords, Trial


@dataclass(frozen=True, slots=True)
class Nearest:
    """A trial, its best eval as it is kept, and what that lacks to the target in words."""

    trial: Trial
    point: Eval
    missing: str


def nearest(study: Study, sweep: StudyRecords) -> Nearest | None:
    """The finished trial whose best eval is nearest to the target; of equal ones the one that needed fewer samples.

    None where trials have no target, where one reached it, and where none has an eval that is a number. A trial with an
    eval at the target whose result was refused came nowhere.
    """
    target = study.objective.target
    if target is None or not objective_of(study).has_target or sweep.reached():
        return None
    candidates = [
        (point.loss, point.samples, trial.number, point)
        for trial in sweep.trials.values()
        if trial.verdict is not None and not _met(study, sweep.last_evals(trial.number))
        for point in sweep.last_evals(trial.number)
        if math.isfinite(point.loss)
    ]
    if not candidates:
        return None
    *_, best, point = min(candidates, key=lambda row: row[:3])
    side = "below" if study.rising else "above"
    gap = number(abs(study.shown(point.loss) - target))
    trial = sweep.trials[best]
    last = sweep.last_evals(best)[-1]
    trend = "; it was still getting better there" if last.samples == point.samples else f"; {_end(study, last)}"
    return Nearest(trial, point, f"{study.eval_words(point)}, {gap} {side} the target {target:g}{trend}")


def _met(study: Study, evals: Sequence[Eval]) -> bool:
    return any(point.loss <= study.target for point in evals)


def _end(study: Study, last: Eval) -> str:
    """How a run went on after its best eval."""
    return f"its last one is {number(study.shown(last.loss))} at {study.counted(last.samples)}"


def nearest_words(closest: Nearest) -> str:
    """The nearest trial in a line."""
    return f"nearest  trial {closest.trial.number}: {closest.missing}"
