"""The knobs of a NeMo trial: what they mean, and which values are refused with what words."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.errors import InputError
from lora_tune_recipes import packed_data, text
from lora_tune_recipes.megatron.processes import Processes, first_host, read_processes
from lora_tune_recipes.megatron.schedule import rule_schedule
from lora_tune_recipes.megatron.shapes import SHAPES
from lora_tune_recipes.nemo.settings import NemoSettings, read

TINY = Path(__file__).resolve().parents[2] / "lora_tune_recipes" / "tiny"


def settings(world: int = 8, **variables: object) -> NemoSettings:
    return read({"DATADIR": str(TINY), **{k: str(v) for k, v in variables.items()}}, world)


def test_unset_variables_are_mlperfs_benchmark() -> None:
    found = settings(world=8, MINIBS=4, TP=4)
    assert found.shape == SHAPES["70b"]
    assert (found.layout.dp, found.layout.batch, found.seq, found.target) == (2, 8, 8192, 0.925)
    assert found.closed


@pytest.mark.parametrize("change", [{"LORA_RANK": 8}, {"VAL_CHECK_INTERVAL": 192}, {"SKIP_EVALS": 0}, {"TARGET": 0.93}])
def test_a_run_outside_the_rules_does_not_claim_the_closed_division(change: dict[str, object]) -> None:
    assert not settings(MINIBS=1, **change).closed


@pytest.mark.parametrize(
    ("batch", "first", "interval"),
    [(8, 1536, 384), (9, 4 * 387, 387), (16, 5 * 384, 384), (64, 11 * 384, 384), (128, 19 * 384, 384)],
)
def test_the_rules_schedule(batch: int, first: int, interval: int) -> None:
    """ceil(384/GBS)*GBS samples between evaluations, the first floor(0.125*GBS + 2) left out."""
    schedule = rule_schedule(batch)
    assert (schedule.first * batch, schedule.interval * batch) == (first, interval)


@pytest.mark.parametrize(("layers", "granularity"), [(0, ""), (8, "full")])
def test_no_recomputed_layers_are_no_recomputation(layers: int, granularity: str) -> None:
    graph = int(layers == 0)  # which excludes recomputation
    recompute = {"RECOMPUTE_GRANULARITY": "full", "RECOMPUTE_METHOD": "block", "RECOMPUTE_NUM_LAYERS": layers}
    found = settings(MINIBS=1, MCORE_CUDA_GRAPH=graph, **recompute)
    assert (found.speed.recompute.granularity, found.speed.recompute.layers) == (granularity, layers)


@given(batch=st.integers(1, 128), steps=st.integers(1, 3000))
def test_every_evaluation_lies_within_the_run_at_equal_distances(batch: int, steps: int) -> None:
    schedule = rule_schedule(batch)
    found = schedule.steps(steps)
    assert all(schedule.first <= step <= steps for step in found)
    assert {b - a for a, b in itertools.pairwise(found)} <= {schedule.interval}


def test_a_free_schedule_leaves_nothing_out_unless_asked() -> None:
    assert settings(MINIBS=1, VAL_CHECK_INTERVAL=64).evals.first == 8
    assert settings(MINIBS=1, VAL_CHECK_INTERVAL=64, SKIP_EVALS=2).evals.first == 24


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"TP": 3}, "divides the 8 processes"),
        ({"TP": 8, "LLAMA": "small"}, "key-value heads"),
        ({"MINIBS": 3, "MBS": 2}, "a divisor of MINIBS=3"),
        ({"SP": 1}, "0 where TP is 1"),
        ({"PP": 8, "LLAMA": "tiny", "MINIBS": 8}, "a divisor of 2 layers"),
        ({"CP": 8, "SEQ": 24}, "2*CP=16"),
        ({"VP": 2, "PP": 2, "MINIBS": 2}, "VP=2: allowed is 1"),
        ({"TP_COMM_OVERLAP": 1}, "SP=1"),
        ({"TP_COMM_OVERLAP": 1, "TP": 2, "SP": 1}, "allowed is 0 with FP8=0"),
        ({"LR": "fast"}, "LR='fast': allowed is a number above 0"),
        ({"LR": "nan"}, "LR"),
        ({"MAX_STEPS": 100, "MINIBS": 1}, "at least 192 steps"),
        ({"GLOBAL_BATCH_SIZE": 12}, "a multiple of the 8 data-parallel ranks"),
        ({"LLAMA": "9b"}, "one of tiny"),
        ({"MODEL": "/nowhere"}, "an existing folder"),
        ({"DATADIR": ""}, "DATADIR is not set"),
        ({"MODEL": TINY, "LLAMA": "7b", "SEQ": 128}, "leave LLAMA unset"),
        ({"FP8": "yes"}, "1, 0, True or False"),
        ({"MCORE_CUDA_GRAPH": 1, "RECOMPUTE_GRANULARITY": "full"}, "allowed is 0"),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_what_is_refused_is_named_with_what_is_allowed(variables: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as error:
        settings(**{"MINIBS": 1, **variables})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_shape_of_a_hugging_face_folder_is_read_from_it() -> None:
    shape = settings(world=1, MODEL=TINY, SEQ=128, MINIBS=8).shape
    assert (shape.layers, shape.hidden, shape.vocab, shape.norm_eps) == (4, 128, 256, 1e-6)


def test_a_step_of_the_70b_shape_costs_what_nvidia_states() -> None:
    """NVIDIA's configs say 2598 TFLOP a sample; what differs is the attention's share and the adapters."""
    assert SHAPES["70b"].parameters == 68_976_648_192
    assert SHAPES["70b"].step_flops(8192, 8192) / 1e12 == pytest.approx(2598, rel=0.02)


def test_processes_of_torchrun_and_of_srun() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1234"}
    assert read_processes(torchrun) == Processes(rank=3, world=4, local_rank=1, per_node=2, port=1234)
    srun = {
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "dgx[007-008]",
        "SLURM_JOB_ID": "12",
    }
    found = read_processes(srun)
    assert (found.rank, found.world, found.local_rank, found.nodes, found.address) == (5, 8, 1, 2, "dgx007")
    assert read_processes({}).world == 1


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n1,n2", "n1"), ("a[3,5]", "a3"), ("gpu-[01-04],x", "gpu-01")]
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@given(st.binary(min_size=40, max_size=400), st.integers(2, 30), st.integers(0, 40))
def test_packed_text_reads_back(data: bytes, seq: int, prompt: int) -> None:
    tokens = np.frombuffer(data, np.uint8).astype(np.int64)
    if prompt >= seq:
        with pytest.raises(InputError):
            packed_data.pack(tokens, seq, prompt)
        return
    rows = packed_data.pack(tokens, seq, prompt)
    assert len(rows) == (len(data) - 1) // seq
    assert all(len(row["input_ids"]) == len(row["loss_mask"]) == seq + 1 for row in rows)
    assert [t for row in rows for t in row["input_ids"][:-1]] == list(data[: len(rows) * seq])


def test_the_loss_mask_speaks_of_the_next_token(tmp_path: Path) -> None:
    """As NeMo's packing writes it: entry i is about the prediction of token i + 1."""
    rows = packed_data.pack(np.arange(9), 4, prompt=3)
    packed_data.write(tmp_path, "train", rows)
    assert text.load(tmp_path, "train", 4, text.byte_tokens).mask.tolist() == [[False, False, False, True]] * 2


def test_the_command_packs_and_describes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 10)
    argv = ["packed_data", str(tmp_path), "--seq", "16"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [*argv, "--train", str(tmp_path / "a.txt"), "--validation", str(tmp_path / "a.txt")])
        assert packed_data.main() == 0
        assert "train: sequences 6, tokens that count 96, smallest token 97" in capsys.readouterr().out
        patch.setattr("sys.argv", ["packed_data", str(tmp_path), "--seq", "8"])
        assert packed_data.main() == 2
        assert "SEQ=8 allows 2 to 9" in capsys.readouterr().err
