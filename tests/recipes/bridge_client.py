"""TEST ONLY: what a sweep starts as a Megatron-Bridge trial on a CPU; the trial itself runs in a warm worker."""

from __future__ import annotations

import sys

from lora_tune_recipes.worker_request import submit_to_worker

if __name__ == "__main__":
    sys.exit(submit_to_worker("tests.recipes.bridge_shim"))
