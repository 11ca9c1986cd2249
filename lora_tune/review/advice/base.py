"""What an advice is, and what several rules look at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lora_tune.logs.run import Eval
from lora_tune.store.records import StudyRecords, Trial, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """seen: what was observed, a clause. do: what to do about it. evidence: the numbers. trials: where it was seen."""

    seen: str
    do: str
    evidence: str
    trials: tuple[int, ...] = ()


def reached(sweep: StudyRecords) -> list[Trial]:
    """Trials that reached the target."""
    return [t for t in sweep.trials.values() if t.verdict is Verdict.REACHED]


def finite_evals(sweep: StudyRecords, trial: Trial) -> list[Eval]:
    """The trial's evals that are numbers."""
    return [e for e in sweep.last_evals(trial.number) if math.isfinite(e.loss)]


def learning_rate(trial: Trial) -> float | None:
    """The trial's learning rate by its usual names; None when it has none."""
    for name in ("LR", "learning_rate", "lr"):
        value = trial.parameters.get(name)
        if isinstance(value, int | float):
            return float(value)
    return None


def listed(trials: Sequence[int], most: int = 6) -> str:
    """Trial numbers for a sentence: ``trials 3, 7, 9 and 4 more``."""
    numbers = ", ".join(str(n) for n in trials[:most])
    more = f" and {len(trials) - most} more" if len(trials) > most else ""
    return f"trial{'s' if len(trials) > 1 else ''} {numbers}{more}"
