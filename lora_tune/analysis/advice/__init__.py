"""Advice in plain words: the field's if-then rules, applied to what was observed in one sweep, with the evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_tune.analysis.advice.base import Advice
from lora_tune.analysis.advice.convergence import CONVERGENCE_RULES, overfits
from lora_tune.analysis.advice.machine import MACHINE_RULES
from lora_tune.analysis.advice.rules import RULES_OF_MLPERF
from lora_tune.config.study import Study
from lora_tune.logs.run import TrainPoint
from lora_tune.store.records import StudyRecords

__all__ = ["Advice", "advise"]


def advise(study: Study, sweep: StudyRecords, train: Mapping[int, Sequence[TrainPoint]] | None = None) -> list[Advice]:
    """Everything that the sweep so far gives reason to say, convergence first. Pure.

    train: training losses by trial, from its log; without them nothing is said about overfitting.
    """
    answers = [rule(study, sweep) for rule in (*CONVERGENCE_RULES, *MACHINE_RULES, *RULES_OF_MLPERF)]
    answers.append(overfits(study, sweep, train or {}))
    return [advice for advice in answers if advice is not None]
