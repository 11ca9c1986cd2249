"""lora_tune: hyperparameter sweeps and convergence tuning of LoRA trials on Slurm.

A study file says what may vary; Optuna proposes; submitit launches; the trial's ``:::MLLOG``
lines are the objective: the seconds from ``run_start`` to the eval loss that was asked for.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from lora_tune.base import VERSION

if TYPE_CHECKING:
    from lora_tune.cli.api import Sweep as Sweep
    from lora_tune.search.pruner import StallPruner as StallPruner

__version__ = VERSION

_PUBLIC = {"StallPruner": "lora_tune.search.pruner", "Sweep": "lora_tune.cli.api"}
"""What ``from lora_tune import ...`` gives -> its module, loaded when it is asked for: both take Optuna with them."""


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def _without_interrupts(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's own hook, but for Ctrl-C while libraries are still being loaded: that is no fault."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, trace)


_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def _bound_threads() -> None:
    """One thread for NumPy's linear algebra where the user has set no number: with a thread a core a command takes
    several times the processor time, on a login node that others use, and is no faster.

    ``putenv`` reaches the libraries and not ``os.environ``, of which trials are given a copy: theirs stay as they are.
    """
    if not any(os.environ.get(name) for name in _THREADS):
        for name in _THREADS:
            os.putenv(name, "1")


if sys.argv[:1] == ["-m"]:  # python -m lora_tune.COMMAND, and nobody's import
    sys.excepthook = _without_interrupts
    _bound_threads()
elif os.path.basename(sys.argv[0] if sys.argv else "") == "lora-tune":  # noqa: PTH119 - pathlib takes longer to import
    _bound_threads()
