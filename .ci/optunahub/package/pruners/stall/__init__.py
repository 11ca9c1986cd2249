"""The stopping rule of lora_tune in OptunaHub's form."""

from lora_tune import StallPruner

__all__ = ["StallPruner"]
