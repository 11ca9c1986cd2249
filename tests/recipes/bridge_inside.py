"""What tests run inside Megatron-Bridge's environment: programs for the warm worker, beside ``bridge_shim``."""

from __future__ import annotations

import os
from pathlib import Path

from tests.recipes import bridge_shim


def main() -> int:
    """Convert MODEL to Megatron-Bridge's form in OUT."""
    from lora_tune.recipes.bridge import convert, imports

    imports.prepare()
    bridge_shim.install_states()
    convert.convert(Path(os.environ["MODEL"]), Path(os.environ["OUT"]), dtype_name="float32")
    return 0
