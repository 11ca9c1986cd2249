"""LoRA fine-tuning with NVIDIA Megatron-Bridge: ``python -m lora_tune_recipes.bridge_lora``.

Settings come from the environment with the names of MLPerf v6.0's configuration files, or those of v5.1
(``docs/trainers.md``); progress goes to standard output as MLLOG lines. Run it alone, or several processes under
``torchrun`` or as the tasks of one ``srun`` step. Exit codes are those of ``nemo_lora``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lora_tune_recipes.bridge.settings import read
from lora_tune_recipes.ending import end_with
from lora_tune_recipes.megatron.program import run_program
from lora_tune_recipes.worker_request import submit_to_worker


def main(*, cuda: bool = True) -> int:
    """Run the trial of the environment; returns the exit code. ``cuda=False`` is for the tests."""

    def trial() -> Callable[..., Any]:
        from lora_tune_recipes.bridge import trial

        return partial(trial.run, cuda=cuda)

    return run_program("bridge_lora", read, trial, cuda=cuda)


def started() -> int:
    """Run the trial, in a warm worker if there is one; returns the exit code."""
    exit_code = submit_to_worker("lora_tune_recipes.bridge_lora")
    return main() if exit_code is None else exit_code


if __name__ == "__main__":
    end_with(started)
