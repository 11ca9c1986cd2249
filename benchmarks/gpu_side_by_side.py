"""The recipes and the plain Trainer on one GPU, side by side: ``python -m benchmarks.gpu_side_by_side``.

All get the same shape, data and batch. Makes random weights of the shape as a checkpoint and random packed data, runs
each program once, one after another, and prints samples/s of the warm blocks (the median), the most memory that the
allocator held, and the model FLOPs in use against what a large bf16 product reaches. Without a GPU it runs a tiny
shape, which shows only that it runs.

NeMo and the PEFT recipe may need different versions of transformers: ``--peft-path`` is the PYTHONPATH of the PEFT
recipe and of the Trainer where it is not the current one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.gpu.probes import row
from benchmarks.gpu.trials import NEMO, run_trial
from lora_tune_recipes.megatron.shapes import SHAPES, Shape

PROGRAMS = {"nemo": NEMO, "peft": "lora_tune_recipes.peft_lora", "trainer": "benchmarks.plain_trainer"}


def make_checkpoint(folder: Path, shape: Shape, seq: int) -> None:
    """Random weights of ``shape`` in bfloat16, made on the GPU where there is one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_groups,
        max_position_embeddings=seq,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


def make_data(folder: Path, shape: Shape, seq: int, count: int) -> None:
    """Random tokens, packed: ``count`` training sequences and four for validation."""
    folder.mkdir(parents=True)
    for split, rows in (("train", count), ("validation", 4)):
        tokens = np.random.default_rng(rows).integers(0, shape.vocab, (rows, seq + 1), dtype=np.int32)
        np.save(folder / f"{split}.npy", tokens)


def stated_speed(log: Path) -> float | None:
    """The median samples/s of the blocks after the first, as the program itself states them (the Trainer's blocks
    have no evaluations between them, from which a reader could tell)."""
    stated = [float(speed) for speed in re.findall(r'"throughput": ([0-9.e+-]+)', log.read_text(errors="replace"))]
    return round(median(stated[1:]), 4) if len(stated) > 1 else None


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b" if cuda else "tiny")
    parser.add_argument("--seq", type=int, default=2048 if cuda else 64)
    parser.add_argument("--minibs", type=int, default=4, help="sequences a step (default %(default)s)")
    parser.add_argument("--mbs", type=int, default=1, help="sequences a forward pass (default %(default)s)")
    parser.add_argument("--block", type=int, default=10, help="steps of one block; three are run (default %(default)s)")
    parser.add_argument("--recompute", choices=("", "full"), default="", help="activation recomputation")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS) if cuda else ["peft", "trainer"])
    parser.add_argument("--peft-path", default=os.environ.get("PYTHONPATH", ""))
    parser.add_argument("--limit", type=float, default=180, help="seconds a program (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("side_by_side.json"))
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    records = []
    device = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU"
    print(f"{datetime.date.today()}, {device}, {options.shape}, sequence {options.seq}, {options.minibs} a step")
    with tempfile.TemporaryDirectory() as temporary:
        model, data = Path(temporary) / "model", Path(temporary) / "data"
        make_checkpoint(model, shape, options.seq)
        make_data(data, shape, options.seq, 64 * options.minibs)
        variables = {
            "MODEL": model,
            "DATADIR": data,
            "SEQ": options.seq,
            "MINIBS": options.minibs,
            "MBS": options.mbs,
            "MAX_STEPS": 3 * options.block,
            "VAL_CHECK_INTERVAL": options.block * options.minibs,
            "EVAL_SAMPLES": 4,
            "LR": 1e-4,
            "WARMUP_STEPS": 1,
            "TARGET": 0.01,
            "RECOMPUTE_GRANULARITY": options.recompute,
        }
        for name in options.only:
            own = {"LLAMA": options.shape} if name == "nemo" else {"PYTHONPATH": options.peft_path}
            # A warm worker has one set of imports; whoever takes it must not change what is compared.
            own["LORA_TUNE_WORKER"] = ""
            logs = options.out.parent / "logs"
            outcome = run_trial(name, {**variables, **own}, module=PROGRAMS[name], limit=options.limit, folder=logs)
            outcome = replace(outcome, samples_per_second=stated_speed(logs / f"{name}.log"))
            records.append(outcome.record())
            print(row(outcome, shape.step_flops(options.seq, options.seq), 1), flush=True)
    shown = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    options.out.write_text(json.dumps({"options": shown, "device": device, "records": records}, indent=1))


if __name__ == "__main__":
    main()
