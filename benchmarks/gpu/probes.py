"""Samples/s, memory and failures of layouts and precisions at one shape: ``python -m benchmarks.gpu.probes``.

Every variant is a short run of the NeMo recipe on random weights and the shipped text cut to SEQ; none converges
anywhere. A table goes to standard output, the records to ``--out``. The list is in order of interest: ``--total``
seconds end it wherever it is.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

from benchmarks.gpu.trials import Outcome, run_trial
from lora_tune_recipes.megatron.shapes import SHAPES

PEAK_TFLOPS = 790.0
"""What a large bf16 product reaches on one H100 or H200 (8192 cubed, random data); FP8 runs can pass it."""

FP8 = {"FP8": 1}
CUDNN = {"NVTE_NORM_FWD_USE_CUDNN": 1, "NVTE_NORM_BWD_USE_CUDNN": 1}
PARAMS = {**FP8, "FP8_PARAMS": 1}
OVERLAP = {"TP_COMM_OVERLAP": 1}
TP2_CP2: dict[str, object] = {"TP": 2, "CP": 2, "SP": 1, **PARAMS}
ON_FOUR: dict[str, dict[str, object]] = {
    "tp4_sp_fp8": {"TP": 4, "SP": 1, **FP8},
    "tp4_sp_fp8params": {"TP": 4, "SP": 1, **PARAMS},
    "tp2_cp2_sp_fp8params": TP2_CP2,
    "tp2_cp2_sp_fp8params_p2p": {**TP2_CP2, "CP_COMM_TYPE": "p2p"},
    "tp2_cp2_sp_fp8params_p2p_overlap": {**TP2_CP2, "CP_COMM_TYPE": "p2p", **OVERLAP},
    "tp2_cp2_sp_fp8params_overlap": {**TP2_CP2, **OVERLAP},
    "tp2_cp2_sp_fp8params_p2p_dpa": {**TP2_CP2, "CP_COMM_TYPE": "p2p", "FP8_DPA": 1},
    "tp2_cp2_sp_fp8params_p2p_dpa_overlap": {**TP2_CP2, "CP_COMM_TYPE": "p2p", "FP8_DPA": 1, **OVERLAP},
    "tp2_cp2_sp_fp8params_a2a_dpa_overlap": {**TP2_CP2, "FP8_DPA": 1, **OVERLAP},
    "tp2_cp2_sp_fp8params_p2p_act": {**TP2_CP2, "CP_COMM_TYPE": "p2p", "FP8_ACT": 1},
    "tp2_dp2_sp_fp8params": {"TP": 2, "SP": 1, **PARAMS},
    "tp2_dp2_sp_fp8params_act_overlap": {"TP": 2, "SP": 1, **PARAMS, "FP8_ACT": 1, **OVERLAP},
    "tp4_sp_fp8_overlap": {"TP": 4, "SP": 1, **FP8, **OVERLAP},
    "tp1_cp4_fp8params": {"CP": 4, **PARAMS},
    "tp4_sp_fp8params_dpa": {"TP": 4, "SP": 1, **PARAMS, "FP8_DPA": 1},
    "tp4_sp_fp8params_overlap": {"TP": 4, "SP": 1, **PARAMS, **OVERLAP},
    "tp4_sp_fp8params_graph": {"TP": 4, "SP": 1, "MCORE_CUDA_GRAPH": 1, **PARAMS},
    "tp4_sp_fp8params_cudnn": {"TP": 4, "SP": 1, **PARAMS, **CUDNN},
    "tp2_cp2_sp_fp8": {"TP": 2, "CP": 2, "SP": 1, **FP8},
    "tp4_sp_fp8_mbs2": {"TP": 4, "SP": 1, "MBS": 2, **FP8},
    "tp2_cp2_sp_fp8_recompute": {"TP": 2, "CP": 2, "SP": 1, "RECOMPUTE_GRANULARITY": "full", **FP8},
    "tp4_fp8": {"TP": 4, **FP8},
    "tp1_cp4_bf16_recompute": {"CP": 4, "RECOMPUTE_GRANULARITY": "full"},
    "tp4_sp_bf16": {"TP": 4, "SP": 1},
}
ON_EIGHT: dict[str, dict[str, object]] = {
    "tp4_dp2_sp_fp8": {"TP": 4, "SP": 1, **FP8},
    "tp4_cp2_sp_fp8": {"TP": 4, "CP": 2, "SP": 1, **FP8},
    "tp8_sp_fp8": {"TP": 8, "SP": 1, **FP8},
    "tp2_cp4_sp_fp8params": {"TP": 2, "CP": 4, "SP": 1, **PARAMS},
    "tp2_cp2_dp2_sp_fp8params": {"TP": 2, "CP": 2, "SP": 1, **PARAMS},
    "tp2_dp4_sp_fp8params": {"TP": 2, "SP": 1, **PARAMS},
    "tp1_cp8_fp8params": {"CP": 8, **PARAMS},
    "tp4_dp2_sp_fp8_overlap": {"TP": 4, "SP": 1, "TP_COMM_OVERLAP": 1, **FP8},
    "tp4_dp2_sp_fp8_graph": {"TP": 4, "SP": 1, "MCORE_CUDA_GRAPH": 1, **FP8},
    "tp4_dp2_sp_bf16": {"TP": 4, "SP": 1},
}
ON_ONE: dict[str, dict[str, object]] = {
    "bf16": {},
    "fp8": {**FP8},
    "fp8_params": {**FP8, "FP8_PARAMS": 1},
    "fp8_dpa": {**FP8, "FP8_DPA": 1},
    "fp8_act": {**FP8, "FP8_ACT": 1},
    "fp8_cudnn_norm": {**FP8, **CUDNN},
    "fp8_graph": {**FP8, "MCORE_CUDA_GRAPH": 1},
    "bf16_te_ops": {"USE_TE_OPS": 1},
    "bf16_recompute": {"RECOMPUTE_GRANULARITY": "full"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, choices=(1, 4, 8), help="of this host (default %(default)s)")
    parser.add_argument("--llama", choices=sorted(SHAPES), default="70b_slice8", help="shape (default %(default)s)")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step (default %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="steps in a block; two blocks (default %(default)s)")
    parser.add_argument("--only", nargs="*", default=None, help="names of variants")
    parser.add_argument("--limit", type=float, default=150, help="seconds a variant (default %(default)s)")
    parser.add_argument("--total", type=float, default=540, help="seconds in all (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("probes.json"))
    options = parser.parse_args()
    end = time.monotonic() + options.total
    variants = {1: ON_ONE, 4: ON_FOUR, 8: ON_EIGHT}[options.gpus]
    shape = SHAPES[options.llama]
    flops = shape.step_flops(options.seq, options.seq)
    fixed = {
        "LLAMA": options.llama,
        "SEQ": options.seq,
        "GLOBAL_BATCH_SIZE": options.batch,
        "MAX_STEPS": 100,
        "VAL_CHECK_INTERVAL": options.steps * options.batch,
        "EVAL_SAMPLES": options.batch,
        "WARMUP_TRAIN_STEPS": 1,
        "WARMUP_VALIDATION_STEPS": 1,
        "PROBE": 1,
        "DATADIR": "lora_tune_recipes/tiny",
        "DIST_TIMEOUT": 60,
    }
    records = []
    print(f"{options.llama}, sequence {options.seq}, {options.batch} a step, {options.gpus} GPU(s), {platform.node()}")
    for name in options.only if options.only is not None else variants:
        left = end - time.monotonic()
        if left < 30:
            print(f"{name}: not run, out of time")
            continue
        outcome = run_trial(
            name,
            {**fixed, **variants[name]},
            ranks=options.gpus,
            limit=min(options.limit, left),
            folder=options.out.parent / "logs",
        )
        records.append({"variables": variants[name], **outcome.record()})
        print(row(outcome, flops, options.gpus), flush=True)
        options.out.write_text(json.dumps({"fixed": fixed, "gpus": options.gpus, "records": records}, indent=1))


def row(outcome: Outcome, flops: float, gpus: int) -> str:
    """One line of the table; the last column is model FLOPs over what the GPUs' bf16 products reach."""
    speed = outcome.samples_per_second
    if speed is None:
        return f"{outcome.name:26} {outcome.seconds:6.1f} s  {outcome.failure[:160]}"
    used = speed * flops / (gpus * PEAK_TFLOPS * 1e12)
    return (
        f"{outcome.name:26} {outcome.seconds:6.1f} s  start {outcome.start_seconds:5.1f} s  {speed:7.4f} samples/s"
        f"  {outcome.gib or 0:6.1f} GiB  MFU {used:.2f}  {outcome.failure[:80]}"
    )


if __name__ == "__main__":
    main()
