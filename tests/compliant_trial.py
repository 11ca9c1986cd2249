"""A trial whose log has every line that MLPerf's compliance checker asks of Llama-2-70B LoRA. A formula, no training.

Reads SPEED (samples/s of a run that is told at 10,000 times its pace, so that a log spans no more than its job may),
SEED, PACE (real seconds of a run).
"""

from __future__ import annotations

import json
import math
import os
import random
import time

BATCH, EVERY, FIRST = 8, 384, 1536
FASTER = 10_000


def say(at: float, key: str, value: object = None, kind: str = "POINT_IN_TIME", **metadata: object) -> None:
    """One MLLOG line, stamped ``at`` seconds."""
    record = {"namespace": "", "time_ms": round(at * 1000), "event_type": kind, "key": key, "value": value}
    print(":::MLLOG " + json.dumps({**record, "metadata": {"file": "t.py", "lineno": 1, **metadata}}), flush=True)


def announce(at: float, seed: int) -> None:
    for key, value in {
        "submission_benchmark": "llama2_70b_lora", "submission_org": "tests", "submission_platform": "none",
        "submission_division": "closed", "submission_status": "onprem", "seed": seed, "train_samples": 3901,
        "eval_samples": 173, "global_batch_size": BATCH, "opt_base_learning_rate": 4e-4, "lora_rank": 16,
        "lora_alpha": 32, "opt_learning_rate_training_steps": 800, "opt_gradient_clip_norm": 0.3,
        "opt_adamw_weight_decay": 1e-4, "gradient_accumulation_steps": 1,
        "lowest_numerical_precision_in_linear": "fp8", "lowest_numerical_precision_in_attn": "bfloat16",
        "lowest_numerical_precision_in_comm": "bfloat16", "tensor_parallelism": 1, "pipeline_parallelism": 1,
        "context_parallelism": 1, "expert_parallelism": 1, "micro_batch_size": 1, "config_filename": "config_X.sh",
    }.items():  # fmt: skip
        say(at, key, value)


def run(start: float, seed: int, speed: float) -> float:
    """One run from its first second; returns its last."""
    needed = 3250 * math.exp(random.Random(seed).gauss(0, 0.05))
    say(start, "cache_clear", True)
    say(start, "init_start", kind="INTERVAL_START")
    announce(start, seed)
    at, samples, loss = start + 60 / FASTER, 0, math.inf
    say(at, "init_stop", kind="INTERVAL_END")
    say(at, "run_start", kind="INTERVAL_START")
    while loss > 0.925 and samples < 6400:
        step = FIRST if samples == 0 else EVERY
        say(at, "block_start", kind="INTERVAL_START", samples_count=samples)
        at, samples = at + step / speed / FASTER, samples + step
        say(at, "block_stop", kind="INTERVAL_END", samples_count=samples)
        say(at, "eval_start", kind="INTERVAL_START", samples_count=samples)
        at, loss = at + 30 / FASTER, 0.925 - 0.02244 * math.log(samples / needed)
        say(at, "eval_accuracy", loss, samples_count=samples)
        say(at, "eval_stop", kind="INTERVAL_END", samples_count=samples)
    say(at, "run_stop", kind="INTERVAL_END", samples_count=samples, status="success")
    return at


if __name__ == "__main__":
    time.sleep(float(os.environ.get("PACE", "0")))
    run(time.time(), int(os.environ["SEED"]), float(os.environ["SPEED"]))
