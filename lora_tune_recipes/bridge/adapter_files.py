"""Converts an adapter to and from peft's format.

Megatron-Core adapts queries, keys and values as one fused projection with one A matrix. peft has three modules: each
gets that A and its own rows of B, which is the same function.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors import safe_open
from safetensors.torch import save_file

from lora_tune.base.errors import InputError
from lora_tune_recipes.bridge.peft_format import CONFIG, FUSED, PROJECTION, WEIGHTS, config_of, key_of
from lora_tune_recipes.bridge.settings import BridgeSettings
from lora_tune_recipes.megatron.adapters import adapters, gathered, own_part
from lora_tune_recipes.megatron.shapes import Shape


def split_qkv(b: torch.Tensor, shape: Shape) -> dict[str, torch.Tensor]:
    """Rows of q, k and v in ``b`` [(heads + 2 * kv_groups) * head, rank], which stores key-value groups together."""
    per_group = shape.heads // shape.kv_groups
    groups = b.view(shape.kv_groups, per_group + 2, shape.head, -1)
    q, k, v = groups.split((per_group, 1, 1), dim=1)
    return {name: part.flatten(0, 2).contiguous() for name, part in zip(FUSED, (q, k, v), strict=True)}


def join_qkv(parts: dict[str, torch.Tensor], shape: Shape) -> torch.Tensor:
    """The inverse of ``split_qkv``."""
    groups = [parts[name].view(shape.kv_groups, -1, shape.head, parts[name].shape[1]) for name in FUSED]
    return torch.cat(groups, dim=1).flatten(0, 2)


def save(models: list[Any], folder: Path, settings: BridgeSettings) -> None:
    """Write the adapters of all ranks to ``folder``; every rank must call it, and the first one writes."""
    own: dict[str, torch.Tensor] = {}
    for core in models:
        for adapter in adapters(core):
            own |= _peft_tensors(adapter.layer, adapter.target, gathered(adapter.a), gathered(adapter.b), settings)
    stages: list[Any] = [None] * parallel_state.get_pipeline_model_parallel_world_size()
    torch.distributed.all_gather_object(stages, own, group=parallel_state.get_pipeline_model_parallel_group())
    if torch.distributed.get_rank() == 0:
        merged = {name: tensor.contiguous() for stage in stages for name, tensor in stage.items()}
        save_file(merged, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config_of(settings), indent=2) + "\n", encoding="utf-8")
    torch.distributed.barrier()


def _peft_tensors(
    layer: int, target: str, a: torch.Tensor, b: torch.Tensor, settings: BridgeSettings
) -> dict[str, torch.Tensor]:
    parts = split_qkv(b, settings.shape) if target == "linear_qkv" else {PROJECTION: b}
    tensors = {}
    for name, rows in parts.items():
        tensors[key_of(layer, name, "A")] = a.clone()
        tensors[key_of(layer, name, "B")] = rows
    return tensors


def make_folder(folder: Path) -> None:
    """Create the adapter's folder before training. Raises InputError on failure."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"SAVE_ADAPTER={str(folder)!r}: cannot be made: {error.strerror}; name another folder"
        ) from error


def load(models: list[Any], folder: Path, settings: BridgeSettings) -> None:
    """Fill the adapters of these chunks from ``folder``, which is already checked.

    Raises InputError if queries, keys and values have different A matrices, which a fused projection cannot hold.
    """
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        held = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118 - a handle, not a mapping
    for core in models:
        for adapter in adapters(core):
            a, b = _megatron_tensors(held, adapter.layer, adapter.target, folder, settings.shape)
            with torch.no_grad():
                for weight, whole in ((adapter.a, a), (adapter.b, b)):
                    weight.copy_(own_part(whole, weight))


def _megatron_tensors(
    held: dict[str, torch.Tensor], layer: int, target: str, folder: Path, shape: Shape
) -> tuple[torch.Tensor, torch.Tensor]:
    names = FUSED if target == "linear_qkv" else (PROJECTION,)
    a = held[key_of(layer, names[0], "A")]
    if any(not torch.equal(a, held[key_of(layer, name, "A")]) for name in names):
        raise InputError(
            f"ADAPTER={str(folder)!r}: layer {layer}: q, k and v have different A matrices; allowed is one for the"
            " three, as this recipe writes it, for Megatron-Core adapts them as one projection"
        )
    parts = {name: held[key_of(layer, name, "B")] for name in names}
    return a, join_qkv(parts, shape) if target == "linear_qkv" else parts[PROJECTION]
