"""Kernel warm-up before ``run_start``, as MLPerf allows it: synthetic data, and every state back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from lora_tune.recipes.nemo.data import synthetic
from lora_tune.recipes.nemo.settings import Settings


def run(trainer: Any, settings: Settings) -> None:
    """Some training passes (forward and backward, no optimizer step) and some evaluation passes on random tokens.

    Weights are never touched; gradients, random states and FP8 scaling histories are put back.
    """
    if not settings.warmup_train and not settings.warmup_validation:
        return
    model = trainer.strategy.model
    batch = synthetic(settings)
    with _random_states_kept(named=not settings.speed.cuda_graph):
        for _ in range(settings.warmup_train):
            _clear_gradients(trainer)
            model.training_step(iter([(batch, 0, 0)]))
        _clear_gradients(trainer)
        modes = {module: module.training for module in model.modules()}
        model.eval()
        with torch.no_grad():
            for _ in range(settings.warmup_validation):
                model.validation_step(iter([(batch, 0, 0)]))
        for module, training in modes.items():
            module.training = training
    if settings.precision.fp8:
        _reset_fp8(model)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _clear_gradients(trainer: Any) -> None:
    for chunk in trainer.strategy.model:
        chunk.zero_grad_buffer()
    for optimizer in trainer.strategy.optimizers:
        optimizer.zero_grad()


@contextmanager
def _random_states_kept(*, named: bool) -> Iterator[None]:
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


def _reset_fp8(model: torch.nn.Module) -> None:
    """Forget the ranges that random tokens left in Transformer Engine's scaling histories."""
    module: Any
    for module in model.modules():
        if hasattr(module, "reset_fp8_meta_tensors"):
            module.reset_fp8_meta_tensors()
