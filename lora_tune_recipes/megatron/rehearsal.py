"""One layer of a trial's model, forward and backward, of which only what the process keeps anyway is left.

That is the GPU's context, the handles and first kernels of the libraries, and what is compiled at its first call.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random

from lora_tune_recipes.megatron.data import synthetic
from lora_tune_recipes.megatron.processes import Processes
from lora_tune_recipes.megatron.settings import CommonSettings

LARGEST = 1_000_000_000
"""Parameters of a model above which nothing is rehearsed: its layer needs memory, and its trials take minutes."""

Knobs = TypeVar("Knobs", bound=CommonSettings)


def one_layer(settings: Knobs) -> Knobs:
    """The settings of a single layer with random weights on one process, in bf16 (float32 on a CPU)."""
    layout = settings.layout
    return replace(
        settings,
        shape=replace(settings.shape, layers=1),
        layout=replace(layout, tp=1, pp=1, vp=1, cp=1, sp=False, dp=1, minibs=layout.mbs),
        precision=replace(settings.precision, fp8=False, params=False, dpa=False, act=False, fp4=False),
        model=None,
    )


def rehearse(settings: Knobs, processes: Processes, build: Callable[[Knobs], Any], *, cuda: bool) -> None:
    """Build one layer by ``build`` and train it for a step without an optimizer; then free what it held."""
    if settings.shape.parameters > LARGEST:
        return
    _compile_without_workers()
    if cuda:
        torch.cuda.set_device(processes.local_rank)
    with _alone(cuda=cuda):
        _passes(build(one_layer(settings)), one_layer(settings), cuda=cuda)
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # A trial's log states the most that its allocator held, which must be its own.
        torch.cuda.reset_peak_memory_stats()


def _compile_without_workers() -> None:
    """Let torch compile in this process, unless the trial says with how many others.

    It would start one for each core at its first kernel, and wait for none of them: they would import torch beside
    the trial that is timed when its rehearsal has ended.
    """
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config

        config.compile_threads = 1


def _passes(core: Any, settings: CommonSettings, *, cuda: bool) -> None:
    rows = synthetic(settings)
    part = {name: one.to("cuda") if cuda else one for name, one in rows.items()}

    def loss() -> torch.Tensor:
        losses = core(
            input_ids=part["tokens"], position_ids=part["position_ids"], attention_mask=None, labels=part["labels"]
        )
        total: torch.Tensor = (losses.float() * part["loss_mask"]).sum()
        return total

    for parameter in core.parameters():
        parameter.requires_grad_(True)
    loss().backward()
    core.eval()
    with torch.no_grad():
        loss()


@contextlib.contextmanager
def _alone(*, cuda: bool) -> Iterator[None]:
    """A Megatron world of this process only, of which nothing is left afterwards."""
    distributed: Any = torch.distributed
    backend = "nccl" if cuda else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        random.model_parallel_cuda_manual_seed(1)
        torch.distributed.all_reduce(torch.zeros(1, device="cuda" if cuda else "cpu"))
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
        # The trial chooses its own kind of random states, which Megatron-Core allows once.
        states: Any = random
        states._CUDA_RNG_STATE_TRACKER, states._CUDA_RNG_STATE_TRACKER_INITIALIZED = None, False
