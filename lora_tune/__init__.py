"""lora_tune: hyperparameter sweeps and convergence tuning of LoRA trials on Slurm.

A study file says what may vary; Optuna proposes; submitit launches; the trial's ``:::MLLOG``
lines are the objective: the seconds from ``run_start`` to the eval loss that was asked for.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_tune.search.pruner import StallPruner as StallPruner

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """``lora_tune.StallPruner``, loaded when it is asked for: it takes Optuna with it."""
    if name != "StallPruner":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lora_tune.search import pruner

    return pruner.StallPruner


def _without_interrupts(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's own hook, but for Ctrl-C while libraries are still being loaded: that is no fault."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"]:  # python -m lora_tune.COMMAND, and nobody's import
    sys.excepthook = _without_interrupts
