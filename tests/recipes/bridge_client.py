"""TEST ONLY: what a sweep starts as a Megatron-Bridge trial on a CPU; the trial itself runs in a warm worker."""

from __future__ import annotations

import sys

from lora_tune_recipes.hand_over import hand_over

if __name__ == "__main__":
    sys.exit(hand_over("tests.recipes.bridge_shim"))
