"""Advice in plain words: the field's if-then rules, applied to what was observed in one sweep, with the evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lora_tune.config.study import Study
from lora_tune.logs.run import TrainPoint
from lora_tune.review.advice.base import Advice, listed
from lora_tune.review.advice.convergence import CONVERGENCE_RULES, overfits
from lora_tune.review.advice.machine import MACHINE_RULES
from lora_tune.review.advice.rules import RULES_OF_MLPERF
from lora_tune.review.importance import FailingValue, explained, failing_values
from lora_tune.store.records import StudyRecords

__all__ = ["Advice", "advise"]


def advise(study: Study, sweep: StudyRecords, train: Mapping[int, Sequence[TrainPoint]] | None = None) -> list[Advice]:
    """Everything that the sweep so far gives reason to say, convergence first. Pure.

    train: training losses by trial, from its log; without them nothing is said about overfitting.
    """
    failing = failing_values(sweep)
    rest = replace(sweep, trials={n: t for n, t in sweep.trials.items() if n not in explained(failing)})
    answers: list[Advice | None] = [_failing(study, value) for value in failing]
    answers += [rule(study, rest) for rule in CONVERGENCE_RULES]
    answers += [rule(study, sweep) for rule in (*MACHINE_RULES, *RULES_OF_MLPERF)]
    answers.append(overfits(study, sweep, train or {}))
    return [advice for advice in answers if advice is not None]


def _failing(study: Study, value: FailingValue) -> Advice:
    return Advice(
        seen=value.sentence(study),
        do=f"leave that out of space.{value.name}, or look at one of these trials: explain --trial {value.trials[0]}",
        evidence=f"{listed(value.trials)}; by luck alone so far apart with a chance of {max(value.chance, 1e-4):.2g}",
        trials=value.trials,
    )
