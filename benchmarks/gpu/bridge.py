"""Megatron-Bridge beside NeMo and PEFT on one GPU: ``python -m benchmarks.gpu.bridge --base FOLDER``.

Parts, in order: ``slice``, speed and memory of 8 of the 70B's 80 layers; ``adapter``, an adapter tuned by Bridge and
evaluated by peft; ``compare``, eval losses of the three recipes from one base, at equal seeds and learning rates;
``small``, the loss of a small Llama under each switch; ``switches``, the slice under switches that few need;
``full``, a log of a whole closed-division run, judged by MLPerf's compliance checker; ``whole``, the 70B shape with FP8
weights on this one GPU. Random weights in ``slice``, ``switches`` and ``whole``: nothing converges there. Every part is
bounded, ``--total`` seconds end it all, and what is known by then is in ``--out``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from mlperf_logging.compliance_checker import mlp_compliance

from benchmarks.gpu.probes import row
from benchmarks.gpu.trials import Outcome, run_trial
from lora_tune_recipes import packed_data
from lora_tune_recipes.megatron.shapes import SHAPES

MODULES = {name: f"lora_tune_recipes.{name}_lora" for name in ("bridge", "nemo", "peft")}
DATA = "lora_tune_recipes/tiny"
PLAIN: dict[str, object] = {"USE_TE_OPS": 0, "FUSED_SINGLE_QKV_ROPE": 0}
BF16: dict[str, object] = {"FP8": 0, **PLAIN}
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
SWITCHES: list[tuple[str, str, dict[str, object]]] = [
    ("bridge", "defaults", {}),
    ("bridge", "blockwise", {"FP8_RECIPE": "blockwise", "FP8_DPA": 0, **PLAIN}),
    ("bridge", "tensorwise", {"FP8_RECIPE": "tensorwise", "FP8_DPA": 0, **PLAIN}),
    ("bridge", "act", {"FP8_ACT": 1}),
    ("bridge", "offload4", {"CPU_OFFLOADING": 1, "CPU_OFFLOADING_NUM_LAYERS": 4, **PLAIN}),
    ("bridge", "recompute8", {"RECOMPUTE_GRANULARITY": "full", "RECOMPUTE_METHOD": "block", "RECOMPUTE_NUM_LAYERS": 8}),
    ("bridge", "native_loss", {"CROSS_ENTROPY_LOSS_FUSION_IMPL": "native"}),
]
"""The same, of switches that are tried once."""
NO_DPA: dict[str, object] = {"FP8": 1, "FP8_DPA": 0}
SMALL: dict[str, dict[str, object]] = {
    "bf16": {},
    "bf16_again": {},
    "bf16_te_ops": {"USE_TE_OPS": 1, "FUSED_SINGLE_QKV_ROPE": 1},
    "bf16_graph": {"MCORE_CUDA_GRAPH": 1},
    "bf16_recompute": {"RECOMPUTE_GRANULARITY": "full", "RECOMPUTE_METHOD": "block", "RECOMPUTE_NUM_LAYERS": 2},
    "bf16_offload": {"CPU_OFFLOADING": 1, "CPU_OFFLOADING_NUM_LAYERS": 2},
    "bf16_one_at_a_time": {"VAL_MBS": 1},
    "bf16_native_loss": {"CROSS_ENTROPY_LOSS_FUSION_IMPL": "native"},
    "fp8_plain": NO_DPA,
    "fp8_te_ops": {**NO_DPA, "USE_TE_OPS": 1, "FUSED_SINGLE_QKV_ROPE": 1},
    "fp8_bf16_weights": {**NO_DPA, "FP8_PARAMS": 0},
    "fp8_act": {**NO_DPA, "FP8_ACT": 1},
    "fp8_graph": {**NO_DPA, "MCORE_CUDA_GRAPH": 1},
    "fp8_tensorwise": {**NO_DPA, "FP8_RECIPE": "tensorwise"},
    "fp8_blockwise": {**NO_DPA, "FP8_RECIPE": "blockwise"},
}
"""Variables of a small trial beside ``BF16``; the learning rate and the seed are the same in all."""
CLOSED: dict[str, object] = {
    "BENCHMARK": "llama2_70b_lora",
    "LORA_DROPOUT": 0.1,
    "TARGET": 0.925,
    "MINIBS": 8,
    "MBS": 8,
    "LR": 4e-4,
    "MAX_STEPS": 400,
    "LOGGING_INTERVAL": 10,
    "VAL_MBS": 8,
}
"""A run that MLPerf's checker takes for one of the benchmark; its model and data are not the benchmark's."""
RULESETS = ("6.0.0", "6.1.0")
RATES, SEEDS = (1e-3, 3e-3, 6e-3, 1e-2), (1, 2, 3, 4, 5)


def small_trial(base: Path) -> dict[str, object]:
    """Variables of a trial of the small Llama in ``base`` that ends after 60 steps and three evaluations."""
    return {
        "MODEL": str(base),
        "DATADIR": DATA,
        "SEQ": 512,
        "MINIBS": 8,
        "MBS": 8,
        "TARGET": 0.01,
        "NUM_WORKERS": 0,
        "LORA_DROPOUT": 0,
        "WARMUP_TRAIN_STEPS": 2,
        "WARMUP_VALIDATION_STEPS": 1,
        "MAX_STEPS": 60,
        "VAL_CHECK_INTERVAL": 160,
        "EVAL_SAMPLES": 32,
        "LORA_TARGETS": "attention",
        "LORA_RANK": 16,
        "LORA_ALPHA": 32,
        "WEIGHT_DECAY": 1e-4,
        "GRADIENT_CLIP_VAL": 0.3,
        "WARMUP_STEPS": 5,
    }


def worker_of(folder: Path, recipe: str, lane: int) -> dict[str, str]:
    """The variable that names a warm worker: one of ``RECIPE_*.sock`` by turns, else ``RECIPE.sock``, else none."""
    sockets = sorted(folder.glob(f"{recipe}_*.sock")) or sorted(folder.glob(f"{recipe}.sock"))
    return {"LORA_TUNE_WORKER": str(sockets[lane % len(sockets)])} if sockets else {}


class Bench:
    """Runs the parts, and keeps the records in one file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._end: float = time.monotonic() + options.total
        self._records: dict[str, Any] = {}
        self.base = small_trial(options.base)

    def left(self, most: float) -> float:
        """Seconds that something may take which should take ``most`` at most."""
        return min(most, self._end - time.monotonic())

    def keep(self, part: str, record: Any) -> None:
        self._records.setdefault(part, []).append(record)
        self._options.out.write_text(json.dumps(self._records, indent=1) + "\n")

    def trial(self, recipe: str, name: str, variables: dict[str, object], limit: float, lane: int = 0) -> Outcome:
        """One trial in its recipe's environment. lane: which of its workers serves it: on one GPU each serves one."""
        own = {"PYTHONPATH": getattr(self._options, f"{recipe}_path") or os.environ.get("PYTHONPATH", "")}
        own |= worker_of(self._options.workers, recipe, lane)
        if self._options.gpu:
            own["CUDA_VISIBLE_DEVICES"] = self._options.gpu
        low = BF16 if recipe == "bridge" else {}
        return run_trial(
            f"{recipe}_{name}",
            {**({} if "LLAMA" in variables else low), **own, **variables},
            module=MODULES[recipe],
            limit=limit,
            folder=self._options.out.parent / "logs",
        )

    def slice(self) -> None:
        self._slices("slice", SLICE)

    def switches(self) -> None:
        self._slices("switches", SWITCHES)

    def _slices(self, part: str, variants: list[tuple[str, str, dict[str, object]]]) -> None:
        fixed: dict[str, object] = {"LLAMA": "70b_slice8", "SEQ": 8192, "GLOBAL_BATCH_SIZE": 2, "MAX_STEPS": 100}
        fixed |= {"VAL_CHECK_INTERVAL": 8, "EVAL_SAMPLES": 2, "WARMUP_TRAIN_STEPS": 2, "WARMUP_VALIDATION_STEPS": 1}
        fixed |= {"PROBE": 1, "DATADIR": DATA, "DIST_TIMEOUT": 60, "NUM_WORKERS": 2}
        flops = SHAPES["70b_slice8"].step_flops(8192, 8192)
        for recipe, name, variables in variants:
            if self.left(60) < 20 or self._spent(part) > self._options.slice_seconds:
                print(f"{recipe} {name}: not run, out of time")
                continue
            outcome = self.trial(recipe, name, {**fixed, **variables}, self.left(60))
            self.keep(part, {"recipe": recipe, "variables": variables, **outcome.record()})
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

    def small(self) -> None:
        """The small Llama at one learning rate and seed under each switch, some trials beside each other."""
        for name, outcome in self._together(
            {name: ("bridge", {**self.base, "LR": 3e-3, **v}) for name, v in SMALL.items()}
        ):
            self.keep("small", {"variables": SMALL[name], **outcome.record()})
            print(f"small {name}: {[loss for _, loss, _ in outcome.evals] or outcome.failure}", flush=True)

    def _together(self, trials: dict[str, tuple[str, dict[str, object]]]) -> Iterator[tuple[str, Outcome]]:
        """Trials beside each other, ``--beside`` at a time, in their order: only losses are asked for."""
        with ProcessPoolExecutor(self._options.beside) as pool:
            lanes = {recipe: itertools.count() for recipe in MODULES}
            futures = {
                name: pool.submit(self.bounded, recipe, name, v, next(lanes[recipe]))
                for name, (recipe, v) in trials.items()
            }
            for name, future in futures.items():
                yield name, future.result()

    def bounded(self, recipe: str, name: str, variables: dict[str, object], lane: int = 0) -> Outcome:
        """One trial where there is time for it, as a process of a pool runs it; it may wait for its worker."""
        return self.trial(recipe, name, variables, max(1.0, self.left(240)), lane)

    def full(self) -> None:
        """A whole run by MLPerf's schedule, on text that is easy enough for the target, and what the checker says."""
        folder = self._options.out.parent / "easy"
        folder.mkdir(exist_ok=True)
        easy = np.frombuffer(b"for i in range(10):\n    print(i)\n" * 3000, np.uint8).astype(int)
        for split in packed_data.SPLITS:
            packed_data.write(folder, split, packed_data.pack(easy, 512))
        variants: dict[str, dict[str, object]] = {
            "bf16": {},
            "fp8": {**NO_DPA, "USE_TE_OPS": 1, "FUSED_SINGLE_QKV_ROPE": 1},
        }
        for name, variables in variants.items():
            own = {key: value for key, value in self.base.items() if key not in ("VAL_CHECK_INTERVAL", "WARMUP_STEPS")}
            outcome = self.bounded(
                "bridge", f"full_{name}", {**own, **CLOSED, "DATADIR": folder.resolve(), **variables}
            )
            log = self._options.out.parent / f"result_{name}.txt"
            shutil.copyfile(self._options.out.parent / "logs" / f"bridge_full_{name}.log", log)
            verdicts = {ruleset: complies(log, ruleset) for ruleset in RULESETS}
            self.keep("full", {"variables": variables, "complies": verdicts, **outcome.record()})
            print(f"full {name}: {verdicts} {outcome.evals or outcome.failure}", flush=True)

    def compare(self) -> None:
        """Losses of the recipes at the same seed and learning rate."""
        pairs = {f"s{seed}_lr{rate:g}": (seed, rate) for seed, rate in itertools.product(SEEDS, RATES)}
        at_once: dict[str, dict[str, object]] = {"bridge": {"VAL_MBS": 8}}
        trials = {
            f"{name}_{recipe}": (recipe, {**self.base, "SEED": seed, "LR": rate, **at_once.get(recipe, {})})
            for name, (seed, rate) in pairs.items()
            for recipe in MODULES
        }
        said: dict[str, Any] = {}
        for name, outcome in self._together(trials):
            said[name] = [loss for _, loss, _ in outcome.evals] or outcome.failure
            pair, _, recipe = name.rpartition("_")
            if recipe == list(MODULES)[-1]:
                seed, rate = pairs[pair]
                losses = {one: said[f"{pair}_{one}"] for one in MODULES}
                self.keep("compare", {"seed": seed, "lr": rate, **losses})
                print(f"seed {seed} LR {rate:g}: {json.dumps(losses)}", flush=True)

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


def complies(log: Path, ruleset: str) -> bool:
    """Whether MLPerf's compliance checker passes a log under the rules of a round."""
    checker = mlp_compliance.make_checker("training", ruleset, False, True)
    return bool(mlp_compliance.main(str(log), f"training_{ruleset}/common.yaml", checker)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="Hugging Face folder of a small Llama over bytes")
    parser.add_argument(
        "--workers", type=Path, default=Path("/nonexistent"), help="folder of bridge.sock, nemo.sock, ..."
    )
    for name in MODULES:
        parser.add_argument(f"--{name}-path", default="", help=f"PYTHONPATH of the {name} recipe")
    parser.add_argument("--parts", nargs="*", default=["slice", "adapter", "compare", "small", "switches", "full"])
    parser.add_argument("--slice-seconds", type=float, default=170.0)
    parser.add_argument("--gpu", default="", help="number of the GPU to use, where the host has several")
    parser.add_argument(
        "--beside", type=int, default=24, help="trials at once where losses are asked (default %(default)s)"
    )
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
