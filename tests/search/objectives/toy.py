"""A script as people have them: no target known to it, JSON lines, a loss that falls and an accuracy that rises."""

import argparse
import json
import math
import os
import random
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--caught", default="")
parser.add_argument("--noise", type=float, default=0.0)
given = parser.parse_args()


def leave(number: int, _frame: object) -> None:
    """What a script that catches the signal does: it saves, and ends well."""
    Path(given.caught).write_text(signal.Signals(number).name)
    sys.exit(0)


if given.caught:
    signal.signal(signal.SIGTERM, leave)
begun = time.monotonic() - 1e-3
luck = given.noise * random.Random(os.environ.get("SEED", "0")).gauss(0, 1)
speed = math.exp(-((math.log10(given.lr) + 2) ** 2))
for step in range(1, given.steps + 1):
    right = 0.9 * (1 - math.exp(-speed * step / 5)) + luck
    wrong = 1.2 - right + max(0, step - 15) * 0.05 * speed  # it memorises in the end
    seconds = time.monotonic() - begun
    print(json.dumps({"step": step, "eval_loss": wrong, "val_acc": right, "seconds": seconds}), flush=True)
    time.sleep(given.pause)
