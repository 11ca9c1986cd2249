"""Somebody's own script: its own arguments, its own prints."""

from __future__ import annotations

import argparse
import os
import sys
import time

sys.path.insert(0, os.environ["STANDIN_ROOT"])
from tests.standins.small_lora import Settings, Training


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, choices=[8, 16], required=True)
    parser.add_argument("--seed", type=int, required=True)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    training = Training(Settings(lr=100 * given.lr, steps=given.steps, batch=given.batch, seed=given.seed))
    pace = float(os.environ.get("STANDIN_STEP_SECONDS", "0"))
    for step, loss in training.steps():
        time.sleep(pace)
        if step % 10 == 0:
            print(f"step {step:5d}  train_loss {loss:.4f}  val_loss {training.eval_loss():.4f}", flush=True)


if __name__ == "__main__":
    main()
