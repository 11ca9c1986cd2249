"""Loads the base model from a Hugging Face Llama folder (``config.json`` and safetensors) into Megatron-Core.

Each rank reads only the slices of its own shards, so no process ever holds the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_tune.base.errors import InputError
from lora_tune_recipes.megatron.shapes import Shape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("BF16", "F16", "F32", "F64")
"""Supported weight types, by safetensors' names."""


def is_hf(folder: Path) -> bool:
    """Whether ``folder`` is a Hugging Face checkpoint rather than a NeMo one."""
    return (folder / "config.json").is_file() and ((folder / SINGLE).is_file() or (folder / INDEX).is_file())


def shape_of(folder: Path) -> Shape:
    """The shape in ``config.json``. Raises InputError for anything that is not a plain Llama."""
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
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "head_dim": (config.get("head_dim") or shape.head) != shape.head,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "quantization_config": bool(config.get("quantization_config")),
        "rope_type": kind != "default",
    }
    for key, wrong in refused.items():
        if wrong:
            raise InputError(f"{where}: {key} is {config.get(key, kind)!r}; allowed is a Llama without it")
    return shape


def sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name and full size of every tensor of a Llama of this shape."""
    hidden, wide, narrow = shape.hidden, shape.heads * shape.head, shape.kv_groups * shape.head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (wide, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, wide),
        "mlp.gate_proj": (shape.ffn, hidden),
        "mlp.up_proj": (shape.ffn, hidden),
        "mlp.down_proj": (hidden, shape.ffn),
    }
    blocks = {f"{_layer(i)}{name}.weight": size for i in range(shape.layers) for name, size in layer.items()}
    ends = {"model.embed_tokens.weight": (shape.vocab, hidden), "lm_head.weight": (shape.vocab, hidden)}
    return {**blocks, **ends, "model.norm.weight": (hidden,)}


def _layer(number: int) -> str:
    return f"model.layers.{number}."


class Reader:
    """Reads slices of the tensors of a safetensors folder, which must have the given shape."""

    def __init__(self, folder: Path, shape: Shape, framework: str = "pt") -> None:
        """Raises InputError if a file cannot be read. framework: "pt", or "np" to check sizes only."""
        from safetensors import SafetensorError, safe_open

        self._where = f"MODEL={str(folder)!r}"
        self._sizes = sizes(shape)
        self._files: dict[str, Any] = {}
        index = folder / INDEX
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [SINGLE]
            for name in names:
                file = safe_open(folder / name, framework=framework)
                self._files |= dict.fromkeys(file.keys(), file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            problem = " ".join(str(error).split())
            raise InputError(f"{self._where}: cannot be read: {type(error).__name__}: {problem}") from error

    def check(self) -> None:
        """Raise InputError unless the folder holds exactly a Llama's tensors, in floating point."""
        for key in self._sizes:
            if (kind := self._view(key).get_dtype()) not in FLOATS:
                raise InputError(f"{self._where}: {key} holds {kind}; allowed is one of {', '.join(FLOATS)}")
        # Old checkpoints also hold inv_freq, which follows from the configuration.
        others = sorted(
            key for key in self._files if key not in self._sizes and not key.endswith("rotary_emb.inv_freq")
        )
        if others:
            raise InputError(f"{self._where}: {others[0]} is in the checkpoint, but config.json describes none")

    def part(self, key: str, rank: int = 0, of: int = 1, *, dim: int = 0) -> Any:
        """Slice ``rank`` of ``of`` equal ones along ``dim`` of a tensor. Raises InputError as ``check``."""
        view = self._view(key)
        width = self._sizes[key][dim] // of
        chosen = slice(rank * width, (rank + 1) * width)
        return view[chosen] if dim == 0 else view[:, chosen]

    def _view(self, key: str) -> Any:
        if key not in self._files:
            raise InputError(f"{self._where}: {key} is not in the checkpoint; allowed is a whole Llama")
        view = self._files[key].get_slice(key)
        if tuple(view.get_shape()) != self._sizes[key]:
            raise InputError(
                f"{self._where}: {key} is {tuple(view.get_shape())}, config.json asks for {self._sizes[key]}"
            )
        return view


def check(folder: Path, shape: Shape) -> None:
    """Raise InputError unless ``folder`` holds exactly a Llama of this shape."""
    Reader(folder, shape, framework="np").check()


def load(core: Any, folder: Path, shape: Shape, rank: int, of: int) -> None:
    """Fill a Megatron-Core GPT model (one pipeline stage) on tensor-parallel rank ``rank`` of ``of``."""
    import torch

    read = Reader(folder, shape).part
    with torch.no_grad():
        if core.pre_process:
            core.embedding.word_embeddings.weight.copy_(read("model.embed_tokens.weight", rank, of))
        for layer in core.decoder.layers:
            _load_layer(layer, _layer(layer.layer_number - 1), read, shape, rank, of)
        if core.post_process:
            core.decoder.final_layernorm.weight.copy_(read("model.norm.weight"))
            core.output_layer.weight.copy_(read("lm_head.weight", rank, of))


def _load_layer(layer: Any, prefix: str, read: Callable[..., Any], shape: Shape, rank: int, of: int) -> None:
    import torch

    attention, mlp = layer.self_attention, layer.mlp
    _norm(layer, "input_layernorm", attention.linear_qkv).copy_(read(prefix + "input_layernorm.weight"))
    _norm(layer, "pre_mlp_layernorm", mlp.linear_fc1).copy_(read(prefix + "post_attention_layernorm.weight"))
    # Megatron stores each key-value group together: its query heads, its key, its value.
    groups = shape.kv_groups // of
    q, k, v = (
        read(f"{prefix}self_attn.{name}_proj.weight", rank, of).view(groups, -1, shape.hidden)
        for name in ("q", "k", "v")
    )
    attention.linear_qkv.weight.copy_(torch.cat((q, k, v), dim=1).flatten(0, 1))
    attention.linear_proj.weight.copy_(read(prefix + "self_attn.o_proj.weight", rank, of, dim=1))
    gate, up = (read(f"{prefix}mlp.{name}_proj.weight", rank, of) for name in ("gate", "up"))
    mlp.linear_fc1.weight.copy_(torch.cat((gate, up)))
    mlp.linear_fc2.weight.copy_(read(prefix + "mlp.down_proj.weight", rank, of, dim=1))


def _norm(layer: Any, name: str, linear: Any) -> Any:
    """A layer norm's weight: Transformer Engine keeps it in the linear layer that follows."""
    return linear.layer_norm_weight if hasattr(linear, "layer_norm_weight") else getattr(layer, name).weight
