"""One trial alone, step by step, on a real base: ``python -m benchmarks.gpu.fast_step FOLDER [--out FILE]``.

FOLDER is what ``benchmarks.gpu.real_base`` made. For each size of a step: milliseconds a step of the PEFT recipe eager,
with its step as a CUDA graph, with compiled layers, and with both; what the warm-up of each costs; the losses of
the same steps and an eval beside the eager ones; and the floor: the arithmetic of a step at the card's bf16 rate.
``--slots 8,16`` measures packs of so many trials of the first size beside them: milliseconds a pass, steps of trials a
second.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.trials_of_pack import PEAK
from lora_tune.base.llama import Shape
from lora_tune_recipes import settings as knobs
from lora_tune_recipes import text
from lora_tune_recipes.lora_model import tokenizer
from lora_tune_recipes.packed.base import PackedBase
from lora_tune_recipes.packed.pack import Pack
from lora_tune_recipes.packed.slot import Slot
from lora_tune_recipes.ranks import connect
from lora_tune_recipes.trainer import Trainer

MODES = {
    "eager": {"CUDA_GRAPH": "0", "TORCH_COMPILE": "0"},
    "graph": {"CUDA_GRAPH": "1", "TORCH_COMPILE": "0"},
    "compiled": {"CUDA_GRAPH": "0", "TORCH_COMPILE": "1"},
    "both": {"CUDA_GRAPH": "1", "TORCH_COMPILE": "1"},
}
SIZES = ((8, 512), (64, 512))
STEPS = 40
"""Measured of each, after ten that are not."""


def measured(folder: Path, batch: int, seq: int, mode: str, dropout: float) -> dict[str, Any]:
    """One mode at one size."""
    settings = knobs.read(
        {
            "MODEL": str(folder / "base"), "DATADIR": str(folder / "text"), "SEQ": str(seq), "MINIBS": str(batch),
            "LORA_DROPOUT": str(dropout), "EVAL_SAMPLES": "32", "MBS": str(batch), **MODES[mode],
        }
    )  # fmt: skip
    ranks = connect(settings)
    tokenize = tokenizer(settings.model)
    train = text.load(settings.datadir, "train", seq, tokenize)
    validation = text.load(settings.datadir, "validation", seq, tokenize).spread(32)
    torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(settings, ranks)
    torch.manual_seed(1)
    began = time.monotonic()
    trainer.warm_up()
    warm_up = time.monotonic() - began
    losses, times = [], []
    for rows in itertools.islice(text.order(len(train), batch, 1), 10 + STEPS):
        torch.cuda.synchronize()
        began = time.monotonic()
        loss = trainer.step(train.rows(rows), 2e-4)
        torch.cuda.synchronize()
        times.append(time.monotonic() - began)
        losses.append(float(loss))
    began = time.monotonic()
    score = trainer.evaluate(validation)
    evaluation = time.monotonic() - began
    shape = Shape.from_config(json.loads((folder / "base" / "config.json").read_text(encoding="utf-8")))
    return {
        "batch": batch, "seq": seq, "mode": mode, "dropout": dropout, "warm_up_s": round(warm_up, 2),
        "step_ms": round(1e3 * statistics.median(times[10:]), 2), "eval_ms": round(1e3 * evaluation, 1),
        "floor_ms": round(1e3 * shape.step_flops(batch * seq, seq) / PEAK, 2),
        "gib": round(torch.cuda.max_memory_reserved() / 2**30, 2), "losses": losses, "eval_loss": score,
    }  # fmt: skip


def packed(folder: Path, batch: int, seq: int, slots: int) -> dict[str, Any]:
    """A pack of ``slots`` trials of one size."""
    variables = {"MODEL": str(folder / "base"), "DATADIR": str(folder / "text"), "SEQ": str(seq), "MINIBS": str(batch)}
    variables |= {"LORA_DROPOUT": "0", "EVAL_SAMPLES": "32"}
    base = PackedBase(knobs.read(variables))
    pack = Pack(base)
    for number in range(slots):
        settings = knobs.read({**variables, "SEED": str(number)})
        pack.join(Slot(settings, base.texts(settings)))
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        began = time.monotonic()
        pack.round()
        torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    seconds = statistics.median(times[10:])
    return {"slots": slots, "batch": batch, "seq": seq, "pass_ms": 1e3 * seconds, "steps_per_s": slots / seconds}


def main() -> None:
    """Measure every mode at every size."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--sizes", default=",".join(f"{b}x{s}" for b, s in SIZES))
    parser.add_argument("--slots", default="", help="trials of a pack, several with commas between")
    parser.add_argument("--dropout", type=float, default=0.0)
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    found = []
    for size in arguments.sizes.split(","):
        batch, seq = map(int, size.split("x"))
        eager: list[float] = []
        for mode in arguments.modes.split(","):
            record = measured(arguments.folder, batch, seq, mode, arguments.dropout)
            eager = eager or record["losses"]
            apart = max(abs(a - b) for a, b in zip(eager, record["losses"], strict=True))
            print(
                f"{size} {mode:9} step {record['step_ms']:7.2f} ms (floor {record['floor_ms']}), eval "
                f"{record['eval_ms']} ms, warm-up {record['warm_up_s']} s, {record['gib']} GiB; loss "
                f"{record['losses'][0]:.4f} to {record['losses'][-1]:.4f}, eval {record['eval_loss']:.5f}, "
                f"apart from eager by {apart:.5f} at most",
                flush=True,
            )
            found.append(record)
            torch.compiler.reset()  # a trial's process compiles for itself
            gc.collect()
            torch.cuda.empty_cache()
    batch, seq = map(int, arguments.sizes.split(",")[0].split("x"))
    for slots in filter(None, arguments.slots.split(",")):
        record = packed(arguments.folder, batch, seq, int(slots))
        print(
            f"pack of {slots}: a pass {record['pass_ms']:.1f} ms, {record['steps_per_s']:.1f} steps a second",
            flush=True,
        )
        found.append(record)
        gc.collect()
        torch.cuda.empty_cache()
    if arguments.out:
        arguments.out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
