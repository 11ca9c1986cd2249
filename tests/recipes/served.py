"""Runs a recipe's trials in its own environment, served by one warm worker."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlperf_logging.compliance_checker import mlp_compliance

from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import RunLog
from lora_tune_recipes import packed_data, text
from lora_tune_recipes.megatron.processes import free_port
from lora_tune_recipes.worker_request import VARIABLE

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "lora_tune_recipes" / "tiny"
TINY_SIZES = {"LAYERS": 4, "HIDDEN": 128, "FFN": 344, "HEADS": 4, "KV_GROUPS": 4, "VOCAB": 256, "NORM_EPS": 1e-6}
CLIENT = (
    "import sys; from lora_tune_recipes.worker_request import submit_to_worker; sys.exit(submit_to_worker(sys.argv[1]))"
)
BOUND = 300.0
"""Seconds: a trial takes 2 to 8, on a machine that does nothing else."""
SHORT = {"MAX_STEPS": 8, "VAL_CHECK_INTERVAL": 16, "MINIBS": 4, "SEQ": 64, "EVAL_SAMPLES": 9, "LR": 1e-2}
FIXED = {"NUM_WORKERS": 0, "LORA_DROPOUT": 0, "LOGGING_INTERVAL": 2, "WARMUP_TRAIN_STEPS": 1, "TARGET": 0}
WITHOUT_TE = {"FP8": 0, "USE_TE_OPS": 0, "FUSED_SINGLE_QKV_ROPE": 0}
"""What a Bridge trial needs beside them on a CPU."""
PER_PROCESS = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
"""Compiling small kernels takes longer than all of these trials."""


@dataclass(frozen=True)
class Trial:
    """How one trial ended: exit codes by rank, what it printed, and what the log says."""

    codes: tuple[int, ...]
    output: str

    @property
    def run(self) -> RunLog:
        reader = MllogReader()
        reader.feed(self.output.encode())
        return reader.run()

    @property
    def losses(self) -> list[float]:
        return [e.loss for e in self.run.evals]

    @property
    def message(self) -> str:
        """The one line that says what went wrong."""
        (line,) = [line for line in self.output.splitlines() if re.match(r"\w+_lora: ", line)]
        return line


class Served:
    """Runs trials of ``recipe``, a module with ``main``, through the worker on ``socket``. fixed: variables of all."""

    def __init__(self, recipe: str, socket: Path, folder: Path, fixed: dict[str, object]) -> None:
        self._recipe, self.socket, self._folder, self._fixed = recipe, socket, folder, fixed

    def start(self, ranks: int = 1, module: str | None = None, **knobs: object) -> list[subprocess.Popen[str]]:
        """The processes of one trial; all write to one log."""
        values = {"MODEL": TINY, "DATADIR": TINY, **FIXED, **SHORT, **self._fixed, **knobs}
        own = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": free_port(), "MASTER_ADDR": "127.0.0.1"}
        keep = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "TMPDIR")}
        common = {**keep, **{k: str(v) for k, v in {**values, **own}.items() if v is not None}, **PER_PROCESS}
        common |= {VARIABLE: str(self.socket), "TORCHELASTIC_RUN_ID": f"test-{own['MASTER_PORT']}"}
        common |= {"CUDA_VISIBLE_DEVICES": ""}
        with (self._folder / "log").open("w") as log:
            return [
                subprocess.Popen(
                    [sys.executable, "-c", CLIENT, module or self._recipe],
                    env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    cwd=self._folder,
                    stdout=log,
                    stderr=log,
                    text=True,
                )
                for rank in range(ranks)
            ]

    def output(self) -> str:
        return (self._folder / "log").read_text()

    def wait(self, processes: list[subprocess.Popen[str]]) -> Trial:
        try:
            codes = tuple(process.wait(BOUND) for process in processes)
        finally:
            for process in processes:
                process.kill()
        return Trial(codes, self.output())

    def __call__(self, ranks: int = 1, module: str | None = None, **knobs: object) -> Trial:
        return self.wait(self.start(ranks, module, **knobs))


def interpreter(name: str) -> str:
    """The Python of the environment ``name`` (nemo, bridge); skips the test where there is none."""
    variable = f"LORA_TUNE_{name.upper()}_PYTHON"
    python = os.environ.get(variable) or str(REPOSITORY / f".venv-{name}" / "bin" / "python")
    if not Path(python).exists():
        pytest.skip(f"{name}'s environment is not there ({python}); make test-all builds it, {variable} names one")
    return python


@contextlib.contextmanager
def warm_worker(python: str, socket: Path, modules: Sequence[str]) -> Iterator[None]:
    """A worker at ``socket`` that has imported ``modules``, until the block ends."""
    worker = subprocess.Popen(
        [python, "-m", "lora_tune_recipes.warm_worker", "--socket", str(socket), *modules],
        env={**os.environ, **PER_PROCESS},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert worker.stdout
    try:
        assert "ready" in next((line for line in worker.stdout if "warm worker" in line), ""), "the imports failed"
        yield
    finally:
        worker.terminate()
        worker.wait(BOUND)


@contextlib.contextmanager
def served(python: str, recipe: str, trial: str, folder: Path, **fixed: object) -> Iterator[Served]:
    """Runs ``recipe``'s trials in a worker in ``folder`` that has imported it and ``trial``, until the block ends."""
    socket = folder / "worker.sock"
    with warm_worker(python, socket, [recipe, trial]):
        yield Served(recipe, socket, folder, fixed)


