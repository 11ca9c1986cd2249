"""LoRA fine-tuning with NVIDIA NeMo: ``python -m lora_tune.recipes.nemo_lora``.

Knobs come from the environment under MLPerf's names (``docs/nemo.md``), progress goes to standard output as MLLOG
lines. One process runs as it is; several run under ``torchrun``, or as the tasks of one ``srun`` step.

Exit codes: 0 the run ended, and the log says whether at its target; 2 a knob, the data or the checkpoint cannot be
used; 3 the machine cannot do what was asked; 1 the training itself failed. A process that fails ends at once, without
waiting for the others: they must not hang.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

from lora_tune.base.errors import LoraTuneError, SetupError
from lora_tune.recipes.ending import end_with
from lora_tune.recipes.nemo.processes import Processes, read_processes
from lora_tune.recipes.nemo.settings import read
from lora_tune.recipes.warm_worker import hand_over

QUIET = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "UB_SKIPMC": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "NEMO_LOG_TRAIN_LOSS": "0",
}
"""Set unless the caller sets them: NVLink multicast stays off, kernels queue in order, and NeMo does not copy the loss
to the host at every step. A site whose nodes are its own may set NCCL_NVLS_ENABLE=1."""


def main(*, cuda: bool = True) -> int:
    """Run the trial that the environment describes; returns the exit code. ``cuda=False`` is for the tests."""
    processes = Processes()
    # Lightning holds SIGTERM back until a step ends, to save what it has, but calls a handler that is there before. A
    # trial has nothing to save, and its GPUs are wanted.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        processes = read_processes(os.environ)
        settings = read(os.environ, processes.world)
        # Seconds to import, and a bad knob must not wait for it.
        import torch

        if cuda and not torch.cuda.is_available():
            raise SetupError("no CUDA device is visible; NeMo trains on NVIDIA GPUs only")
        from lora_tune.recipes.nemo import trial

        trial.run(settings, processes, cuda=cuda)
    except LoraTuneError as error:
        # Every rank finds the same fault in the same environment: one line is enough.
        if processes.rank == 0:
            print(f"nemo_lora: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the last line must say what failed, whatever it was
        traceback.print_exc()
        message = " ".join(str(error).split())
        name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        print(f"nemo_lora: rank {processes.rank}: {name}: {message}", file=sys.stderr, flush=True)
        return 1
    return 0


def started() -> int:
    """The trial, in a warm worker where one listens; returns the exit code."""
    handed_over = hand_over("lora_tune.recipes.nemo_lora")
    return main() if handed_over is None else handed_over


if __name__ == "__main__":
    end_with(started)
