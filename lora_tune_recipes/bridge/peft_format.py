"""Checks that this recipe can continue training an adapter in peft's format, without loading it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lora_tune.base.errors import InputError
from lora_tune_recipes.bridge.settings import BridgeSettings

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FUSED, PROJECTION = ("q_proj", "k_proj", "v_proj"), "o_proj"
TARGETS = (*FUSED, PROJECTION)
ROOT = "base_model.model.model.layers"
STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that keep the base's weights. pissa, olora, loftq and corda change them."""
OFF: tuple[Any, ...] = (None, False, [], {}, "")
"""peft's values of an unused key of its configuration."""
DESCRIBED = (
    *("peft_type", "bias", "init_lora_weights", "r", "lora_alpha", "target_modules"),  # looked at by name
    *("task_type", "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "inference_mode"),
    *("lora_dropout", "megatron_config", "megatron_core", "layers_pattern", "qalora_group_size", "eva_config"),
)
"""Keys of peft's configuration that may have any value. Any other key in use, even of a later peft, means more than
plain LoRA."""


def config_of(settings: BridgeSettings) -> dict[str, Any]:
    """peft's configuration of an adapter."""
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
        "target_modules": list(TARGETS),
    }


def key_of(layer: int, name: str, matrix: str) -> str:
    """The name of a tensor in the file. matrix: A or B."""
    return f"{ROOT}.{layer}.self_attn.{name}.lora_{matrix}.weight"


def check(folder: Path, settings: BridgeSettings) -> None:
    """Raise InputError unless ``folder`` holds exactly an adapter that these settings can continue."""
    where = f"ADAPTER={str(folder)!r}"
    try:
        config = dict(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{where}: no readable {CONFIG}: {error}; give a folder in peft's format") from error
    wanted = config_of(settings)
    for key in ("r", "lora_alpha"):
        if config.get(key) != wanted[key]:
            raise InputError(
                f"{where}: {key} is {config.get(key)}; allowed is {wanted[key]}, as LORA_RANK and LORA_ALPHA"
            )
    _check_kind(where, config)
    targets = config.get("target_modules")
    if targets is not None and not (isinstance(targets, list) and sorted(map(str, targets)) == sorted(TARGETS)):
        raise InputError(f"{where}: target_modules are {targets!r}; allowed are q, k, v and o_proj")
    _check_tensors(folder, settings)


def _check_kind(where: str, config: Mapping[str, Any]) -> None:
    """Raise InputError for an adapter that is not plain LoRA: alpha / rank * B A added to the base's weights."""
    for key, allowed in (("peft_type", "LORA"), ("bias", "none")):
        if config.get(key, allowed) != allowed:
            raise InputError(f"{where}: {key} is {config[key]!r}; allowed is {allowed!r}: plain LoRA")
    if (start := config.get("init_lora_weights", True)) not in STARTS:
        raise InputError(
            f"{where}: init_lora_weights is {start!r}, which may have changed the base's weights too; allowed is an"
            " adapter that peft's save_pretrained converted to plain LoRA (path_initial_model_for_weight_conversion)"
        )
    for key, value in config.items():
        if key not in DESCRIBED and value not in OFF:
            raise InputError(f"{where}: {key} is {value!r}; allowed is plain LoRA, without it")


def _check_tensors(folder: Path, settings: BridgeSettings) -> None:
    """Raise InputError unless the file holds exactly the tensors of these settings."""
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
    """Name and full size of every tensor of an adapter of these settings."""
    shape, rank = settings.shape, settings.lora_rank
    wide, narrow = shape.heads * shape.head, shape.kv_groups * shape.head
    ends = {"q_proj": (shape.hidden, wide), "k_proj": (shape.hidden, narrow), "v_proj": (shape.hidden, narrow)}
    ends[PROJECTION] = (wide, shape.hidden)
    sizes = {}
    for layer in range(shape.layers):
        for name, (inputs, outputs) in ends.items():
            sizes[key_of(layer, name, "A")] = (rank, inputs)
            sizes[key_of(layer, name, "B")] = (outputs, rank)
    return sizes
