"""Checks the contents of a NeMo or Megatron-Bridge checkpoint folder before a model is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_tune.base.errors import InputError
from lora_tune_recipes.megatron import hf
from lora_tune_recipes.megatron.shapes import Shape


def expected(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Key endings in a distributed Llama checkpoint and their full sizes for this shape; layers are stacked first."""
    qkv = (shape.heads + 2 * shape.kv_groups) * shape.head
    return {
        "embedding.word_embeddings.weight": (shape.vocab, shape.hidden),
        "output_layer.weight": (shape.vocab, shape.hidden),
        "decoder.final_layernorm.weight": (shape.hidden,),
        "decoder.layers.self_attention.linear_qkv.weight": (shape.layers, qkv, shape.hidden),
        "decoder.layers.self_attention.linear_proj.weight": (shape.layers, shape.hidden, shape.heads * shape.head),
        "decoder.layers.mlp.linear_fc1.weight": (shape.layers, 2 * shape.ffn, shape.hidden),
        "decoder.layers.mlp.linear_fc2.weight": (shape.layers, shape.hidden, shape.ffn),
    }


def weights_folder(model: Path) -> Path:
    """The folder of the distributed checkpoint in ``MODEL``, or ``MODEL`` itself.

    NeMo 2 keeps it in ``weights``, Megatron-Bridge in ``iter_0000000`` (v6.0) or the iteration in
    ``latest_checkpointed_iteration.txt``.
    """
    named = model / "latest_checkpointed_iteration.txt"
    latest = named.read_text(encoding="utf-8", errors="replace").strip() if named.is_file() else "0"
    iteration = f"iter_{int(latest):07d}" if latest.isdecimal() else "release"
    for folder in (model / "weights", model / iteration, model):
        if (folder / ".metadata").is_file() or (folder / "metadata.json").is_file():
            return folder
    raise InputError(
        f"MODEL={str(model)!r}: no checkpoint of NeMo or Megatron-Bridge; allowed is a folder with weights/"
        " (distributed format) and context/, or with iter_0000000/"
    )


def is_nemo(folder: Path) -> bool:
    """Whether NeMo 2 wrote a folder of distributed weights: it prefixes every name with ``module.``."""
    return any(key.startswith("module.") for key in _sizes(_metadata(folder)))


def check(model: Path, shape: Shape) -> None:
    """Raise InputError if the checkpoint has another shape than ``shape``, or is incomplete.

    Of distributed checkpoints only torch_dist ones have their sizes in one file; others are left to the loader.
    """
    if hf.is_hf(model):
        hf.check(model, shape)
        return
    folder = weights_folder(model)
    if not (folder / ".metadata").is_file():
        return
    metadata = _metadata(folder)
    sizes = _sizes(metadata)
    for ending, size in expected(shape).items():
        stored = next((s for key, s in sizes.items() if key.endswith(ending)), None)
        if stored is None:
            raise InputError(
                f"MODEL={str(model)!r}: {ending} is not in the checkpoint; allowed is a whole Llama base model"
            )
        if stored != size:
            raise InputError(
                f"MODEL={str(model)!r}: {ending} is {stored}, but LLAMA and the sizes beside it ask for {size};"
                " give the checkpoint's shape"
            )
    _check_files(folder, metadata)


def _check_files(folder: Path, metadata: Any) -> None:
    """Raise InputError for the first weights file that is missing or shorter than ``.metadata`` states.

    The loader would fail only after the model is built, and on one rank of many.
    """
    ends: dict[str, int] = {}
    for stored in (metadata.storage_data or {}).values():
        ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    for name, end in sorted(ends.items()):
        file = folder / name
        held = file.stat().st_size if file.is_file() else None
        if held is None or held < end:
            state = "is missing" if held is None else f"has {held} bytes"
            raise InputError(
                f"MODEL={str(folder)!r}: {name} {state}; .metadata says {end} bytes: copy or convert it again"
            )


def _metadata(folder: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        return FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise InputError(f"MODEL={str(folder)!r}: .metadata cannot be read: {type(error).__name__}: {error}") from error


def _sizes(metadata: Any) -> dict[str, tuple[int, ...]]:
    entries = metadata.state_dict_metadata.items()
    return {key: tuple(entry.size) for key, entry in entries if hasattr(entry, "size")}
