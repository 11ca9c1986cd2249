"""The model shape from a trial's variables."""

from __future__ import annotations

from dataclasses import replace

from lora_tune.base.errors import InputError
from lora_tune.base.llama import SHAPES, Shape
from lora_tune_recipes.knobs import Knobs

__all__ = ["SHAPES", "Shape", "read_shape"]

_FIELDS = {
    "LAYERS": "layers",
    "HIDDEN": "hidden",
    "FFN": "ffn",
    "HEADS": "heads",
    "KV_GROUPS": "kv_groups",
    "VOCAB": "vocab",
    "ROTARY_BASE": "rotary_base",
}


def read_shape(knobs: Knobs) -> Shape:
    """The shape of ``LLAMA`` (default 70b), with sizes overridden by ``LAYERS``, ``HIDDEN``, ...

    Raises InputError for an unknown name or sizes that do not divide.
    """
    name = knobs.text("LLAMA", "70b").lower()
    if name not in SHAPES:
        raise knobs.refusal("LLAMA", "one of " + ", ".join(SHAPES))
    base = SHAPES[name]
    sizes: dict[str, int] = {field: knobs.integer(name, getattr(base, field), low=1) for name, field in _FIELDS.items()}
    shape = replace(base, **sizes, norm_eps=knobs.real("NORM_EPS", base.norm_eps, exclusive=True))
    if shape.hidden % shape.heads:
        raise InputError(f"HIDDEN={shape.hidden}: allowed is a multiple of HEADS={shape.heads}")
    if shape.heads % shape.kv_groups:
        raise InputError(f"KV_GROUPS={shape.kv_groups}: allowed is a divisor of HEADS={shape.heads}")
    return shape
