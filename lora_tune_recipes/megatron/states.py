"""States that a kernel warm-up must leave as it found them, and limits that a lost rank must not outlast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


@contextmanager
def random_states_kept(*, named: bool) -> Iterator[None]:
    """``named``: Megatron's own states too; those that a captured CUDA graph refers to must not be replaced."""
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
    """Forget the ranges that random tokens left in Transformer Engine's scaling histories."""
    module: Any
    for module in model.modules():
        if hasattr(module, "reset_fp8_meta_tensors"):
            module.reset_fp8_meta_tensors()


def bound_waiting(seconds: int) -> None:
    """Give every process group this limit, so that a run in which a rank waits for a lost one ends.

    Megatron-Core makes its groups with half an hour of patience, which a scheduler would bill for each lost rank.
    """
    from torch.distributed import distributed_c10d as c10d

    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timedelta(seconds=seconds), group)
