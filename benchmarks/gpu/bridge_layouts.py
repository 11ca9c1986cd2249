"""Layouts of Megatron-Bridge beside NeMo's on the GPUs of one host: ``python -m benchmarks.gpu.bridge_layouts``.

Parts, in order: ``large``, speed and memory of the whole 70B shape, sequence 8192, random weights: nothing converges;
``small``, eval losses of a small Llama in every layout at one learning rate and seed, several trials beside each other,
for only losses are asked. ``--total`` seconds end it all, and what is known by then is in ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.bridge import BF16, DATA, MODULES, NO_DPA, PLAIN, small_trial, worker_of
from benchmarks.gpu.probes import row
from benchmarks.gpu.trials import Outcome, run_trial
from lora_tune_recipes.megatron.shapes import SHAPES

Variant = tuple[str, str, dict[str, object]]
"""Recipe, name, variables."""
TP2: dict[str, object] = {"TP": 2, "SP": 1}
NEMO_FP8: dict[str, object] = {"FP8": 1, "FP8_PARAMS": 1, "FP8_DPA": 1}
LARGE: list[Variant] = [
    ("bridge", "tp2", TP2),
    ("nemo", "tp2_act_overlap", {**TP2, **NEMO_FP8, "FP8_ACT": 1, "TP_COMM_OVERLAP": 1}),
    ("bridge", "tp2_act", {**TP2, "FP8_ACT": 1}),
    ("nemo", "tp2_act", {**TP2, **NEMO_FP8, "FP8_ACT": 1}),
    ("bridge", "tp2_graph", {**TP2, "MCORE_CUDA_GRAPH": 1, "WARMUP_TRAIN_STEPS": 2}),
    ("bridge", "tp2_act_overlap", {**TP2, "FP8_ACT": 1, "TP_COMM_OVERLAP": 1}),
    ("bridge", "pp2", {"PP": 2}),
    ("bridge", "pp2_vp2", {"PP": 2, "VP": 2}),
    ("bridge", "tp2_plain", {**TP2, **PLAIN}),
]
"""In order of interest."""
SMALL: list[Variant] = [
    ("bridge", "dp2", {}),
    ("bridge", "dp2_no_overlap", {"DDP_OVERLAP_GRAD_REDUCE": 0, "DDP_OVERLAP_PARAM_GATHER": 0}),
    ("bridge", "dp2_whole_optimizer", {"USE_DISTRIBUTED_OPTIMIZER": 0, "DDP_OVERLAP_PARAM_GATHER": 0}),
    ("bridge", "tp2", {"TP": 2}),
    ("bridge", "tp2_sp", TP2),
    ("bridge", "cp2_a2a", {"CP": 2}),
    ("bridge", "cp2_p2p", {"CP": 2, "CP_COMM_TYPE": "p2p"}),
    ("bridge", "pp2", {"PP": 2}),
    ("bridge", "pp2_vp2", {"PP": 2, "VP": 2}),
    ("nemo", "dp2", {}),
    ("nemo", "tp2_sp", TP2),
    ("nemo", "cp2_a2a", {"CP": 2}),
    ("nemo", "pp2", {"PP": 2}),
    ("bridge", "tp2_sp_fp8", {**TP2, **NO_DPA, "USE_TE_OPS": 1, "FUSED_SINGLE_QKV_ROPE": 1}),
    ("bridge", "tp2_sp_fp8_plain", {**TP2, **NO_DPA, "VAL_MBS": 4}),
    ("bridge", "tp2_sp_fp8_overlap", {**TP2, **NO_DPA, "VAL_MBS": 4, "TP_COMM_OVERLAP": 1}),
    ("bridge", "dp2_fp8", {**NO_DPA, "USE_TE_OPS": 1, "FUSED_SINGLE_QKV_ROPE": 1}),
    ("bridge", "cp2_fp8", {**NO_DPA, "USE_TE_OPS": 1, "FUSED_SINGLE_QKV_ROPE": 1, "CP": 2}),
    ("bridge", "dp2_te_ops", {"USE_TE_OPS": 1}),
]
ALONE: list[Variant] = [("bridge", "alone", {}), ("nemo", "alone", {})]
"""The references of ``SMALL``, on one GPU."""


LARGE_TRIAL: dict[str, object] = {
    "LLAMA": "70b",
    "SEQ": 8192,
    "GLOBAL_BATCH_SIZE": 2,
    "MAX_STEPS": 100,
    "VAL_CHECK_INTERVAL": 4,
    "EVAL_SAMPLES": 2,
    "WARMUP_TRAIN_STEPS": 1,
    "WARMUP_VALIDATION_STEPS": 1,
    "PROBE": 1,
    "DATADIR": DATA,
    "DIST_TIMEOUT": 60,
    "NUM_WORKERS": 2,
}
"""What the variants of ``LARGE`` share."""


def small_layout(base: Path, recipe: str) -> dict[str, object]:
    """What the variants of ``SMALL`` share in one recipe."""
    fixed = {**small_trial(base), "LR": 3e-3, "GLOBAL_BATCH_SIZE": 8, "MBS": 4, "DIST_TIMEOUT": 60}
    del fixed["MINIBS"]
    return fixed | ({**BF16, "VAL_MBS": 8} if recipe == "bridge" else {})


class Bench:
    """Runs the parts, and keeps the records in one file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._end: float = time.monotonic() + options.total
        self._records: dict[str, Any] = {}

    def left(self, most: float) -> float:
        """Seconds that something may take which should take ``most`` at most."""
        return min(most, self._end - time.monotonic())

    def trial(
        self, part: str, variant: Variant, fixed: dict[str, object], ranks: int, limit: float, lane: int = 0
    ) -> Outcome:
        """One trial in its recipe's environment. lane: which of its workers serves it."""
        recipe, name, variables = variant
        own: dict[str, object] = {
            "PYTHONPATH": getattr(self._options, f"{recipe}_path") or os.environ.get("PYTHONPATH", "")
        }
        own |= worker_of(self._options.workers, recipe, lane)
        return run_trial(
            f"{part}_{recipe}_{name}",
            {**fixed, **own, **variables},
            ranks=ranks,
            module=MODULES[recipe],
            limit=max(1.0, self.left(limit)),
            folder=self._options.out.parent / "logs",
        )

    def keep(self, part: str, variant: Variant, outcome: Outcome) -> None:
        recipe, _, variables = variant
        self._records.setdefault(part, []).append({"recipe": recipe, "variables": variables, **outcome.record()})
        self._options.out.write_text(json.dumps(self._records, indent=1) + "\n")

    def large(self) -> None:
        flops = SHAPES["70b"].step_flops(8192, 8192)
        until: float = time.monotonic() + self._options.large_seconds
        for variant in LARGE:
            if min(self.left(150), until - time.monotonic()) < 40:
                print(f"{variant[0]} {variant[1]}: not run, out of time")
                continue
            outcome = self.trial("large", variant, LARGE_TRIAL, self._options.gpus, 110)
            self.keep("large", variant, outcome)
            print(row(outcome, flops, self._options.gpus), flush=True)

    def small(self) -> None:
        variants = [*((one, 1) for one in ALONE), *((one, self._options.gpus) for one in SMALL)]
        with ProcessPoolExecutor(self._options.beside) as pool:
            futures = [
                pool.submit(self.trial, "small", one, small_layout(self._options.base, one[0]), ranks, 200, lane)
                for lane, (one, ranks) in enumerate(variants)
            ]
            for (one, _), future in zip(variants, futures, strict=True):
                outcome = future.result()
                self.keep("small", one, outcome)
                said = [loss for _, loss, _ in outcome.evals] or outcome.failure
                print(f"small {one[0]} {one[1]}: {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="Hugging Face folder of a small Llama over bytes")
    parser.add_argument(
        "--workers", type=Path, default=Path("/nonexistent"), help="folder of bridge.sock and nemo.sock"
    )
    for name in ("bridge", "nemo"):
        parser.add_argument(f"--{name}-path", default="", help=f"PYTHONPATH of the {name} recipe")
    parser.add_argument("--gpus", type=int, default=2, help="of this host (default %(default)s)")
    parser.add_argument("--parts", nargs="*", default=["large", "small"])
    parser.add_argument("--beside", type=int, default=17, help="small trials at once (default %(default)s)")
    parser.add_argument("--large-seconds", type=float, default=330.0)
    parser.add_argument("--total", type=float, default=400.0, help="seconds in all (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("layouts.json"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    for part in options.parts:
        print(f"== {part}, {bench.left(1e9):.0f} s left", flush=True)
        getattr(bench, part)()


if __name__ == "__main__":
    main()
