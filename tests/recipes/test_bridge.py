"""The Megatron-Bridge recipe on a CPU, through the test-only shim, served by one warm worker.

Needs its own environment: the interpreter in LORA_TUNE_BRIDGE_PYTHON, or .venv-bridge (``make test-all`` builds it).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lora_tune.logs.mllog import MllogReader
from lora_tune_recipes.worker_request import VARIABLE
from tests.recipes.served import (
    BOUND,
    PER_PROCESS,
    TINY,
    TINY_SIZES,
    WITHOUT_TE,
    Served,
    Trial,
    assert_complies,
    full_length_log,
    per_sequence_mean,
    unequal_sequences,
)

INSIDE = "tests.recipes.bridge_inside"


@pytest.fixture(scope="module")
def alone(bridge: Served, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trial, Path]:
    """The reference: one process, and the adapter that it tuned."""
    adapter = tmp_path_factory.mktemp("alone") / "adapter"
    trial = bridge(SAVE_ADAPTER=adapter)
    assert trial.codes == (0,), trial.output[-2000:]
    return trial, adapter


LAYOUTS = [{"TP": 2}, {"PP": 2}, {"PP": 2, "VP": 2}, {"CP": 2, "MBS": 2, "VAL_MBS": 2}, {"MINIBS": 2}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["TP=2", "PP=2", "PP=2 VP=2", "CP=2 MBS=2", "DP=2"])
def test_a_layout_changes_nothing_but_speed(
    bridge: Served, alone: tuple[Trial, Path], layout: dict[str, int], tmp_path: Path
) -> None:
    """Evaluations, training losses and the adapter in the end; nine sequences do not divide over two ranks."""
    from safetensors.numpy import load_file

    trial = bridge(ranks=2, SAVE_ADAPTER=tmp_path / "adapter", **layout)
    assert trial.codes == (0, 0), trial.output[-2000:]
    assert trial.losses == pytest.approx(alone[0].losses, abs=1e-4)
    assert [e.loss for e in trial.run.train] == pytest.approx([e.loss for e in alone[0].run.train], abs=1e-4)
    tuned, expected = (load_file(f / "adapter_model.safetensors") for f in (tmp_path / "adapter", alone[1]))
    assert tuned.keys() == expected.keys()
    # Adam steps by the sign where a gradient is all rounding, so single numbers differ.
    away = {key: np.linalg.norm(tuned[key] - expected[key]) / np.linalg.norm(expected[key]) for key in expected}
    assert max(away.values()) < 0.05, away


def test_nemo_and_bridge_learn_the_same_from_the_same(alone: tuple[Trial, Path], nemo_alone: Trial) -> None:
    """Weights, data, order, adapters' start, schedule: two libraries in two environments, one curve."""
    assert alone[0].losses == pytest.approx(nemo_alone.losses, abs=1e-4)


def test_an_adapter_has_the_same_loss_in_peft_and_back_in_another_layout(
    bridge: Served, alone: tuple[Trial, Path], tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel
    from safetensors.numpy import load_file
    from transformers import LlamaForCausalLM

    trial, adapter = alone
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32), str(adapter))
    assert per_sequence_mean(TINY, model, samples=9) == pytest.approx(trial.losses[-1], abs=1e-5)
    again = bridge(ranks=2, TP=2, ADAPTER=adapter, SAVE_ADAPTER=tmp_path, LR=1e-12, MAX_STEPS=4)
    assert again.losses == pytest.approx(trial.losses[-1:], abs=1e-4)
    saved, held = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, adapter))
    assert saved.keys() == held.keys()
    assert all(np.allclose(saved[key], held[key], atol=1e-6) for key in held)


def test_an_adapter_of_another_form_is_refused(bridge: Served, alone: tuple[Trial, Path]) -> None:
    """In one line and before a model is built; which forms those are, test_peft_format.py says."""
    trial = bridge(ADAPTER=alone[1], LORA_RANK=8)
    assert trial.codes == (2,)
    assert "r is 16; allowed is 8" in trial.message


