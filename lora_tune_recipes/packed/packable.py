"""Which trials and bases a pack takes."""

from __future__ import annotations

from typing import Any

import torch

from lora_tune.base.errors import InputError
from lora_tune_recipes.settings import Settings


def check_packable(settings: Settings) -> None:
    """Raise InputError for a trial that no pack with a base of its own can train."""
    check_process(settings)
    if settings.fsdp:
        raise InputError("FSDP=1: this pack has a base of its own; allowed is 0, or several packs a job (site.packs)")


def check_process(settings: Settings) -> None:
    """Raise InputError for a trial that wants more than one process, or passes of one row."""
    for name in ("tp", "cp"):
        if getattr(settings, name) > 1:
            raise InputError(
                f"{name.upper()}={getattr(settings, name)}: a trial in a pack has one process; allowed is 1"
            )
    if settings.packing and settings.attn == "flash_attention_2":
        raise InputError(
            "PACKING=1: in a pack not with ATTN=flash_attention_2, which wants passes of one row; use sdpa"
        )


def refuse_own_dropout(model: Any, settings: Settings) -> None:
    """Raise for a base that drops activations of its own: they would depend on who trains beside a slot."""
    rates = {type(m).__name__: m.p for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.p}
    attention = getattr(model.config, "attention_dropout", 0.0)
    if settings.recompute and (rates or attention):
        raise InputError(
            f"MODEL={str(settings.model)!r}: the base has dropout of its own, which a pack with "
            "RECOMPUTE_GRANULARITY=full cannot leave out; allowed is a base without"
        )
