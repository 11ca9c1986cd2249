"""The adapters of a Megatron-Core model, and their initialization."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from lora_tune_recipes.megatron.settings import TARGETS


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter of this process. layer: block number in the whole model, from 0. target: one of TARGETS.

    a: [rank, inputs] and b: [outputs, rank], this rank's shard of each under tensor parallelism.
    """

    layer: int
    target: str
    a: torch.nn.Parameter
    b: torch.nn.Parameter


def cores(models: Iterable[Any]) -> Iterator[Any]:
    """The unwrapped Megatron-Core model of each pipeline stage of this process."""
    for model in models:
        core = model
        while hasattr(core, "module"):
            core = core.module
        yield core


def adapters(core: Any) -> Iterator[Adapter]:
    """The adapters of one pipeline stage of a Megatron-Core GPT model."""
    for layer in core.decoder.layers:
        for target in TARGETS:
            module = getattr(layer.self_attention, target).adapter
            yield Adapter(layer.layer_number - 1, target, module.linear_in.weight, module.linear_out.weight)


def start(core: Any, seed: int) -> None:
    """Initialize the A matrices from ``seed``, the same in every layout; the B matrices stay zero.

    Megatron-Core draws them from states that differ between ranks, so one seed would differ between layouts.
    Uniform within 1/sqrt(inputs): torch's kaiming_uniform_ with a = sqrt(5), as peft and MLPerf's implementation.
    """
    for adapter in adapters(core):
        entropy = (seed, adapter.layer, TARGETS.index(adapter.target))
        rng = np.random.default_rng(np.random.SeedSequence(entropy))
        size = whole_size(adapter.a)
        bound = 1.0 / math.sqrt(size[1])
        drawn = torch.from_numpy(rng.uniform(-bound, bound, size).astype(np.float32))
        with torch.no_grad():
            adapter.a.copy_(own_part(drawn, adapter.a))


def whole_size(weight: torch.nn.Parameter) -> tuple[int, ...]:
    """The size of a weight over all tensor-parallel ranks."""
    size, dim = list(weight.shape), _split(weight)
    if dim is not None:
        size[dim] *= parallel_state.get_tensor_model_parallel_world_size()
    return tuple(size)


def own_part(whole: torch.Tensor, weight: torch.nn.Parameter) -> torch.Tensor:
    """This rank's shard of a ``whole`` matrix."""
    dim = _split(weight)
    if dim is None:
        return whole
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return whole.chunk(ranks, dim)[parallel_state.get_tensor_model_parallel_rank()]


def gathered(weight: torch.nn.Parameter) -> torch.Tensor:
    """The whole matrix on every tensor-parallel rank, float32 on the CPU."""
    own = weight.detach().float().contiguous()
    dim = _split(weight)
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    if dim is None or ranks == 1:
        return own.cpu()
    parts = [torch.empty_like(own) for _ in range(ranks)]
    torch.distributed.all_gather(parts, own, group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim).cpu()


def _split(weight: torch.nn.Parameter) -> int | None:
    """The dimension that tensor parallelism splits; None if every rank holds the whole."""
    return int(weight.partition_dim) if getattr(weight, "tensor_model_parallel", False) else None  # type: ignore[attr-defined]
