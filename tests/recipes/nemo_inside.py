"""What tests look at inside NeMo's environment: programs for the warm worker, beside ``cpu_shim``."""

from __future__ import annotations

import os

from tests.recipes import cpu_shim


def main() -> int:
    """What INSIDE names: ``moves`` trains and says where the model is copied, ``overlap`` prints a model's settings."""
    return {"moves": _moves, "overlap": _overlap}[os.environ["INSIDE"]]()


def _moves() -> int:
    from lightning.pytorch import LightningModule

    LightningModule.cpu = lambda self: print("copied to host memory", flush=True) or self
    return cpu_shim.main()


def _overlap() -> int:
    from lora_tune_recipes.nemo.model import build_model
    from lora_tune_recipes.nemo.settings import read

    config = build_model(read(os.environ, 2), cuda=False).config
    for name in ("bulk_wgrad", "bulk_dgrad", "overlap_rs_dgrad", "overlap_disable_qkv"):
        print(name, getattr(config, f"tp_comm_{name}"), flush=True)
    return 0
