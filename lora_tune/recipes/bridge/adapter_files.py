"""A tuned adapter in peft's format, and back: so that it can be used wherever peft loads one.

Megatron-Core adapts queries, keys and values as one fused projection, with one A matrix for the three. peft has three
modules: each gets that A and its own rows of B, which is the same function.
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
from lora_tune.recipes.bridge.settings import BridgeSettings
from lora_tune.recipes.megatron.adapters import adapters, gathered, own_part
from lora_tune.recipes.megatron.shapes import Shape

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FUSED, PROJECTION = ("q_proj", "k_proj", "v_proj"), "o_proj"
ROOT = "base_model.model.model.layers"


def split_qkv(b: torch.Tensor, shape: Shape) -> dict[str, torch.Tensor]:
    """Rows of q, k and v in ``b`` [(heads + 2 * kv_groups) * head, rank], which keeps each key-value group together."""
    per_group = shape.heads // shape.kv_groups
    groups = b.view(shape.kv_groups, per_group + 2, shape.head, -1)
    q, k, v = groups.split((per_group, 1, 1), dim=1)
    return {name: part.flatten(0, 2).contiguous() for name, part in zip(FUSED, (q, k, v), strict=True)}


def join_qkv(parts: dict[str, torch.Tensor], shape: Shape) -> torch.Tensor:
    """The inverse of ``split_qkv``."""
    groups = [parts[name].view(shape.kv_groups, -1, shape.head, parts[name].shape[1]) for name in FUSED]
    return torch.cat(groups, dim=1).flatten(0, 2)


def config_of(settings: BridgeSettings) -> dict[str, Any]:
    """What peft wants to know of an adapter."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(settings.model) if settings.model else None,
        "r": settings.lora_rank,
        "lora_alpha": settings.lora_alpha,
        "lora_dropout": settings.lora_dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [*FUSED, PROJECTION],
    }


def save(models: list[Any], folder: Path, settings: BridgeSettings) -> None:
    """Write the adapters of all ranks to ``folder``; every rank calls it, and the first one writes."""
    own: dict[str, torch.Tensor] = {}
    for core in models:
        for adapter in adapters(core):
            own |= _peft_tensors(adapter.layer, adapter.target, gathered(adapter.a), gathered(adapter.b), settings)
    stages: list[Any] = [None] * parallel_state.get_pipeline_model_parallel_world_size()
    torch.distributed.all_gather_object(stages, own, group=parallel_state.get_pipeline_model_parallel_group())
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
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
        tensors[_key(layer, name, "A")] = a.clone()
        tensors[_key(layer, name, "B")] = rows
    return tensors


def _key(layer: int, name: str, matrix: str) -> str:
    return f"{ROOT}.{layer}.self_attn.{name}.lora_{matrix}.weight"


def check(folder: Path, settings: BridgeSettings) -> None:
    """Raise InputError where ``folder`` holds no adapter that these settings can continue."""
    where = f"ADAPTER={str(folder)!r}"
    try:
        said = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: no readable {CONFIG}: {error}; give a folder in peft's format") from error
    if not (folder / WEIGHTS).is_file():
        raise InputError(f"{where}: {WEIGHTS} is missing; give a folder in peft's format")
    wanted = config_of(settings)
    for key in ("r", "lora_alpha"):
        if said.get(key) != wanted[key]:
            raise InputError(
                f"{where}: {key} is {said.get(key)}; allowed is {wanted[key]}, as LORA_RANK and LORA_ALPHA"
            )
    refused = [key for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern") if said.get(key)]
    if refused:
        raise InputError(f"{where}: {refused[0]} is set; allowed is plain LoRA")
    if said.get("target_modules") is not None and set(said["target_modules"]) != {*FUSED, PROJECTION}:
        raise InputError(f"{where}: target_modules are {said['target_modules']}; allowed are q, k, v and o_proj")


def load(models: list[Any], folder: Path, settings: BridgeSettings) -> None:
    """Fill the adapters of these chunks from ``folder``.

    Raises InputError for a missing tensor, one of another size, and for queries, keys and values of different A
    matrices, which one fused projection cannot hold.
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
    keys = {name: (_key(layer, name, "A"), _key(layer, name, "B")) for name in names}
    for pair in keys.values():
        for key in pair:
            if key not in held:
                raise InputError(f"ADAPTER={str(folder)!r}: {key} is missing")
    a = held[keys[names[0]][0]]
    if any(not torch.equal(a, held[keys[name][0]]) for name in names):
        raise InputError(
            f"ADAPTER={str(folder)!r}: layer {layer}: q, k and v have different A matrices; allowed is one for the"
            " three, as this recipe writes it, for Megatron-Core adapts them as one projection"
        )
    outputs = {"q_proj": shape.heads, "k_proj": shape.kv_groups, "v_proj": shape.kv_groups}
    parts = {name: held[keys[name][1]] for name in names}
    for name, part in parts.items():
        rows = outputs.get(name, 0) * shape.head or shape.hidden
        if part.shape[0] != rows:
            raise InputError(f"ADAPTER={str(folder)!r}: {name} of layer {layer} has {part.shape[0]} rows, not {rows}")
    return a, join_qkv(parts, shape) if target == "linear_qkv" else parts[PROJECTION]
