"""What the example scripts share: a small least-squares training in plain Python, and their options."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator


def options(**more: object) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate (default: 0.02)")
    parser.add_argument("--batch-size", type=int, default=8, help="samples a step (default: 8)")
    parser.add_argument("--seed", type=int, default=1)
    for name, default in more.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"(default: {default})")
    return parser


def train(arguments: argparse.Namespace, steps: int = 60) -> Iterator[tuple[int, float, float]]:
    """Stochastic gradient descent on y = 3 x + noise: (step, training loss, loss on held-out samples)."""
    draw = random.Random(arguments.seed)
    slope, held_out = 0.0, [(x / 10, 0.3 * x) for x in range(-10, 11)]
    for step in range(1, steps + 1):
        time.sleep(0.03)  # a training takes time: evals that arrive together could not be told apart
        batch = [(x, 3 * x + draw.gauss(0, 0.3)) for x in (draw.uniform(-1, 1) for _ in range(arguments.batch_size))]
        errors = [slope * x - y for x, y in batch]
        slope -= 10 * arguments.lr * sum(e * x for e, (x, _) in zip(errors, batch, strict=True)) / len(batch)
        yield (
            step,
            sum(e * e for e in errors) / len(batch),
            0.1 + sum((slope * x - y) ** 2 for x, y in held_out) / len(held_out),
        )
