"""The change of precision in the middle of a run: FP4 at first, then FP8 or bf16, which lets the loss fall on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lora_tune_recipes.megatron import fields
from lora_tune_recipes.megatron.settings import PrecisionSettings


def heal(cores: Iterable[Any], precision: PrecisionSettings) -> None:
    """Let the layers of ``cores`` compute in ``precision`` from the next forward pass on.

    Megatron-Core asks its configuration for the precision at every pass. The weights of an FP4 run are in bf16, so no
    weight changes its form.
    """
    settings = told(precision)
    for core in cores:
        for module in core.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "fp4"):
                vars(config).update(settings)


def told(precision: PrecisionSettings) -> dict[str, Any]:
    """What Megatron-Core's configuration says of a precision, by the names of its fields."""
    if not precision.fp8:
        return {"fp4": None, "fp8": None}
    arguments = fields.fp8(precision)
    del arguments["fp8_param_gather"]  # a word of Megatron-Bridge's, about weights
    return {"fp4": None, "fp8": "hybrid", **arguments}
