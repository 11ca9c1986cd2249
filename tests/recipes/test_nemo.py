"""The NeMo recipe on a CPU, through the test-only shim, served by one warm worker.

Needs NeMo's own environment: the interpreter in LORA_TUNE_NEMO_PYTHON, or .venv-nemo (``make test-all`` builds it).
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest

from lora_tune_recipes import packed_data
from tests.recipes.served import (
    TINY_SIZES,
    Served,
    Trial,
    assert_complies,
    full_length_log,
    per_sequence_mean,
    unequal_sequences,
)


@pytest.mark.parametrize(
    "layout",
    [{"TP": 2}, {"PP": 2}, {"CP": 2}, {"MINIBS": 2}, {"MBS": 2, "CP": 2}],
    ids=["TP=2", "PP=2", "CP=2", "DP=2", "CP=2 MBS=2"],
)
def test_a_layout_changes_nothing_but_speed(nemo: Served, nemo_alone: Trial, layout: dict[str, int]) -> None:
    trial = nemo(ranks=2, **layout)
    assert trial.codes == (0, 0), trial.output[-2000:]
    assert trial.losses == pytest.approx(nemo_alone.losses, abs=1e-4)


RECOMPUTED = [{"RECOMPUTE_METHOD": "block", "RECOMPUTE_NUM_LAYERS": 2}, {"RECOMPUTE_METHOD": "uniform", "MBS": 4}]


@pytest.mark.parametrize("method", RECOMPUTED, ids=["two layers", "all layers"])
def test_recomputed_layers_learn_as_the_others(nemo: Served, nemo_alone: Trial, method: dict[str, object]) -> None:
    """Behind frozen embeddings PyTorch's recomputation drops gradients where nobody asks for them."""
    trial = nemo(RECOMPUTE_GRANULARITY="full", **method)
    assert trial.losses == pytest.approx(nemo_alone.losses, abs=1e-4)


def test_the_run_is_as_long_as_its_schedule_and_says_so(nemo_alone: Trial) -> None:
    run = nemo_alone.run
    assert [e.samples for e in run.evals] == [16, 32]
    assert run.status == "aborted", "the target was never reached"
    assert len(run.throughput) == len(run.eval_seconds) == 2
    assert run.hyperparameters["global_batch_size"] == 4
    assert run.evals[1].loss < run.evals[0].loss


def test_a_seed_repeats_and_another_differs(nemo: Served, nemo_alone: Trial) -> None:
    assert nemo().losses == nemo_alone.losses
    assert nemo(SEED=2).losses != nemo_alone.losses


def test_warm_up_leaves_no_trace(nemo: Served) -> None:
    dropout = {"LORA_DROPOUT": 0.1}
    warm = nemo(WARMUP_TRAIN_STEPS=3, WARMUP_VALIDATION_STEPS=2, **dropout)
    assert warm.losses == nemo(WARMUP=0, **dropout).losses


def test_the_run_stops_at_its_target(nemo: Served, nemo_alone: Trial) -> None:
    trial = nemo(TARGET=nemo_alone.losses[0] + 1e-6)
    assert trial.run.status == "success"
    assert trial.losses == nemo_alone.losses[:1]


def test_a_probe_ends_after_one_warm_block(nemo: Served) -> None:
    run = nemo(PROBE=1, MAX_STEPS=100).run
    assert len(run.stated_throughput) == 2
    assert len(run.evals) == 1


def test_the_eval_loss_is_the_mean_of_per_sequence_means(nemo: Served, tmp_path: Path) -> None:
    """Against a computation by hand on the base model: sequences differ in how many of their tokens count."""
    unequal_sequences(tmp_path)
    trial = nemo(DATADIR=tmp_path, LR=1e-12, MAX_STEPS=1, VAL_CHECK_INTERVAL=1, EVAL_SAMPLES=0)
    assert trial.losses == pytest.approx([per_sequence_mean(tmp_path)], abs=1e-4), trial.output[-2000:]


@pytest.mark.parametrize("ruleset", ["5.0.0", "5.1.0", "6.1.0"])
def test_a_full_length_log_passes_the_compliance_checker(full_length: Path, ruleset: str) -> None:
    assert_complies(full_length, ruleset)


