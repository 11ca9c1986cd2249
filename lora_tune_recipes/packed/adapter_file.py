"""A slot's adapter as a file in peft's format."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from lora_tune_recipes.lora_model import lora_config
from lora_tune_recipes.packed.group import Group
from lora_tune_recipes.packed.slot import Slot

LINEAR = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
EMBEDDING = "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"
"""peft's names of the parts of an adapter."""


def save(folder: Path, group: Group, slot: Slot) -> None:
    """Write the adapter of ``slot`` so that ``PeftModel.from_pretrained`` reads it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    adapter = group.adapter(slot)
    weights = {}
    for name, pair in adapter.items():
        for part, value in zip(EMBEDDING if group.modules[name].embedding else LINEAR, pair, strict=True):
            if value is not None:
                weights[f"base_model.model.{name}.{part}"] = value.cpu().contiguous()
    for name, own in group.copies_of([group.slots.index(slot)]).items():
        for parameter, values in own.items():
            weights[f"base_model.model.{name}.{parameter}"] = values[0].cpu().contiguous()
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = lora_config(slot.settings, list(adapter))
    config.inference_mode = True
    config.save_pretrained(folder)
