"""Prepares the frozen base and its adapters before the model is wrapped for training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from torch.distributed.checkpoint.api import CheckpointException

from lora_tune.base.errors import InputError
from lora_tune_recipes.bridge import adapter_files
from lora_tune_recipes.bridge.settings import BridgeSettings
from lora_tune_recipes.megatron import adapters, checkpoint, hf, recompute
from lora_tune_recipes.megatron.shapes import Shape


def prepare(settings: BridgeSettings, lora: Any) -> Callable[[list[Any]], list[Any]]:
    """A hook that loads a fresh model's base weights and initializes its adapters from the seed.

    Without a model the weights stay random, which suffices to measure speed.
    """

    def hook(models: list[Any]) -> list[Any]:
        if settings.model is not None:
            load(models, settings.model, settings.shape)
        adapted: list[Any] = lora(models, training=True)
        for core in adapted:
            adapters.start(core, settings.seed)
            if settings.speed.recompute:
                recompute.let_gradients_in(core)
        if settings.adapter is not None:
            adapter_files.load(adapted, settings.adapter, settings)
        return adapted

    return hook


def load(models: list[Any], folder: Path, shape: Shape) -> None:
    """Fill the chunks from a Hugging Face folder, NeMo 2's ``weights``, or Megatron-Bridge's own format."""
    if hf.is_hf(folder):
        rank, ranks = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        for core in models:
            hf.load(core, folder, shape, rank, ranks)
        return
    where = checkpoint.weights_folder(folder)
    prefix = "module." if checkpoint.is_nemo(where) else ""
    for core in models:
        _load_distributed(core, where, prefix)


def _load_distributed(core: Any, folder: Path, prefix: str) -> None:
    """Fill one chunk from a distributed checkpoint whose keys begin with ``prefix``."""
    wanted = core.sharded_state_dict(prefix=prefix)
    # FP8 scales belong to the run that wrote them, and not all formats have them.
    weights = {key: value for key, value in wanted.items() if "_extra_state" not in key}
    try:
        loaded = dist_checkpointing.load({"model": weights}, str(folder), validate_access_integrity=False)
    except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
        raise InputError(
            f"CKPT_ROOT={str(folder)!r}: cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    state = {key.removeprefix(prefix): value for key, value in loaded["model"].items()}
    missing, _ = core.load_state_dict(state, strict=False)
    absent = [key for key in missing if "_extra_state" not in key]
    if absent:
        raise InputError(f"CKPT_ROOT={str(folder)!r}: {absent[0]} is not in the checkpoint; allowed is a whole Llama")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
