"""Kernel warm-up before ``run_start``, as MLPerf allows it: synthetic data, and all states restored."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from lora_tune_recipes.bridge.settings import BridgeSettings
from lora_tune_recipes.bridge.step import forward_backward, passes
from lora_tune_recipes.megatron.data import synthetic
from lora_tune_recipes.megatron.states import random_states_kept, reset_fp8


def run(models: list[Any], optimizer: Any, settings: BridgeSettings) -> None:
    """Run some forward and backward passes without optimizer steps, and some evaluation passes, on random tokens.

    Weights do not change; gradients, random states and FP8 scaling histories are restored. A CUDA graph is captured
    here, outside the measured time: Megatron-Core keeps it for the whole process.
    """
    if not settings.warmup_train and not settings.warmup_validation:
        return
    layout, speed = settings.layout, settings.speed
    rows = synthetic(settings)
    function = forward_backward(models)
    if speed.cuda_graph:
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        function = FullCudaGraphWrapper(function, cuda_graph_warmup_steps=speed.graph_warmup)
    with random_states_kept(named=not speed.cuda_graph):
        for _ in range(settings.warmup_train):
            _clear_gradients(models, optimizer)
            batches = ({name: one[i : i + layout.mbs] for name, one in rows.items()} for i in _starts(settings))
            passes(models, batches, count=layout.accumulation, mbs=layout.mbs, forward_only=False, function=function)
        _clear_gradients(models, optimizer)
        for model in models:
            model.eval()
        with torch.no_grad():
            for _ in range(settings.warmup_validation):
                row = {name: one[:1].expand(speed.val_mbs, -1).contiguous() for name, one in rows.items()}
                passes(models, itertools.repeat(row), count=layout.turn, mbs=speed.val_mbs, forward_only=True)
        for model in models:
            model.train()
    if settings.precision.has_history:
        for model in models:
            reset_fp8(model)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _starts(settings: BridgeSettings) -> range:
    return range(0, settings.layout.minibs, settings.layout.mbs)


def _clear_gradients(models: list[Any], optimizer: Any) -> None:
    for model in models:
        model.zero_grad_buffer()
    optimizer.zero_grad()
