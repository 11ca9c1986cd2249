"""What tests run inside Megatron-Bridge's environment: programs for the warm worker, beside ``bridge_shim``."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.recipes import bridge_shim


def main() -> int:
    """What INSIDE names: ``converted`` writes MODEL in Megatron-Bridge's form to OUT, ``model`` prints its settings."""
    return {"converted": _convert, "model": _model}[os.environ["INSIDE"]]()


def _model() -> int:
    from lora_tune_recipes.bridge.model import build_model
    from lora_tune_recipes.bridge.settings import read

    model = build_model(read(os.environ, 2), cuda=False)
    print(json.dumps({name: getattr(model, name) for name in os.environ["FIELDS"].split(",")}), flush=True)
    return 0


def _convert() -> int:
    from lora_tune_recipes.bridge import convert, imports

    imports.prepare()
    bridge_shim.install_states()
    convert.convert(Path(os.environ["MODEL"]), Path(os.environ["OUT"]), dtype_name="float32")
    return 0
