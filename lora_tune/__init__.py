"""lora_tune: hyperparameter sweeps and convergence tuning of LoRA trials on Slurm.

A study file says what may vary; Optuna proposes; submitit launches; the trial's ``:::MLLOG``
lines are the objective: the seconds from ``run_start`` to the eval loss that was asked for.
"""

from __future__ import annotations

import sys
from types import TracebackType

__version__ = "0.1.0"


def _without_interrupts(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's own hook, but for Ctrl-C while libraries are still being loaded: that is no fault."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"]:  # python -m lora_tune.COMMAND, and nobody's import
    sys.excepthook = _without_interrupts
