"""TEST ONLY: runs a Megatron-Bridge program on a CPU.

What ``cpu_shim`` answers, and what Megatron-Bridge asks of CUDA besides. It changes no arithmetic, and it covers
neither Transformer Engine nor FP8, bf16, NCCL, the distributed optimizer or speed. ``main`` runs the recipe, so that a
warm worker can serve it; ``python -m tests.recipes.bridge_shim`` does so at once.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from tests.recipes import cpu_shim  # noqa: F401 - first: Megatron looks for CUDA while it is imported

from lora_tune_recipes.bridge import imports  # isort: skip
from lora_tune_recipes.ending import end_with  # isort: skip


def install() -> None:
    """Answer the calls from here on, in this process."""
    cuda: Any = torch.cuda
    cuda.memory_allocated = cuda.max_memory_allocated = cuda.max_memory_reserved = lambda *_: 0
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    distributed: Any = torch.distributed
    barrier = distributed.barrier
    distributed.barrier = lambda *args, device_ids=None, **named: barrier(*args, **named)  # gloo refuses device_ids


def install_states() -> None:
    """Megatron's named random states, kept by the CPU's generator; Bridge sets none where there is no GPU."""
    from megatron.bridge.training import initialize, setup
    from megatron.core.tensor_parallel import random

    states: Any = random
    states._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    states._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    setup.initialize_megatron = partial(setup.initialize_megatron, allow_no_cuda=True)
    plain = initialize._set_random_seed

    def with_names(seed: int, *args: Any, **named: Any) -> None:
        plain(seed, *args, **named)
        keep, tracker = torch.get_rng_state(), random.get_cuda_rng_tracker()
        tracker.reset()
        names = (
            random._DATA_PARALLEL_RNG_TRACKER_NAME,
            random._MODEL_PARALLEL_RNG_TRACKER_NAME,
            random._EXPERT_PARALLEL_RNG_TRACKER_NAME,
        )
        for i, name in enumerate(names):
            tracker.add(name, seed + 2718 * i)
        torch.set_rng_state(keep)

    initialize._set_random_seed = with_names


def main() -> int:
    """The Bridge recipe under the shim; the environment holds its knobs."""
    from lora_tune_recipes import bridge_lora

    torch.set_num_threads(1)
    imports.prepare()
    install_states()
    return bridge_lora.main(cuda=False)


install()

if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    end_with(main)
