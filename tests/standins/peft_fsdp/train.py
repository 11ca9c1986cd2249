"""What a node of the FSDP recipe does; the first one trains and prints.

Steps take the time that the published throughputs say (8 to 512 GPUs), SPEED_UP times faster; small micro batches
use the GPU badly, and large ones do not fit where few nodes share the weights.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, os.environ["STANDIN_ROOT"])
from tests.standins.failures import TEXTS, applies
from tests.standins.hf_dicts import train
from tests.standins.small_lora import Settings

PUBLISHED = {1: 1.247, 2: 3.664, 4: 9.432, 8: 21.905, 16: 47.342, 32: 95.339, 64: 154.931}
SPEED_UP = 300.0
BUSY = {1: 0.35, 2: 0.8, 4: 1.0}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("num_machines", "num_processes", "per_device_train_batch_size", "gradient_accumulation_steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--max_steps", type=int, required=True)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--lora_r", type=int, default=16)
    parser.add_argument("--logging_steps", type=int, default=2)
    parser.add_argument("--eval_steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if os.environ.get("SLURM_PROCID", "0") != "0":
        return
    micro = given.per_device_train_batch_size
    if micro > 4 or applies("oom"):
        print("[rank0]: " + TEXTS["oom"])
        sys.exit(1)
    batch = micro * given.gradient_accumulation_steps * given.num_processes
    seconds = batch / (PUBLISHED[given.num_machines] * BUSY[micro] * SPEED_UP)
    began = time.time()

    def pause(step: int) -> None:
        time.sleep(max(0.0, began + step * seconds - time.time()))

    settings = Settings(
        lr=100 * given.learning_rate, steps=given.max_steps, batch=batch // 8, rank=given.lora_r, seed=given.seed
    )
    train(
        settings,
        batch=batch,
        samples_per_epoch=273_000,
        logging_steps=given.logging_steps,
        eval_steps=given.eval_steps,
        pause=pause,
    )


if __name__ == "__main__":
    assert Path("launch_70b.sh").exists(), "run it in the recipe's folder"
    main()