def per_sequence_mean(folder: Path, model: Any = None, *, samples: int = 0) -> float:
    """The loss of ``model``, or of the shipped base, on ``folder``'s validation data, by MLPerf's definition.

    samples: so many of the sequences, evenly spaced; 0 for all.
    """
    import torch
    from transformers import LlamaForCausalLM

    sequences = text.load(folder, "validation", 64, text.byte_tokens)
    sequences = sequences.spread(samples) if samples else sequences
    model = model or LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model.eval()
    tokens = torch.from_numpy(sequences.tokens)
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits.double()
    nats = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].numpy()
    return float(np.mean([row[mask].mean() for row, mask in zip(nats, sequences.mask, strict=True)]))


def unequal_sequences(folder: Path) -> None:
    """Packed data of 64 tokens in ``folder``, of whose sequences each counts another number of its tokens."""
    rows = packed_data.pack(np.frombuffer(b"def f(x):\n    return x + 1\n" * 40, np.uint8).astype(int), 64)
    for i, row in enumerate(rows):
        row["loss_mask"] = [int(j >= 60 - 9 * (i % 7)) for j in range(65)]
        row["input_ids"] = (np.roll(row["input_ids"], i)).tolist()
    for split in packed_data.SPLITS:
        packed_data.write(folder, split, rows)


def full_length_log(serve: Served, folder: Path) -> Path:
    """The log of a closed-division run at GBS 8 by MLPerf's own schedule, on text easy enough for the target."""
    easy = np.frombuffer(b"for i in range(10):\n    print(i)\n" * 200, np.uint8).astype(int)
    for split in packed_data.SPLITS:
        packed_data.write(folder, split, packed_data.pack(easy, 32))
    closed = {"BENCHMARK": "llama2_70b_lora", "LORA_DROPOUT": 0.1, "TARGET": None, "VAL_CHECK_INTERVAL": None}
    sizes = {"SEQ": 32, "MINIBS": 8, "MBS": 8, "MAX_STEPS": 250, "LR": 4e-4, "EVAL_SAMPLES": 8}
    trial = serve(DATADIR=folder, LOGGING_INTERVAL=10, **sizes, **closed)
    assert trial.codes == (0,), trial.output[-2000:]
    assert trial.run.status == "success", trial.output[-2000:]
    assert trial.run.evals[0].samples == 1536, "the rule leaves three evaluations out at GBS 8"
    (folder / "result_0.txt").write_text(trial.output)
    return folder / "result_0.txt"


def assert_complies(log: Path, ruleset: str) -> None:
    """MLPerf's compliance checker accepts the log."""
    checker = mlp_compliance.make_checker("training", ruleset, False, True)
    valid, _, _, _ = mlp_compliance.main(str(log), f"training_{ruleset}/common.yaml", checker)
    assert valid, log.read_text()
