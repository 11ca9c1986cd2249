"""Megatron-Bridge beside NeMo and PEFT on one GPU: ``python -m benchmarks.gpu.bridge --base FOLDER``.

Parts, in order: ``slice``, speed and memory of 8 of the 70B's 80 layers; ``adapter``, an adapter tuned by Bridge and
evaluated by peft; ``compare``, eval losses of the three recipes from one base, at equal seeds and learning rates;
``whole``, the 70B shape with FP8 weights on this one GPU. Random weights in ``slice`` and ``whole``: nothing converges
there. Every part is bounded, ``--total`` seconds end it all, and what is known by then is in ``--out``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.probes import row
from benchmarks.gpu.trials import Outcome, run_trial
from lora_tune.recipes.megatron.shapes import SHAPES

MODULES = {name: f"lora_tune.recipes.{name}_lora" for name in ("bridge", "nemo", "peft")}
DATA = "lora_tune/recipes/tiny"
PLAIN = {"USE_TE_OPS": 0, "FUSED_SINGLE_QKV_ROPE": 0}
BF16 = {"FP8": 0, **PLAIN}
SLICE: list[tuple[str, str, dict[str, object]]] = [
    ("bridge", "defaults", {}),
    ("nemo", "fp8_params_dpa", {"FP8": 1, "FP8_PARAMS": 1, "FP8_DPA": 1}),
    ("bridge", "fp8_params_dpa", PLAIN),
    ("bridge", "bf16", BF16),
    ("nemo", "bf16", {}),
    ("bridge", "defaults_graph", {"MCORE_CUDA_GRAPH": 1}),
    ("bridge", "fp8_params", {"FP8_DPA": 0, **PLAIN}),
    ("bridge", "fp8", {"FP8_DPA": 0, "FP8_PARAMS": 0, **PLAIN}),
    ("nemo", "fp8_params_dpa_graph", {"FP8": 1, "FP8_PARAMS": 1, "FP8_DPA": 1, "MCORE_CUDA_GRAPH": 1}),
]
"""(recipe, variant, variables), in order of interest."""
RATES, SEEDS = (1e-3, 3e-3, 6e-3, 1e-2), (1, 2, 3, 4, 5)


class Bench:
    """Runs the parts, and keeps the records in one file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._end = time.monotonic() + options.total
        self._records: dict[str, Any] = {}
        self.base = {"MODEL": str(options.base), "DATADIR": DATA, "SEQ": 512, "MINIBS": 8, "MBS": 8, "TARGET": 0.01}
        self.base |= {"NUM_WORKERS": 0, "LORA_DROPOUT": 0, "WARMUP_TRAIN_STEPS": 2, "WARMUP_VALIDATION_STEPS": 1}
        self.base |= {"MAX_STEPS": 60, "VAL_CHECK_INTERVAL": 160, "EVAL_SAMPLES": 32, "LORA_TARGETS": "attention"}
        self.base |= {
            "LORA_RANK": 16,
            "LORA_ALPHA": 32,
            "WEIGHT_DECAY": 1e-4,
            "GRADIENT_CLIP_VAL": 0.3,
            "WARMUP_STEPS": 5,
        }

    def left(self, most: float) -> float:
        """Seconds that something may take which should take ``most`` at most."""
        return min(most, self._end - time.monotonic())

    def keep(self, part: str, record: Any) -> None:
        self._records.setdefault(part, []).append(record)
        self._options.out.write_text(json.dumps(self._records, indent=1) + "\n")

    def trial(self, recipe: str, name: str, variables: dict[str, object], limit: float) -> Outcome:
        """One trial in its recipe's environment."""
        own = {"PYTHONPATH": getattr(self._options, f"{recipe}_path") or os.environ.get("PYTHONPATH", "")}
        socket = self._options.workers / f"{recipe}.sock"
        if socket.exists():
            own["LORA_TUNE_WORKER"] = str(socket)
        low = BF16 if recipe == "bridge" else {}
        return run_trial(
            f"{recipe}_{name}",
            {**({} if "LLAMA" in variables else low), **own, **variables},
            module=MODULES[recipe],
            limit=limit,
            folder=self._options.out.parent / "logs",
        )

    def slice(self) -> None:
        fixed: dict[str, object] = {"LLAMA": "70b_slice8", "SEQ": 8192, "GLOBAL_BATCH_SIZE": 2, "MAX_STEPS": 100}
        fixed |= {"VAL_CHECK_INTERVAL": 8, "EVAL_SAMPLES": 2, "WARMUP_TRAIN_STEPS": 2, "WARMUP_VALIDATION_STEPS": 1}
        fixed |= {"PROBE": 1, "DATADIR": DATA, "DIST_TIMEOUT": 60, "NUM_WORKERS": 2}
        flops = SHAPES["70b_slice8"].step_flops(8192, 8192)
        for recipe, name, variables in SLICE:
            if self.left(60) < 20 or self._spent("slice") > self._options.slice_seconds:
                print(f"{recipe} {name}: not run, out of time")
                continue
            outcome = self.trial(recipe, name, {**fixed, **variables}, self.left(60))
            self.keep("slice", {"recipe": recipe, "variables": variables, **outcome.record()})
            print(row(outcome, flops, 1), flush=True)

    def _spent(self, part: str) -> float:
        return sum(float(one["seconds"]) for one in self._records.get(part, []))

    def adapter(self) -> None:
        """Bridge tunes, peft loads: the two eval losses."""
        folder = (self._options.out.parent / "adapter").resolve()
        variables = {**self.base, "LR": 3e-3, "SAVE_ADAPTER": str(folder)}
        outcome = self.trial("bridge", "adapter", variables, self.left(60))
        record: dict[str, Any] = {"bridge": outcome.evals[-1:], "failure": outcome.failure}
        if folder.exists():
            command = [sys.executable, "-m", "benchmarks.gpu.adapter_loss", "--base", str(self._options.base)]
            command += ["--adapter", str(folder), "--data", DATA, "--seq", "512", "--samples", "32"]
            own = {**os.environ, "PYTHONPATH": self._options.peft_path or os.environ.get("PYTHONPATH", "")}
            try:
                ended = subprocess.run(
                    command, env=own, capture_output=True, text=True, timeout=max(1.0, self.left(60)), check=False
                )
                record["peft"] = json.loads(ended.stdout.splitlines()[-1]) if ended.stdout else ended.stderr[-400:]
            except (subprocess.TimeoutExpired, ValueError) as error:
                record["peft"] = str(error)[:400]
        self.keep("adapter", record)
        print(f"adapter: {json.dumps(record)}", flush=True)
        # What v6.0 sets by default, on weights out of a Hugging Face folder.
        defaults: dict[str, object] = {
            **self.base,
            "LR": 3e-3,
            "FP8": 1,
            "FP8_DPA": 0,
            "USE_TE_OPS": 1,
            "FUSED_SINGLE_QKV_ROPE": 1,
        }
        for name, variables in {"fp8": {}, "fp8_plain": PLAIN, "bf16_te_ops": {"FP8": 0}}.items():
            outcome = self.trial("bridge", f"small_{name}", {**defaults, **variables}, self.left(40))
            self.keep("small", outcome.record())
            print(f"small {name}: {outcome.evals or outcome.failure}", flush=True)

    def compare(self) -> None:
        """The recipes run beside each other: only losses are asked for."""
        began = time.monotonic()
        with ProcessPoolExecutor(len(MODULES)) as pool:
            for seed, rate in itertools.product(SEEDS, RATES):
                if self.left(45) < 25 or time.monotonic() - began > self._options.compare_seconds:
                    print(f"seed {seed} LR {rate:g}: not run, out of time")
                    continue
                variables = {**self.base, "SEED": seed, "LR": rate}
                name = f"s{seed}_lr{rate:g}"
                futures = {r: pool.submit(self.trial, r, name, variables, self.left(45)) for r in MODULES}
                outcomes = {recipe: future.result() for recipe, future in futures.items()}
                said = {r: [loss for _, loss, _ in o.evals] or o.failure for r, o in outcomes.items()}
                self.keep("compare", {"seed": seed, "lr": rate, **said})
                print(f"seed {seed} LR {rate:g}: {json.dumps(said)}", flush=True)

    def whole(self) -> None:
        variables: dict[str, object] = {"LLAMA": "70b", "SEQ": 8192, "GLOBAL_BATCH_SIZE": 1, "MAX_STEPS": 100}
        variables |= {"VAL_CHECK_INTERVAL": 1, "EVAL_SAMPLES": 1, "WARMUP_TRAIN_STEPS": 1, "WARMUP_VALIDATION_STEPS": 1}
        variables |= {"PROBE": 1, "DATADIR": DATA, "NUM_WORKERS": 0, "RECOMPUTE_GRANULARITY": "full", **PLAIN}
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        if self.left(150) < 40:
            print("whole: not run, out of time")
            return
        outcome = self.trial("bridge", "whole", variables, self.left(150))
        self.keep("whole", {"variables": variables, **outcome.record()})
        print(row(outcome, SHAPES["70b"].step_flops(8192, 8192), 1), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="Hugging Face folder of a small Llama over bytes")
    parser.add_argument(
        "--workers", type=Path, default=Path("/nonexistent"), help="folder of bridge.sock, nemo.sock, ..."
    )
    for name in MODULES:
        parser.add_argument(f"--{name}-path", default="", help=f"PYTHONPATH of the {name} recipe")
    parser.add_argument("--parts", nargs="*", default=["slice", "adapter", "compare", "whole"])
    parser.add_argument("--slice-seconds", type=float, default=170.0)
    parser.add_argument("--compare-seconds", type=float, default=150.0)
    parser.add_argument("--total", type=float, default=440.0, help="seconds in all (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("bridge.json"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    for part in options.parts:
        print(f"== {part}, {bench.left(1e9):.0f} s left", flush=True)
        getattr(bench, part)()


if __name__ == "__main__":
    main()
