"""FSDP2 over the data-parallel ranks, by torch, which shards on GPUs and, for tests, on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from lora_tune_recipes.fsdp_settings import Sharding


def shard(model: Any, sharding: Sharding, device: torch.device, world: int) -> Any:
    """Shard ``model`` over ``world`` ranks in place; its parameters become new objects.

    Each unit of ``sharding.wrap`` is gathered and freed separately, the rest with the whole model. The model may be on
    the CPU: only each rank's shards go to ``device``.
    """
    mesh = _mesh(sharding, device, world)
    policy = CPUOffloadPolicy() if sharding.offload else OffloadPolicy()
    freed = sharding.strategy == "full_shard"
    for unit in (*_units(model, sharding.wrap), model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=freed, offload_policy=policy)
    return model


def free_gathered(model: Any) -> None:
    """Free what a forward pass without a backward pass left gathered, which would be stale after a step."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _mesh(sharding: Sharding, device: torch.device, world: int) -> DeviceMesh:
    shards = sharding.shards or world
    if shards == world:
        return init_device_mesh(device.type, (world,))
    # Hybrid: adjacent ranks share a copy, because their links are faster.
    return init_device_mesh(device.type, (world // shards, shards), mesh_dim_names=("copies", "shards"))


def _units(model: Any, wrap: str) -> Iterator[Any]:
    """The modules that are gathered separately."""
    layers = set(model.get_base_model()._no_split_modules or ())
    adapted = {
        id(inner) for m in model.modules() if isinstance(m, LoraLayer) for inner in m.modules() if inner is not m
    }
    for module in model.modules():
        is_layer = type(module).__name__ in layers
        is_module = isinstance(module, LoraLayer | torch.nn.Linear) and id(module) not in adapted
        if (wrap == "layer" and is_layer) or (wrap == "module" and is_module):
            yield module
