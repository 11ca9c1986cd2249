"""TEST ONLY: runs a NeMo program on a CPU.

NeMo 2.x and Megatron-Core ask for CUDA streams and ``device="cuda"`` without looking whether there is a GPU. This
answers those calls on the CPU, so that the very code of the recipe trains on gloo. It changes no arithmetic, and it
covers neither Transformer Engine nor FP8, bf16, NCCL, the distributed optimizer or speed.

Importing this module changes torch for the whole process: only programs of their own do it. ``main`` runs the recipe,
so that a warm worker can serve it; ``python -m tests.recipes.cpu_shim`` does so at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _is_cuda(x: object) -> bool:
    return (isinstance(x, str) and x.startswith("cuda")) or (isinstance(x, torch.device) and x.type == "cuda")


class CudaMeansCpu(TorchFunctionMode):
    """Puts on the CPU what is asked to be on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # Megatron asserts on the type's name
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return func(*(CPU if _is_cuda(a) else a for a in args), **kwargs)


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, _: str) -> Any:
        return lambda *a, **k: None


def install() -> None:
    """Answer CUDA's calls from here on, in this process."""
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim is for machines without a GPU")
    cuda: Any = torch.cuda
    cuda.Stream = _Stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda *_: None
    CudaMeansCpu().__enter__()


def install_states(seed: int) -> None:
    """Megatron's named random states, kept by the CPU's generator; loaded checkpoints stay where they are."""
    from megatron.core.tensor_parallel import random
    from nemo.lightning.io import pl

    pl._fix_tensors_device = lambda checkpoint: checkpoint

    random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    cuda: Any = torch.cuda
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    keep = torch.get_rng_state()
    tracker = random.get_cuda_rng_tracker()
    tracker.reset()
    names = (
        random._DATA_PARALLEL_RNG_TRACKER_NAME,
        random._MODEL_PARALLEL_RNG_TRACKER_NAME,
        random._EXPERT_PARALLEL_RNG_TRACKER_NAME,
    )
    for i, name in enumerate(names):
        tracker.add(name, seed + 2718 * i)
    torch.set_rng_state(keep)


def main() -> int:
    """The NeMo recipe under the shim; the environment holds its knobs."""
    from lora_tune_recipes import nemo_lora

    torch.set_num_threads(1)
    install_states(int(os.environ.get("SEED") or "1"))
    return nemo_lora.main(cuda=False)


install()

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
