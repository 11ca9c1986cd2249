"""The NeMo recipe on a CPU, through the test-only shim, served by one warm worker.

Needs NeMo's own environment: the interpreter in LORA_TUNE_NEMO_PYTHON, or .venv-nemo (``make test`` builds it).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from mlperf_logging.compliance_checker import mlp_compliance

from lora_tune.logs.mllog import MllogReader, RunLog
from lora_tune.recipes import packed_data, text
from lora_tune.recipes.nemo.processes import free_port
from lora_tune.recipes.warm_worker import VARIABLE

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "lora_tune" / "recipes" / "tiny"
TINY_SIZES = {"LAYERS": 4, "HIDDEN": 128, "FFN": 344, "HEADS": 4, "KV_GROUPS": 4, "VOCAB": 256, "NORM_EPS": 1e-6}
CLIENT = "import sys; from lora_tune.recipes.warm_worker import hand_over; sys.exit(hand_over(sys.argv[1]))"
RECIPE = "tests.recipes.cpu_shim"
BOUND = 300.0
"""Seconds: a trial takes 2 to 8, on a machine that does nothing else."""
SHORT = {"MAX_STEPS": 8, "VAL_CHECK_INTERVAL": 16, "MINIBS": 4, "SEQ": 64, "EVAL_SAMPLES": 9, "LR": 1e-2}
FIXED = {"NUM_WORKERS": 0, "LORA_DROPOUT": 0, "LOGGING_INTERVAL": 2, "WARMUP_TRAIN_STEPS": 1, "TARGET": 0}


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
        (line,) = [line for line in self.output.splitlines() if line.startswith("nemo_lora: ")]
        return line


class Nemo:
    """Runs trials in NeMo's environment."""

    def __init__(self, python: str, socket: Path, folder: Path) -> None:
        self._python, self._socket, self._folder = python, socket, folder

    def start(self, ranks: int = 1, module: str = RECIPE, **knobs: object) -> list[subprocess.Popen[str]]:
        """The processes of one trial; all write to one log."""
        values = {"MODEL": TINY, "DATADIR": TINY, **FIXED, **SHORT, **knobs}
        own = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": free_port(), "MASTER_ADDR": "127.0.0.1"}
        keep = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "TMPDIR")}
        common = {**keep, **{k: str(v) for k, v in {**values, **own}.items() if v is not None}}
        common |= {VARIABLE: str(self._socket), "TORCHELASTIC_RUN_ID": f"test-{own['MASTER_PORT']}"}
        common |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
        common |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        with (self._folder / "log").open("w") as log:
            return [
                subprocess.Popen(
                    [sys.executable, "-c", CLIENT, module],
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

    def __call__(self, ranks: int = 1, module: str = RECIPE, **knobs: object) -> Trial:
        return self.wait(self.start(ranks, module, **knobs))


@pytest.fixture(scope="module")
def nemo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nemo]:
    python = os.environ.get("LORA_TUNE_NEMO_PYTHON") or str(REPOSITORY / ".venv-nemo" / "bin" / "python")
    if not Path(python).exists():
        pytest.skip(f"NeMo's environment is not there ({python}); make test builds it, LORA_TUNE_NEMO_PYTHON names one")
    folder = tmp_path_factory.mktemp("nemo")
    socket = folder / "worker.sock"
    # Compiling small kernels takes longer than all of these trials.
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    worker = subprocess.Popen(
        [
            python,
            "-m",
            "lora_tune.recipes.warm_worker",
            "--socket",
            str(socket),
            RECIPE,
            "lora_tune.recipes.nemo.trial",
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert worker.stdout
    try:
        assert "ready" in next((line for line in worker.stdout if "warm worker" in line), ""), "the imports failed"
        yield Nemo(python, socket, folder)
    finally:
        worker.terminate()
        worker.wait(BOUND)


@pytest.fixture(scope="module")
def alone(nemo: Nemo) -> Trial:
    """The reference: one process."""
    trial = nemo()
    assert trial.codes == (0,), trial.output[-2000:]
    return trial


@pytest.mark.parametrize(
    "layout", [{"TP": 2}, {"CP": 2}, {"MINIBS": 2}, {"MBS": 2, "CP": 2}], ids=["TP=2", "CP=2", "DP=2", "CP=2 MBS=2"]
)
def test_a_layout_changes_nothing_but_speed(nemo: Nemo, alone: Trial, layout: dict[str, int]) -> None:
    trial = nemo(ranks=2, **layout)
    assert trial.codes == (0, 0), trial.output[-2000:]
    assert trial.losses == pytest.approx(alone.losses, abs=2e-5)


RECOMPUTED = [{"RECOMPUTE_METHOD": "block", "RECOMPUTE_NUM_LAYERS": 2}, {"RECOMPUTE_METHOD": "uniform", "MBS": 4}]


@pytest.mark.parametrize("method", RECOMPUTED, ids=["two layers", "all layers"])
def test_recomputed_layers_learn_as_the_others(nemo: Nemo, alone: Trial, method: dict[str, object]) -> None:
    """Behind frozen embeddings PyTorch's recomputation drops gradients where nobody asks for them."""
    trial = nemo(RECOMPUTE_GRANULARITY="full", **method)
    assert trial.losses == pytest.approx(alone.losses, abs=2e-5)


def test_a_pipeline_learns(nemo: Nemo, alone: Trial) -> None:
    """Adapters start from other random numbers on the second stage, so the losses are like the others, not the same."""
    trial = nemo(ranks=2, PP=2)
    assert trial.codes == (0, 0), trial.output[-2000:]
    assert trial.losses == pytest.approx(alone.losses, abs=0.05)
    assert trial.losses[-1] < trial.losses[0]


def test_the_run_is_as_long_as_its_schedule_and_says_so(alone: Trial) -> None:
    run = alone.run
    assert [e.samples for e in run.evals] == [16, 32]
    assert run.status == "aborted", "the target was never reached"
    assert len(run.throughput) == len(run.eval_seconds) == 2
    assert run.hyperparameters["global_batch_size"] == 4
    assert run.evals[1].loss < run.evals[0].loss


def test_a_seed_repeats_and_another_differs(nemo: Nemo, alone: Trial) -> None:
    assert nemo().losses == alone.losses
    assert nemo(SEED=2).losses != alone.losses


def test_warm_up_leaves_no_trace(nemo: Nemo) -> None:
    dropout = {"LORA_DROPOUT": 0.1}
    warm = nemo(WARMUP_TRAIN_STEPS=3, WARMUP_VALIDATION_STEPS=2, **dropout)
    assert warm.losses == nemo(WARMUP=0, **dropout).losses


def test_the_run_stops_at_its_target(nemo: Nemo, alone: Trial) -> None:
    trial = nemo(TARGET=alone.losses[0] + 1e-6)
    assert trial.run.status == "success"
    assert trial.losses == alone.losses[:1]


def test_a_probe_ends_after_one_warm_block(nemo: Nemo) -> None:
    run = nemo(PROBE=1, MAX_STEPS=100).run
    assert len(run.stated_throughput) == 2
    assert len(run.evals) == 1


def test_the_eval_loss_is_the_mean_of_per_sequence_means(nemo: Nemo, tmp_path: Path) -> None:
    """Against a computation by hand on the base model: sequences differ in how many of their tokens count."""
    rows = packed_data.pack(np.frombuffer(b"def f(x):\n    return x + 1\n" * 40, np.uint8).astype(int), 64)
    for i, row in enumerate(rows):
        row["loss_mask"] = [int(j >= 60 - 9 * (i % 7)) for j in range(65)]
        row["input_ids"] = (np.roll(row["input_ids"], i)).tolist()
    for split in packed_data.SPLITS:
        packed_data.write(tmp_path, split, rows)
    trial = nemo(DATADIR=tmp_path, LR=1e-12, MAX_STEPS=1, VAL_CHECK_INTERVAL=1, EVAL_SAMPLES=0)
    assert trial.losses == pytest.approx([per_sequence_mean(tmp_path)], abs=1e-4), trial.output[-2000:]


def per_sequence_mean(folder: Path) -> float:
    """The loss of the shipped base on ``folder``'s validation data, in float64 and by MLPerf's definition."""
    import torch
    from transformers import LlamaForCausalLM

    sequences = text.load(folder, "validation", 64, text.byte_tokens)
    model = LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    tokens = torch.from_numpy(sequences.tokens)
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits.double()
    nats = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].numpy()
    return float(np.mean([row[mask].mean() for row, mask in zip(nats, sequences.mask, strict=True)]))


@pytest.mark.parametrize("ruleset", ["5.0.0", "5.1.0"])
def test_a_full_length_log_passes_the_compliance_checker(full_length: Path, ruleset: str) -> None:
    checker = mlp_compliance.make_checker("training", ruleset, False, True)
    valid, _, _, _ = mlp_compliance.main(str(full_length), f"training_{ruleset}/common.yaml", checker)
    assert valid, full_length.read_text()


@pytest.fixture(scope="module")
def full_length(nemo: Nemo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed-division run at GBS 8 by MLPerf's own schedule, on text that is easy enough for the target."""
    folder = tmp_path_factory.mktemp("easy")
    easy = np.frombuffer(b"for i in range(10):\n    print(i)\n" * 200, np.uint8).astype(int)
    for split in packed_data.SPLITS:
        packed_data.write(folder, split, packed_data.pack(easy, 32))
    closed = {
        "BENCHMARK": "llama2_70b_lora",
        "LORA_DROPOUT": 0.1,
        "TARGET": None,
        "VAL_CHECK_INTERVAL": None,
        "LR": 4e-4,
        "EVAL_SAMPLES": 8,
    }
    trial = nemo(DATADIR=folder, SEQ=32, MINIBS=8, MBS=8, MAX_STEPS=250, LOGGING_INTERVAL=10, **closed)
    assert trial.codes == (0,), trial.output[-2000:]
    run = trial.run
    assert run.evals[0].samples == 1536, "the rule leaves three evaluations out at GBS 8"
    assert run.status == "success"
    (folder / "result_0.txt").write_text(trial.output)
    return folder / "result_0.txt"


@pytest.fixture(scope="module")
def folder_of_base(nemo: Nemo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped base as a NeMo checkpoint folder."""
    folder = tmp_path_factory.mktemp("base") / "model"
    trial = nemo(module="tests.recipes.nemo_folder", SAVE_TO=folder)
    assert (folder / "weights" / ".metadata").exists(), trial.output[-2000:]
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_nemo_folder_is_as_good_as_the_hugging_face_one(
    nemo: Nemo, alone: Trial, folder_of_base: Path, ranks: int
) -> None:
    trial = nemo(ranks=ranks, TP=ranks, MODEL=folder_of_base, **TINY_SIZES)
    assert trial.losses == pytest.approx(alone.losses, abs=2e-5), trial.output[-2000:]


def test_a_checkpoint_of_another_shape_is_refused(nemo: Nemo, folder_of_base: Path) -> None:
    trial = nemo(MODEL=folder_of_base, **{**TINY_SIZES, "LAYERS": 2})
    assert trial.codes == (2,)
    assert "linear_qkv.weight is (4, 384, 128)" in trial.message
    assert "(2, 384, 128)" in trial.message


def test_data_without_its_keys_is_refused(nemo: Nemo, tmp_path: Path) -> None:
    for split in packed_data.SPLITS:
        rows = packed_data.pack(np.arange(200) % 90, 64)
        del rows[1]["input_ids"]
        packed_data.write(tmp_path, split, rows)
    trial = nemo(DATADIR=tmp_path)
    assert trial.codes == (2,)
    assert "row 1 has no input_ids" in trial.message


def test_tokens_outside_the_vocabulary_are_refused(nemo: Nemo, tmp_path: Path) -> None:
    for split in packed_data.SPLITS:
        packed_data.write(tmp_path, split, packed_data.pack(np.arange(200) + 100, 64))
    trial = nemo(DATADIR=tmp_path)
    assert trial.codes == (2,)
    assert "allows 0 to 255" in trial.message


def test_what_needs_transformer_engine_is_refused_without_it(nemo: Nemo) -> None:
    trial = nemo(FP8=1)
    assert trial.codes == (3,)
    assert "Transformer Engine" in trial.message


def test_the_end_copies_no_model_to_host_memory(nemo: Nemo) -> None:
    trial = nemo(module="tests.recipes.nemo_inside", INSIDE="moves", TARGET=100)
    assert trial.run.status == "success"
    assert "copied to host memory" not in trial.output


@pytest.mark.parametrize("overlap", [0, 1])
def test_overlap_hides_no_transfer_behind_a_product_that_frozen_weights_lack(nemo: Nemo, overlap: int) -> None:
    trial = nemo(module="tests.recipes.nemo_inside", INSIDE="overlap", TP=2, SP=1, FP8=1, TP_COMM_OVERLAP=overlap)
    settings = dict(line.split() for line in trial.output.splitlines() if line.endswith(("True", "False")))
    wanted = {"bulk_wgrad": False, "bulk_dgrad": False, "overlap_rs_dgrad": True, "overlap_disable_qkv": True}
    assert settings == {name: str(value is bool(overlap)) for name, value in wanted.items()}


def test_a_log_names_the_benchmark_only_for_its_model(nemo: Nemo) -> None:
    said = nemo(TARGET=100, CONFIG_FILENAME="config_X.sh").run.hyperparameters
    assert said["submission_benchmark"] == "llama_lora"
    assert said["config_filename"] == "config_X.sh"
    assert said["lowest_numerical_precision_in_linear"] == "fp32"
    assert {said[f"{kind}_parallelism"] for kind in ("tensor", "pipeline", "context", "expert")} == {1}


def test_a_killed_rank_ends_the_other(nemo: Nemo) -> None:
    processes = nemo.start(ranks=2, MAX_STEPS=100000, VAL_CHECK_INTERVAL=384, MINIBS=2, DIST_TIMEOUT=30)
    while '"train_loss"' not in nemo.output():
        assert all(p.poll() is None for p in processes), nemo.output()[-2000:]
    processes[1].kill()
    trial = nemo.wait(processes)
    assert trial.codes[0] == 1
    assert trial.codes[1] == -signal.SIGKILL
    assert "rank 0: " in trial.message


def test_a_cancelled_trial_ends_at_once_and_leaves_nothing_on_its_node(nemo: Nemo) -> None:
    def left() -> set[Path]:
        return set(Path(tempfile.gettempdir()).glob("nemo-*"))

    before = left()
    (process,) = nemo.start(MAX_STEPS=100000, VAL_CHECK_INTERVAL=384)
    while '"train_loss"' not in nemo.output():
        assert process.poll() is None, nemo.output()[-2000:]
    assert left() > before
    process.terminate()
    assert nemo.wait([process]).codes == (128 + signal.SIGTERM,)
    assert left() == before
