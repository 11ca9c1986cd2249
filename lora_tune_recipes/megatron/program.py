"""The main function of a recipe: settings, one-line error messages, exit codes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lora_tune.base.errors import SetupError
from lora_tune_recipes.ending import say_why
from lora_tune_recipes.megatron.processes import Processes, read_processes
from lora_tune_recipes.megatron.settings import CommonSettings

Knobs = TypeVar("Knobs", bound=CommonSettings)

QUIET = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "UB_SKIPMC": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Defaults of environment variables: no NVLink multicast, and kernels queue in order. A site with exclusive nodes may
set NCCL_NVLS_ENABLE=1."""


def run_program(
    name: str,
    read: Callable[[Mapping[str, str], int], Knobs],
    trial: Callable[[], Callable[[Knobs, Processes], Any]],
    *,
    cuda: bool,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run the trial of the environment; returns the exit code.

    name: of the program, in messages. read: environment and number of processes -> settings. trial: imports the
    library, which takes seconds, and returns the training function; called after the settings are checked.
    environment: further defaults of variables.
    """
    processes = Processes()
    # The libraries defer SIGTERM to the end of a step, to save state, but call an existing handler first. A trial has
    # nothing to save, and must free its GPUs.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        for variable, value in {**QUIET, **(environment or {})}.items():
            os.environ.setdefault(variable, value)
        processes = read_processes(os.environ)
        settings = read(os.environ, processes.world)
        import torch

        if cuda and not torch.cuda.is_available():
            raise SetupError(f"no CUDA device is visible; {name} trains on NVIDIA GPUs only")
        trial()(settings, processes)
    except Exception as error:  # noqa: BLE001 - the last line must say what failed, whatever it was
        return say_why(name, error, str(processes.rank))
    return 0