def test_a_folder_that_cannot_take_the_adapter_is_told_before_it_is_trained(bridge: Served, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trial = bridge(SAVE_ADAPTER=tmp_path / "file")
    assert trial.codes == (2,)
    assert "cannot be made: File exists" in trial.message


def test_v60s_form_of_a_base_is_as_good_as_the_hugging_face_one(
    bridge: Served, alone: tuple[Trial, Path], tmp_path: Path
) -> None:
    """Converted, and loaded over two tensor-parallel ranks; the same folder under other sizes is refused."""
    folder = tmp_path / "base"
    converted = bridge(module=INSIDE, INSIDE="converted", OUT=folder)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    wanted = {"latest_checkpointed_iteration.txt", "iter_0000000/.metadata", "iter_0000000/run_config.yaml"}
    assert names > wanted, converted.output[-2000:]
    trial = bridge(ranks=2, TP=2, MODEL=None, CKPT_ROOT=folder, **TINY_SIZES)
    assert trial.losses == pytest.approx(alone[0].losses, abs=1e-4), trial.output[-2000:]
    refused = bridge(MODEL=folder, **{**TINY_SIZES, "LAYERS": 2})
    assert refused.codes == (2,)
    assert "linear_qkv.weight is (4, 384, 128)" in refused.message


def test_nemo_2s_form_of_a_base_is_as_good_as_it_is_and_converted(
    bridge: Served, alone: tuple[Trial, Path], nemo_base: Path, tmp_path: Path
) -> None:
    """The folder is NeMo's own: written in its environment, of which nothing is there when Bridge reads it."""
    read = bridge(MODEL=nemo_base, **TINY_SIZES)
    assert read.losses == pytest.approx(alone[0].losses, abs=1e-4), read.output[-2000:]
    bridge(module=INSIDE, INSIDE="converted", MODEL=nemo_base, OUT=tmp_path / "base", **TINY_SIZES)
    converted = bridge(MODEL=None, CKPT_ROOT=tmp_path / "base", **TINY_SIZES)
    assert converted.losses == read.losses, converted.output[-2000:]


def test_the_eval_loss_is_the_mean_of_per_sequence_means(bridge: Served, tmp_path: Path) -> None:
    """Against a computation by hand on the base model: sequences differ in how many of their tokens count."""
    unequal_sequences(tmp_path)
    trial = bridge(DATADIR=tmp_path, LR=1e-12, MAX_STEPS=1, VAL_CHECK_INTERVAL=1, EVAL_SAMPLES=0)
    assert trial.losses == pytest.approx([per_sequence_mean(tmp_path)], abs=1e-4), trial.output[-2000:]


@pytest.fixture(scope="module")
def full_length(bridge: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_length_log(bridge, tmp_path_factory.mktemp("easy"))


@pytest.mark.parametrize("ruleset", ["6.0.0", "6.1.0"])
def test_a_full_length_log_passes_the_compliance_checker(full_length: Path, ruleset: str) -> None:
    assert_complies(full_length, ruleset)


def test_warm_up_leaves_no_trace_and_a_seed_repeats(bridge: Served) -> None:
    dropout = {"LORA_DROPOUT": 0.1, "MAX_STEPS": 4}
    warm = bridge(WARMUP_TRAIN_STEPS=3, WARMUP_VALIDATION_STEPS=2, **dropout)
    assert warm.losses
    assert warm.losses == bridge(WARMUP=0, **dropout).losses
    assert warm.losses != bridge(SEED=2, **dropout).losses


def test_the_run_stops_at_its_target_and_says_what_it_was(bridge: Served, alone: tuple[Trial, Path]) -> None:
    trial = bridge(TARGET=None, TARGET_LOG_PPL=alone[0].losses[0] + 1e-6, CONFIG_FILENAME="config_X.sh")
    assert trial.run.status == "success"
    assert trial.losses == alone[0].losses[:1]
    said = trial.run.hyperparameters
    assert (said["submission_benchmark"], said["config_filename"]) == ("llama_lora", "config_X.sh")
    assert said["lowest_numerical_precision_in_linear"] == "fp32"
    assert {said[f"{kind}_parallelism"] for kind in ("tensor", "pipeline", "context", "expert")} == {1}


def test_overlapped_transfers_leave_none_out_where_weights_are_frozen(bridge: Served) -> None:
    """Transformer Engine hides some behind weight-gradient products, which frozen weights do not have."""
    layout = {"TP": 2, "SP": 1, "FP8": 1, "FP8_DPA": 0, "TP_COMM_OVERLAP": 1}
    names = [f"tp_comm_{name}" for name in ("overlap", "bulk_wgrad", "bulk_dgrad", "overlap_rs_dgrad", "overlap_cfg")]
    trial = bridge(module=INSIDE, INSIDE="model", FIELDS=",".join(names), **layout)
    *switches, products = json.loads(trial.output.splitlines()[-1]).values()
    assert switches == [True, False, False, True]
    assert "fc1_fprop" in products
    assert not any("wgrad" in name for name in products)


def test_a_probe_ends_after_one_warm_block(bridge: Served) -> None:
    run = bridge(PROBE=1, MAX_STEPS=100).run
    assert (len(run.stated_throughput), len(run.evals)) == (2, 1)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"FP8": 1, "FP8_DPA": 0}, "FP8=1 needs Transformer Engine"),
        ({"FP4": 1}, "FP4=1 needs a GPU of compute capability 10.0"),
        ({"FP8": 1, "FP8_DPA": 0, "FP8_RECIPE": "mxfp8"}, "FP8_RECIPE=mxfp8 needs a GPU of compute capability 10.0"),
    ],
    ids=["FP8", "NVFP4", "MXFP8"],
)
def test_what_the_machine_cannot_do_is_refused_by_name(bridge: Served, knobs: dict[str, object], words: str) -> None:
    trial = bridge(**knobs)
    assert trial.codes == (3,)
    assert words in trial.message


