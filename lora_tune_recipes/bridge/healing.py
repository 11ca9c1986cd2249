"""Healing: the switch from FP4 to FP8 or bf16 in the middle of a run, which lets the loss fall further."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lora_tune_recipes.megatron import fields
from lora_tune_recipes.megatron.settings import PrecisionSettings


def heal(cores: Iterable[Any], precision: PrecisionSettings) -> None:
    """Switch the layers of ``cores`` to ``precision`` from the next forward pass on.

    Megatron-Core reads the precision from its configuration at every pass. The weights of an FP4 run are in bf16, so
    none is converted.
    """
    settings = told(precision)
    for core in cores:
        for module in core.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "fp4"):
                vars(config).update(settings)


def told(precision: PrecisionSettings) -> dict[str, Any]:
    """The fields of Megatron-Core's configuration for a precision."""
    if not precision.fp8:
        return {"fp4": None, "fp8": None}
    arguments = fields.fp8(precision)
    del arguments["fp8_param_gather"]  # a field of Megatron-Bridge, about weights
    return {"fp4": None, "fp8": "hybrid", **arguments}
