"""What the trials of a sweep are compared by: one class a kind, named by ``objective.score``."""

from __future__ import annotations

from lora_tune.base.registry import OBJECTIVES
from lora_tune.config.study import Study
from lora_tune.search.objectives.base import Objective

__all__ = ["Objective", "objective_of", "objectives_of"]


def objective_of(study: Study) -> Objective:
    """The objective that ranks the study's trials."""
    return _made(study.objective.score, study)


def objectives_of(study: Study) -> tuple[Objective, ...]:
    """The objective, and behind it the second one where the study weighs two against each other."""
    names = (study.objective.score, study.objective.second)
    return tuple(_made(name, study) for name in names if name is not None)


def _made(name: str, study: Study) -> Objective:
    objective: Objective = OBJECTIVES.make(name, OBJECTIVES.load(name), study)
    return objective
