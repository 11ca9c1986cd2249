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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lora_tune.base.errors import InputError
from lora_tune.recipes.bridge.settings import BridgeSettings
from lora_tune.recipes.megatron.adapters import adapters, gathered, own_part
from lora_tune.recipes.megatron.shapes import Shape

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FUSED, PROJECTION = ("q_proj", "k_proj", "v_proj"), "o_proj"
ROOT = "base_model.model.model.layers"
PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "layers_to_transform": None,
    "exclude_modules": None,
    "trainable_token_indices": None,
}
"""Keys of peft's configuration that change what an adapter is -> the only value that is served."""


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
    """Raise InputError where ``folder`` holds no adapter that these settings can continue, all of it and no more."""
    where = f"ADAPTER={str(folder)!r}"
    try:
        said = dict(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{where}: no readable {CONFIG}: {error}; give a folder in peft's format") from error
    wanted = config_of(settings)
    for key in ("r", "lora_alpha"):
        if said.get(key) != wanted[key]:
            raise InputError(
                f"{where}: {key} is {said.get(key)}; allowed is {wanted[key]}, as LORA_RANK and LORA_ALPHA"
            )
    refused = [key for key, allowed in PLAIN.items() if said.get(key, allowed) not in (allowed, None, False, [], {})]
    if refused:
        raise InputError(f"{where}: {refused[0]} is {said[refused[0]]!r}; allowed is plain LoRA")
    targets = said.get("target_modules")
    named = set(targets) if isinstance(targets, list) else {targets}
    if targets is not None and named != set(wanted["target_modules"]):
        raise InputError(f"{where}: target_modules are {targets!r}; allowed are q, k, v and o_proj")
    _check_tensors(folder, settings)


def _check_tensors(folder: Path, settings: BridgeSettings) -> None:
    """Raise InputError unless the file holds the tensors that the settings ask for, and none that would be left out."""
    where = f"ADAPTER={str(folder)!r}"
    if not (folder / WEIGHTS).is_file():
        raise InputError(f"{where}: {WEIGHTS} is missing; give a folder in peft's format")
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            held = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{where}: {WEIGHTS} cannot be read: {error}") from error
    sizes = _sizes(settings)
    for key, size in sizes.items():
        if held.get(key) != size:
            raise InputError(f"{where}: {key} is {held.get(key, 'missing')}; allowed is {size}")
    if others := sorted(held.keys() - sizes.keys()):
        raise InputError(f"{where}: {others[0]} is in the file; allowed are q, k, v and o_proj of the model's layers")


def _sizes(settings: BridgeSettings) -> dict[str, tuple[int, int]]:
    """Name and whole size of every tensor of an adapter of these settings."""
    shape, rank = settings.shape, settings.lora_rank
    wide, narrow = shape.heads * shape.head, shape.kv_groups * shape.head
    ends = {"q_proj": (shape.hidden, wide), "k_proj": (shape.hidden, narrow), "v_proj": (shape.hidden, narrow)}
    ends[PROJECTION] = (wide, shape.hidden)
    sizes = {}
    for layer in range(shape.layers):
        for name, (inputs, outputs) in ends.items():
            sizes[_key(layer, name, "A")] = (rank, inputs)
            sizes[_key(layer, name, "B")] = (outputs, rank)
    return sizes


def make_folder(folder: Path) -> None:
    """Make the folder of the adapter before it is trained. Raises InputError where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"SAVE_ADAPTER={str(folder)!r}: cannot be made: {error.strerror}; name another folder"
        ) from error


def load(models: list[Any], folder: Path, settings: BridgeSettings) -> None:
    """Fill the adapters of these chunks from ``folder``, which has been checked.

    Raises InputError for queries, keys and values of different A matrices, which one fused projection cannot hold.
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
    a = held[_key(layer, names[0], "A")]
    if any(not torch.equal(a, held[_key(layer, name, "A")]) for name in names):
        raise InputError(
            f"ADAPTER={str(folder)!r}: layer {layer}: q, k and v have different A matrices; allowed is one for the"
            " three, as this recipe writes it, for Megatron-Core adapts them as one projection"
        )
    parts = {name: held[_key(layer, name, "B")] for name in names}
    return a, join_qkv(parts, shape) if target == "linear_qkv" else parts[PROJECTION]
