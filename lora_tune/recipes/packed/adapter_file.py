"""A slot's adapter as a file in peft's format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file

from lora_tune.recipes.lora_model import lora_config
from lora_tune.recipes.packed.group import Pair
from lora_tune.recipes.settings import Settings


def save(folder: Path, settings: Settings, adapter: Mapping[str, Pair]) -> None:
    """Write ``adapter``, factors by module, so that ``PeftModel.from_pretrained`` reads it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for name, pair in adapter.items():
        for factor, value in (("lora_A", pair.a), ("lora_B", pair.b)):
            weights[f"base_model.model.{name}.{factor}.weight"] = value.cpu().contiguous()
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = lora_config(settings, list(adapter))
    config.inference_mode = True
    config.save_pretrained(folder)