@pytest.fixture(scope="module")
def full_length(nemo: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_length_log(nemo, tmp_path_factory.mktemp("easy"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_nemo_folder_is_as_good_as_the_hugging_face_one(
    nemo: Served, nemo_alone: Trial, nemo_base: Path, ranks: int
) -> None:
    trial = nemo(ranks=ranks, TP=ranks, MODEL=nemo_base, **TINY_SIZES)
    assert trial.losses == pytest.approx(nemo_alone.losses, abs=1e-4), trial.output[-2000:]


def test_a_checkpoint_of_another_shape_is_refused(nemo: Served, nemo_base: Path) -> None:
    trial = nemo(MODEL=nemo_base, **{**TINY_SIZES, "LAYERS": 2})
    assert trial.codes == (2,)
    assert "linear_qkv.weight is (4, 384, 128)" in trial.message
    assert "(2, 384, 128)" in trial.message


def test_data_without_its_keys_is_refused(nemo: Served, tmp_path: Path) -> None:
    for split in packed_data.SPLITS:
        rows = packed_data.pack(np.arange(200) % 90, 64)
        del rows[1]["input_ids"]
        packed_data.write(tmp_path, split, rows)
    trial = nemo(DATADIR=tmp_path)
    assert trial.codes == (2,)
    assert "row 1 has no input_ids" in trial.message


def test_tokens_outside_the_vocabulary_are_refused(nemo: Served, tmp_path: Path) -> None:
    for split in packed_data.SPLITS:
        packed_data.write(tmp_path, split, packed_data.pack(np.arange(200) + 100, 64))
    trial = nemo(DATADIR=tmp_path)
    assert trial.codes == (2,)
    assert "allows 0 to 255" in trial.message


def test_what_needs_transformer_engine_is_refused_without_it(nemo: Served) -> None:
    trial = nemo(FP8=1)
    assert trial.codes == (3,)
    assert "Transformer Engine" in trial.message


def test_the_end_copies_no_model_to_host_memory(nemo: Served) -> None:
    trial = nemo(module="tests.recipes.nemo_inside", INSIDE="moves", TARGET=100)
    assert trial.run.status == "success"
    assert "copied to host memory" not in trial.output


@pytest.mark.parametrize("overlap", [0, 1])
def test_overlap_hides_no_transfer_behind_a_product_that_frozen_weights_lack(nemo: Served, overlap: int) -> None:
    trial = nemo(module="tests.recipes.nemo_inside", INSIDE="overlap", TP=2, SP=1, FP8=1, TP_COMM_OVERLAP=overlap)
    settings = dict(line.split() for line in trial.output.splitlines() if line.endswith(("True", "False")))
    wanted = {"bulk_wgrad": False, "bulk_dgrad": False, "overlap_rs_dgrad": True, "overlap_disable_qkv": True}
    assert settings == {name: str(value is bool(overlap)) for name, value in wanted.items()}


def test_a_log_names_the_benchmark_only_for_its_model(nemo: Served) -> None:
    said = nemo(TARGET=100, CONFIG_FILENAME="config_X.sh").run.hyperparameters
    assert said["submission_benchmark"] == "llama_lora"
    assert said["config_filename"] == "config_X.sh"
    assert said["lowest_numerical_precision_in_linear"] == "fp32"
    assert {said[f"{kind}_parallelism"] for kind in ("tensor", "pipeline", "context", "expert")} == {1}


def test_a_killed_rank_ends_the_other(nemo: Served) -> None:
    processes = nemo.start(ranks=2, MAX_STEPS=100000, VAL_CHECK_INTERVAL=384, MINIBS=2, DIST_TIMEOUT=30)
    while '"train_loss"' not in nemo.output():
        assert all(p.poll() is None for p in processes), nemo.output()[-2000:]
    processes[1].kill()
    trial = nemo.wait(processes)
    assert trial.codes[0] == 1
    assert trial.codes[1] == -signal.SIGKILL
    assert "rank 0: " in trial.message


def test_a_cancelled_trial_ends_at_once_and_leaves_nothing_on_its_node(nemo: Served) -> None:
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
