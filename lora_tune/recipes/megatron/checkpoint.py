"""What a checkpoint folder of NeMo or Megatron-Bridge holds, before anything is built for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_tune.base.errors import InputError
from lora_tune.recipes.megatron.shapes import Shape


def expected(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Key endings in a distributed Llama checkpoint and their whole sizes for this shape; layers are stacked first."""
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
    """The folder of the distributed checkpoint under ``MODEL``, which may also be given itself.

    NeMo 2 keeps it in ``weights``, Megatron-Bridge in ``iter_0000000`` (v6.0) or whichever iteration its file of the
    latest one names.
    """
    named = model / "latest_checkpointed_iteration.txt"
    latest = named.read_text(encoding="utf-8").strip() if named.is_file() else "0"
    iteration = f"iter_{int(latest):07d}" if latest.isdigit() else latest
    for folder in (model / "weights", model / iteration, model):
        if (folder / ".metadata").is_file() or (folder / "metadata.json").is_file():
            return folder
    raise InputError(
        f"MODEL={str(model)!r}: no checkpoint of NeMo or Megatron-Bridge; allowed is a folder with weights/"
        " (distributed format) and context/, or with iter_0000000/"
    )


def is_nemo(folder: Path) -> bool:
    """Whether a folder of distributed weights was written by NeMo 2, which puts ``module.`` before every name."""
    return any(key.startswith("module.") for key in _sizes(folder))


def check(model: Path, shape: Shape) -> None:
    """Raise InputError where the checkpoint is of another shape than ``shape``.

    Only torch_dist checkpoints say their sizes in one file; others are left to the loader.
    """
    folder = weights_folder(model)
    if not (folder / ".metadata").is_file():
        return
    sizes = _sizes(folder)
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


def _sizes(folder: Path) -> dict[str, tuple[int, ...]]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        metadata: Any = FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise InputError(f"MODEL={str(folder)!r}: .metadata cannot be read: {type(error).__name__}: {error}") from error
    entries = metadata.state_dict_metadata.items()
    return {key: tuple(entry.size) for key, entry in entries if hasattr(entry, "size")}
