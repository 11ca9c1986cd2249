"""LoRA fine-tuning with NVIDIA NeMo: ``python -m lora_tune_recipes.nemo_lora``.

Settings come from the environment with MLPerf's names (``docs/trainers.md``); progress goes to standard output as MLLOG
lines. Run it alone, or several processes under ``torchrun`` or as the tasks of one ``srun`` step.

Exit codes: 0 the run ended, and the log says whether at its target; 2 a setting, the data or the checkpoint cannot be
used; 3 the machine does not support the settings; 1 the training failed. A failing process exits at once, without
waiting for the others, so that none hangs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lora_tune_recipes.ending import end_with
from lora_tune_recipes.megatron.program import run_program
from lora_tune_recipes.nemo.settings import read
from lora_tune_recipes.worker_request import submit_to_worker

VARIABLES = {"NEMO_LOG_TRAIN_LOSS": "0"}
"""Stops NeMo from copying the loss to the host at every step."""


def main(*, cuda: bool = True) -> int:
    """Run the trial of the environment; returns the exit code. ``cuda=False`` is for the tests."""

    def trial() -> Callable[..., Any]:
        from lora_tune_recipes.nemo import trial

        return partial(trial.run, cuda=cuda)

    return run_program("nemo_lora", read, trial, cuda=cuda, environment=VARIABLES)


def started() -> int:
    """Run the trial, in a warm worker if there is one; returns the exit code."""
    exit_code = submit_to_worker("lora_tune_recipes.nemo_lora")
    return main() if exit_code is None else exit_code


if __name__ == "__main__":
    end_with(started)
