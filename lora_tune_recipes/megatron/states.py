"""Restores states after a kernel warm-up, and sets timeouts for lost ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


@contextmanager
def random_states_kept(*, named: bool) -> Iterator[None]:
    """Restore the random states. named: Megatron's own, too; a captured CUDA graph's must not be replaced."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states() if named else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        if states is not None:
            tracker.set_states(states)


def reset_fp8(model: torch.nn.Module) -> None:
    """Clear Transformer Engine's FP8 scaling histories of random tokens."""
    module: Any
    for module in model.modules():
        if hasattr(module, "reset_fp8_meta_tensors"):
            module.reset_fp8_meta_tensors()


def bound_waiting(seconds: int) -> None:
    """Set the timeout of every process group, so that a run with a lost rank ends.

    Megatron-Core's default is half an hour, which the scheduler would bill.
    """
    from torch.distributed import distributed_c10d as c10d

    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timedelta(seconds=seconds), group)
