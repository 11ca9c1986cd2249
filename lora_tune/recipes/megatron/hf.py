"""The base model from a Hugging Face Llama folder: ``config.json`` and safetensors, read straight into Megatron-Core.

Each rank reads only the slices that its place in the layout holds, so no process ever has the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_tune.base.errors import InputError
from lora_tune.recipes.megatron.shapes import Shape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def is_hf(folder: Path) -> bool:
    """Whether ``folder`` is a Hugging Face checkpoint rather than a NeMo one."""
    return (folder / "config.json").is_file() and ((folder / SINGLE).is_file() or (folder / INDEX).is_file())


def shape_of(folder: Path) -> Shape:
    """The shape that ``config.json`` states. Raises InputError for anything that is not a plain Llama."""
    where = f"MODEL={str(folder)!r}: config.json"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        shape = replace(
            Shape.from_config(config),
            rotary_base=int(rope.get("rope_theta") or config.get("rope_theta") or 10000),
            norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(f"{where} cannot be used: {type(error).__name__}: {error}") from error
    refused = {
        "model_type": config.get("model_type") != "llama",
        "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
        "attention_bias": bool(config.get("attention_bias")),
        "rope_type": kind != "default",
    }
    for key, wrong in refused.items():
        if wrong:
            raise InputError(f"{where}: {key} is {config.get(key, kind)!r}; allowed is a Llama without it")
    return shape


class Reader:
    """Slices of the tensors of a safetensors folder. Raises InputError where one is missing or of another size."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._folder = folder
        index = folder / INDEX
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [SINGLE]
        self._files: dict[str, Any] = {}
        for name in names:
            file = safe_open(folder / name, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    def part(self, key: str, size: tuple[int, ...], rank: int, of: int, *, dim: int = 0) -> Any:
        """Slice ``rank`` of ``of`` equal ones along ``dim`` of a tensor whose whole size must be ``size``."""
        if key not in self._files:
            raise InputError(f"MODEL={str(self._folder)!r}: {key} is not in the checkpoint; allowed is a whole Llama")
        view = self._files[key].get_slice(key)
        if tuple(view.get_shape()) != size:
            raise InputError(
                f"MODEL={str(self._folder)!r}: {key} is {tuple(view.get_shape())}, config.json asks for {size}"
            )
        width = size[dim] // of
        chosen = slice(rank * width, (rank + 1) * width)
        return view[chosen] if dim == 0 else view[:, chosen]


def load(core: Any, folder: Path, shape: Shape, rank: int, of: int) -> None:
    """Fill a Megatron-Core GPT model (one pipeline stage) on tensor-parallel rank ``rank`` of ``of``."""
    import torch

    read = Reader(folder).part
    with torch.no_grad():
        if core.pre_process:
            size = (shape.vocab, shape.hidden)
            core.embedding.word_embeddings.weight.copy_(read("model.embed_tokens.weight", size, rank, of))
        for layer in core.decoder.layers:
            _load_layer(layer, f"model.layers.{layer.layer_number - 1}.", read, shape, rank, of)
        if core.post_process:
            core.decoder.final_layernorm.weight.copy_(read("model.norm.weight", (shape.hidden,), 0, 1))
            core.output_layer.weight.copy_(read("lm_head.weight", (shape.vocab, shape.hidden), rank, of))


def _load_layer(layer: Any, prefix: str, read: Callable[..., Any], shape: Shape, rank: int, of: int) -> None:
    import torch

    attention, mlp, head = layer.self_attention, layer.mlp, shape.head
    norm = (shape.hidden,)
    _norm(layer, "input_layernorm", attention.linear_qkv).copy_(read(prefix + "input_layernorm.weight", norm, 0, 1))
    _norm(layer, "pre_mlp_layernorm", mlp.linear_fc1).copy_(
        read(prefix + "post_attention_layernorm.weight", norm, 0, 1)
    )
    # Megatron keeps each key-value group together: its query heads, its key, its value.
    groups = shape.kv_groups // of
    q, k, v = (
        read(f"{prefix}self_attn.{name}_proj.weight", (heads * head, shape.hidden), rank, of).view(
            groups, -1, shape.hidden
        )
        for name, heads in (("q", shape.heads), ("k", shape.kv_groups), ("v", shape.kv_groups))
    )
    attention.linear_qkv.weight.copy_(torch.cat((q, k, v), dim=1).flatten(0, 1))
    size = (shape.hidden, shape.heads * head)
    attention.linear_proj.weight.copy_(read(prefix + "self_attn.o_proj.weight", size, rank, of, dim=1))
    wide = (shape.ffn, shape.hidden)
    gate, up = (read(f"{prefix}mlp.{name}_proj.weight", wide, rank, of) for name in ("gate", "up"))
    mlp.linear_fc1.weight.copy_(torch.cat((gate, up)))
    mlp.linear_fc2.weight.copy_(read(prefix + "mlp.down_proj.weight", (shape.hidden, shape.ffn), rank, of, dim=1))


def _norm(layer: Any, name: str, linear: Any) -> Any:
    """A layer norm's weight: Transformer Engine keeps it in the linear layer that follows."""
    return linear.layer_norm_weight if hasattr(linear, "layer_norm_weight") else getattr(layer, name).weight
