"""How far a run is as a whole number, for tools that know no other steps: Optuna, MLflow, TensorBoard."""

from __future__ import annotations


def steps_of_one(unit: str) -> int:
    """Whole steps for one of what a log counts: a thousand for an epoch, of which evals lie parts apart; else 1.

    One scale for all trials of a study, which are compared at equal steps. unit: samples, steps or epochs.
    """
    return 1000 if unit == "epochs" else 1


def whole_step(progress: float, unit: str) -> int:
    """The step at which these tools are told of what happened at ``progress``, counted in ``unit``."""
    return round(progress * steps_of_one(unit))
