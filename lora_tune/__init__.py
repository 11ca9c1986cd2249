"""lora_tune: hyperparameter sweeps and convergence tuning of LoRA trials on Slurm.

A study file defines the search space; Optuna proposes; submitit launches. The objective is read from the trial's
``:::MLLOG`` lines: the seconds from ``run_start`` to the target eval loss.
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
"""Public name -> its module, imported on first use, because both import Optuna."""


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def _without_interrupts(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The default excepthook, silent for Ctrl-C while libraries are imported."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, trace)


_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def _bound_threads() -> None:
    """Use one thread for NumPy's linear algebra unless the user sets a number: one thread per core costs several times
    the CPU time, on a shared login node, and is no faster.

    ``putenv`` reaches the libraries but not ``os.environ``, which trials inherit: their settings stay unchanged.
    """
    if not any(os.environ.get(name) for name in _THREADS):
        for name in _THREADS:
            os.putenv(name, "1")


if sys.argv[:1] == ["-m"]:  # only for python -m lora_tune.COMMAND, not for an import
    sys.excepthook = _without_interrupts
    _bound_threads()
elif os.path.basename(sys.argv[0] if sys.argv else "") == "lora-tune":  # noqa: PTH119 - pathlib takes longer to import
    _bound_threads()
