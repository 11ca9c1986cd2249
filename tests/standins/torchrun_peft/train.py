"""The recipe's training: its arguments, its data, HF Trainer's prints."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, os.environ["STANDIN_ROOT"])
from tests.standins.hf_dicts import train
from tests.standins.small_lora import Settings


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train.py")
    for name in ("learning_rate", "lora_alpha", "lora_dropout"):
        parser.add_argument(f"--{name}", type=float, required=True)
    whole = ("warmup_steps", "max_steps", "lora_rank", "per_device_train_batch_size", "gradient_accumulation_steps")
    for name in (*whole, "eval_steps", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr_scheduler_type", choices=["cosine", "linear", "constant"], required=True)
    parser.add_argument("--trainable", required=True, help="modules with adapters, separated by commas")
    parser.add_argument("--output_dir", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    data = Path(os.environ["DATADIR"]) / "packed.bin"
    if not data.exists():
        raise FileNotFoundError(f"[Errno 2] No such file or directory: '{data}': run preprocess.sub first")
    given.output_dir.mkdir(parents=True, exist_ok=True)
    ranks = int(os.environ.get("WORLD_SIZE", "8"))
    batch = given.per_device_train_batch_size * given.gradient_accumulation_steps * ranks
    settings = Settings(
        lr=100 * given.learning_rate,  # the small model likes rates about a hundred times higher
        steps=given.max_steps,
        batch=max(1, batch // 4),
        warmup=given.warmup_steps,
        rank=given.lora_rank,
        alpha=given.lora_alpha,
        dropout=given.lora_dropout,
        schedule=given.lr_scheduler_type,
        targets=1 if given.trainable.count(",") < 2 else 2,
        seed=given.seed,
    )
    pace = float(os.environ.get("STANDIN_STEP_SECONDS", "0"))
    train(
        settings,
        batch=batch,
        samples_per_epoch=51760,
        logging_steps=given.eval_steps,
        eval_steps=given.eval_steps,
        pause=lambda _: time.sleep(pace),
    )


if __name__ == "__main__":
    main()
