"""Kernel warm-up before ``run_start``, as MLPerf allows it: synthetic data, and all states restored."""

from __future__ import annotations

from typing import Any

import torch

from lora_tune_recipes.megatron.data import synthetic
from lora_tune_recipes.megatron.states import random_states_kept, reset_fp8
from lora_tune_recipes.nemo.settings import NemoSettings


def run(trainer: Any, settings: NemoSettings) -> None:
    """Run some forward and backward passes without optimizer steps, and some evaluation passes, on random tokens.

    Weights do not change; gradients, random states and FP8 scaling histories are restored.
    """
    if not settings.warmup_train and not settings.warmup_validation:
        return
    model = trainer.strategy.model
    batch = synthetic(settings)
    with random_states_kept(named=not settings.speed.cuda_graph):
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
    if settings.precision.has_history:
        reset_fp8(model)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _clear_gradients(trainer: Any) -> None:
    for chunk in trainer.strategy.model:
        chunk.zero_grad_buffer()
    for optimizer in trainer.strategy.optimizers:
        optimizer.zero_grad()
