"""Knobs of the PEFT recipe that need a GPU, each once: ``python -m benchmarks.gpu.recipe_knobs --out FILE``.

Trials of one seed over a 1.1 B Llama with random weights: on two GPUs, where there are two, data parallel and sharded
by FSDP in the ways that the recipe knows; then on one as it is, in 4 bits (QLoRA), and with DoRA. Printed for each:
samples a second, most memory of a GPU, and the eval loss at its end, which sharding must not change.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.gpu.packed import random_llama
from benchmarks.gpu.trials import Outcome, run_trial
from lora_tune_recipes.megatron.shapes import SHAPES

COMMON: dict[str, object] = {
    "SEQ": 512,
    "MINIBS": 4,
    "MAX_STEPS": 24,
    "WARMUP_STEPS": 0,
    "LR": 1e-3,
    "LORA_DROPOUT": 0,
    "EVAL_SAMPLES": 16,
    "VAL_CHECK_INTERVAL": 48,
    "TARGET": 0.01,
    "SEED": 1,
}
ONE_GPU: dict[str, dict[str, object]] = {
    "bf16": {},
    "nf4": {"LOAD_IN_4BIT": "nf4"},
    "fp4": {"LOAD_IN_4BIT": "fp4"},
    "dora": {"DORA": 1},
    "recompute": {"RECOMPUTE_GRANULARITY": "full"},
}
TWO_GPUS: dict[str, dict[str, object]] = {
    "data parallel": {},
    "layer": {"FSDP": 1},
    "shard_grad_op module": {"FSDP": 1, "FSDP_STRATEGY": "shard_grad_op", "FSDP_WRAP": "module"},
    "offload": {"FSDP": 1, "FSDP_OFFLOAD": 1},
    "none": {"FSDP": 1, "FSDP_WRAP": "none"},
    "a copy on each": {"FSDP": 1, "FSDP_SHARDS": 1},
    "recompute": {"FSDP": 1, "RECOMPUTE_GRANULARITY": "full"},
}


def told(one: Outcome) -> str:
    """A line of the table."""
    if one.failure or not one.evals:
        return f"{one.name:>22}: {one.failure or 'no evaluation'}"
    speed = f"{one.samples_per_second or 0:6.1f} samples/s, {one.gib or 0:5.1f} GiB"
    return f"{one.name:>22}: {speed}, eval loss {one.evals[-1][1]:.5f}, {one.seconds:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the numbers; logs beside it")
    parser.add_argument("--shape", default="1b", choices=sorted(SHAPES))
    parser.add_argument("--limit", type=float, default=60, help="seconds of a trial at most (default %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of these trials (default: all)")
    options = parser.parse_args()
    found: list[dict[str, object]] = []
    ways: list[tuple[int, Mapping[str, Mapping[str, object]]]] = [(1, ONE_GPU)]
    if torch.cuda.device_count() > 1:
        ways.insert(0, (2, TWO_GPUS))
    with tempfile.TemporaryDirectory() as folder:
        random_llama(SHAPES[options.shape], 1024).to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
        torch.cuda.empty_cache()
        for ranks, trials in ways:
            for name, own in trials.items():
                if options.only and name not in options.only:
                    continue
                one = run_trial(
                    name.replace(" ", "_"),
                    {**COMMON, "MODEL": folder, **own},
                    ranks=ranks,
                    module="lora_tune_recipes.peft_lora",
                    limit=options.limit,
                    folder=options.out.parent / "logs",
                )
                found.append({"gpus": ranks, **one.record()})
                print(f"{ranks} GPU {told(one)}", flush=True)
                options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
