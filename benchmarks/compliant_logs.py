"""``python -m benchmarks.compliant_logs [--recipe NAME] [--runs N]``: our recipes' logs under the newest rules.

Each recipe trains N times (ten by default), each time with another seed, through MLPerf's schedule at GBS 8: a model
of four layers on text that is easy enough for the target, on the CPU (NeMo and Bridge through the tests' shim, in
environments of their own). The logs then lie in a folder as a submission's do, and ``score`` judges them. What is
trained is not the benchmark, and the logs name themselves open and research; what they show is that everything the
rules want printed is printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lora_tune.mlperf.submission import read_submission, sentences
from lora_tune_recipes import packed_data
from tests.recipes.served import Served, interpreter, served

SEQ = 32
EASY = b"for i in range(10):\n    print(i)\n"
RUNS = 10
CLOSED = {
    "BENCHMARK": "llama2_70b_lora", "SEQ": SEQ, "MINIBS": 8, "MBS": 8, "MAX_STEPS": 250, "LORA_DROPOUT": 0.1,
    "LOGGING_INTERVAL": 10, "EVAL_SAMPLES": 8, "CONFIG_FILENAME": "config_CPU_1x1x8xtp1pp1cp1.sh",
}  # fmt: skip
"""The variables of every run; the closed division's values stand where a recipe has them by itself."""

MEGATRON = {"LR": 4e-4, "TARGET": None, "VAL_CHECK_INTERVAL": None}
"""Target and schedule as the recipe takes them from the rules."""

RECIPES: dict[str, tuple[str, str, str, dict[str, object]]] = {
    "peft": ("", "lora_tune_recipes.peft_lora", "lora_tune_recipes.training",
             {"LR": 5e-3, "TARGET": 0.925, "VAL_CHECK_INTERVAL": 384}),
    "nemo": ("nemo", "tests.recipes.cpu_shim", "lora_tune_recipes.nemo.trial", MEGATRON),
    "bridge": ("bridge", "tests.recipes.bridge_shim", "lora_tune_recipes.bridge.trial",
               {**MEGATRON, "FP8": 0, "USE_TE_OPS": 0, "FUSED_SINGLE_QKV_ROPE": 0}),
}  # fmt: skip
"""Name -> its environment, the module that is its program, one that is imported ahead, and its own variables."""


def easy_text(folder: Path) -> Path:
    """Packed data, both splits the same few lines over and over."""
    tokens = np.frombuffer(EASY * 200, np.uint8).astype(int)
    for split in packed_data.SPLITS:
        packed_data.write(folder, split, packed_data.pack(tokens, SEQ))
    return folder


@contextmanager
def trials(recipe: str, folder: Path) -> Iterator[Served]:
    """The recipe, served by a warm worker of its environment."""
    environment, program, ahead, own = RECIPES[recipe]
    python = interpreter(environment) if environment else sys.executable
    with served(python, program, ahead, folder, **CLOSED, **own) as found:
        yield found


def write_logs(recipe: str, folder: Path, runs: int) -> list[Path]:
    """``result_0.txt`` and so on in ``folder``, one a seed. Raises RuntimeError where a run fails."""
    data, written = easy_text(folder / "data"), []
    with trials(recipe, folder) as trial:
        for seed in range(runs):
            ended = trial(DATADIR=data, SEED=seed + 1)
            if ended.codes != (0,):
                raise RuntimeError(f"{recipe}, seed {seed + 1}: ended with {ended.codes}: {ended.output[-2000:]}")
            written.append(folder / f"result_{seed}.txt")
            written[-1].write_text(ended.output, encoding="utf-8")
    return written


def main() -> int:
    """Make and judge the logs; returns 1 where one does not comply or two share a seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", action="append", choices=tuple(RECIPES), help="[all three]")
    parser.add_argument("--runs", type=int, default=RUNS)
    given = parser.parse_args()
    broken = 0
    for recipe in given.recipe or RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            write_logs(recipe, Path(folder), given.runs)
            found = read_submission(Path(folder))
        complying = sum(not f.complaints for f in found.files)
        broken += complying != given.runs or bool(found.seeds)
        print(f"{recipe}: {complying} of {given.runs} logs comply with {found.ruleset}, seeds: {found.seeds or 'ok'}")
        print("  " + "\n  ".join(sentences(found)), flush=True)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