STUDY = """
[workload]
kind = "{kind}:BridgeOnCpu"

[site]
gpus_per_node = 2
data = "{tiny}"
model = "{tiny}"

[site.environment]
{environment}

[space]
LR = {{ type = "float", low = 1e-3, high = 2e-2, log = true }}
layout = {{ type = "layout", tp = [1, 2], pp = [1, 2], gbs = [4], mbs = [2] }}
MAX_STEPS = 24
{fixed}

[objective]
target = 1.8

[budget]
trials = 3
parallel = 1
trial_minutes = 5
"""


def test_a_sweep_of_bridge_trials_on_two_ranks_goes_from_proposal_to_exported_config(
    bridge: Served, tmp_path: Path
) -> None:
    fixed = {"MAX_SEQLEN": 64, "VAL_CHECK_INTERVAL": 16, "EVAL_SAMPLES": 9, "WARMUP_TRAIN_STEPS": 1, "NUM_WORKERS": 0}
    environment = {**PER_PROCESS, VARIABLE: bridge.socket}
    study = tmp_path / "bridge_cpu.toml"
    study.write_text(
        STUDY.format(
            kind=Path(__file__).with_name("bridge_kind.py"),
            tiny=TINY,
            environment="\n".join(f'{name} = "{value}"' for name, value in environment.items()),
            fixed="\n".join(f"{name} = {value}" for name, value in {**fixed, **WITHOUT_TE}.items()),
        )
    )
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", str(study), "--output", str(tmp_path / "sweep")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=BOUND, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    runs = []
    for trial in sorted((tmp_path / "sweep").glob("trials/*")):
        reader = MllogReader()
        reader.feed(max(trial.glob("attempt-*/job.log")).read_bytes())  # a best far ahead of the others is run twice
        runs.append(reader.run())
    assert len(runs) == 3
    assert all(run.evals for run in runs)
    assert any(run.reached(1.8) for run in runs)
    (config,) = (tmp_path / "sweep" / "best").glob("config_*.sh")
    exported = config.read_text()
    assert "export MAX_SEQLEN=64\n" in exported
    assert f"export CONFIG_FILENAME={config.name}\n" in exported


def test_a_killed_rank_ends_the_other(bridge: Served) -> None:
    processes = bridge.start(ranks=2, MAX_STEPS=100000, VAL_CHECK_INTERVAL=384, MINIBS=2, DIST_TIMEOUT=30)
    while '"train_loss"' not in bridge.output():
        assert all(p.poll() is None for p in processes), bridge.output()[-2000:]
    processes[1].kill()
    trial = bridge.wait(processes)
    assert trial.codes[0] == 1
    assert "rank 0: " in trial.message
