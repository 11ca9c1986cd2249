"""Settings that the Megatron recipes do not support without Transformer Engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lora_tune.base.errors import InputError, SetupError
from lora_tune_recipes.megatron.layout import ProcessLayout
from lora_tune_recipes.megatron.shapes import Shape


def check_without_te(wants: Mapping[str, bool], shape: Shape, layout: ProcessLayout, *, cuda: bool) -> None:
    """Raise SetupError or InputError for settings that need Transformer Engine, or a GPU that computes in bf16.

    wants: variable -> whether its value needs Transformer Engine.
    """
    for name, wanted in wants.items():
        if wanted:
            raise SetupError(
                f"{name}=1 needs Transformer Engine, which cannot be imported here; install it or set {name}=0"
            )
    if (shape.kv_groups // layout.tp) % layout.cp:
        raise InputError(
            f"CP={layout.cp}: allowed is a divisor of the {shape.kv_groups // layout.tp} key-value heads of a"
            " tensor-parallel rank, where Transformer Engine is absent"
        )
    if cuda and not torch.cuda.is_bf16_supported():
        raise SetupError("the GPU cannot compute in bf16; use one of compute capability 8.0 or newer")
