"""A small real training in MLPerf's log form: logistic regression by SGD, in plain Python.

Reads BENCHMARK (what its log announces), LR, SEED, MEASURE (loss or accuracy of 400 unseen examples), TARGET (where it
stops), GBS, MAX_STEPS. It evaluates every 20 steps.
"""

from __future__ import annotations

import json
import math
import os
import random
import time

WEIGHTS = (2.0, -1.5, 1.0, 0.5, -0.5, 0.0)
EVERY = 20

Example = tuple[list[float], int]


def say(key: str, value: object = None, **metadata: object) -> None:
    record = {"namespace": "", "time_ms": round(time.time() * 1000), "event_type": "POINT_IN_TIME", "key": key}
    line = {**record, "value": value, "metadata": {"file": "t", "lineno": 1, **metadata}}
    print(":::MLLOG " + json.dumps(line), flush=True)


def examples(count: int, rng: random.Random) -> list[Example]:
    """Points and the class that a noisy plane gives them."""
    points = [[rng.gauss(0, 1) for _ in WEIGHTS] for _ in range(count)]
    return [(x, int(rng.random() < chance(x, list(WEIGHTS), scale=3))) for x in points]


def chance(x: list[float], weights: list[float], scale: float = 1.0) -> float:
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, scale * sum(a * b for a, b in zip(x, weights, strict=True))))))


def step(weights: list[float], batch: list[Example], rate: float) -> list[float]:
    """One step of gradient descent on the mean log loss."""
    errors = [(chance(x, weights) - y, x) for x, y in batch]
    return [w - rate * sum(e * x[i] for e, x in errors) / len(batch) for i, w in enumerate(weights)]


def measured(weights: list[float], unseen: list[Example], measure: str) -> float:
    chances = [(chance(x, weights), y) for x, y in unseen]
    if measure == "accuracy":
        return sum((p > 0.5) == bool(y) for p, y in chances) / len(chances)
    return -sum(math.log(max(1e-9, p if y else 1 - p)) for p, y in chances) / len(chances)


def main() -> None:
    batch, rate, measure = int(os.environ["GBS"]), float(os.environ["LR"]), os.environ["MEASURE"]
    target, benchmark, seed = float(os.environ["TARGET"]), os.environ["BENCHMARK"], int(os.environ["SEED"])
    rng = random.Random(seed)
    unseen = examples(400, random.Random("unseen"))
    say("init_start")
    for key, value in {
        "submission_benchmark": benchmark, "global_batch_size": batch, "seed": seed, "opt_base_learning_rate": rate,
    }.items():  # fmt: skip
        say(key, value)
    say("init_stop")
    say("run_start")
    weights = [0.0] * len(WEIGHTS)
    reached = False
    for number in range(1, int(os.environ["MAX_STEPS"]) + 1):
        weights = step(weights, examples(batch, rng), rate)
        if number % EVERY == 0:
            value = measured(weights, unseen, measure)
            say("eval_accuracy", value, samples_count=number * batch)
            reached = value >= target if measure == "accuracy" else value <= target
            if reached:
                break
    say("run_stop", status="success" if reached else "aborted")


if __name__ == "__main__":
    main()
