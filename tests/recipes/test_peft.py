"""The PEFT recipe: what it reads, what it prints, and that it trains the same thing whatever the layout."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file, save_file

from lora_tune.base.errors import InputError, LoraTuneError, SetupError
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import RunLog
from lora_tune.mlperf.log_check import complaints
from lora_tune.mlperf.log_check import parse as parse_log
from lora_tune_recipes import settings as knobs
from lora_tune_recipes import text
from lora_tune_recipes.batch import Batch, weighted_losses
from lora_tune_recipes.fsdp_settings import Sharding
from lora_tune_recipes.lora_model import adapters_fit_shares, build, load_base
from lora_tune_recipes.ranks import connect, refuse
from lora_tune_recipes.schedule import learning_rate
from lora_tune_recipes.settings import TINY
from lora_tune_recipes.text import Sequences, byte_tokens
from lora_tune_recipes.trainer import Trainer, clip
from lora_tune_recipes.worker_request import VARIABLE
from tests.docs.pages import section
from tests.recipes.sharded_trials import loss_of
from tests.waiting import wait_for

SHORT = {"MAX_STEPS": "20", "VAL_CHECK_INTERVAL": "40", "EVAL_SAMPLES": "8", "TARGET": "0.01"}
MODULE = "lora_tune_recipes.peft_lora"
IMPORTED = (VARIABLE, "CUDA_VISIBLE_DEVICES")
"""Set while a worker has imported for these trials."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def trial(*launcher: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """One trial as a program; ``launcher`` are arguments of the interpreter before the module."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", *IMPORTED) if name in os.environ}
    environment = {**kept, "OMP_NUM_THREADS": "1", **SHORT, **variables}
    return subprocess.run(
        [sys.executable, *launcher, "-m", MODULE], env=environment, capture_output=True, timeout=120, check=False
    )


def parse(done: subprocess.CompletedProcess[bytes]) -> RunLog:
    assert done.returncode == 0, done.stderr.decode()
    reader = MllogReader()
    reader.feed(done.stdout)
    return reader.run()


def events(done: subprocess.CompletedProcess[bytes]) -> list[dict[str, Any]]:
    lines = done.stdout.decode().splitlines()
    assert all(line.startswith(":::MLLOG ") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


@pytest.fixture(scope="module")
def plain() -> subprocess.CompletedProcess[bytes]:
    """A short run in one process, without dropout, that cannot reach its target."""
    return trial(LORA_DROPOUT="0")


@pytest.fixture
def imported(peft_worker: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of this test begin in a worker that has imported for them."""
    for name, value in peft_worker.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


# ---- the log


def test_log_tells_the_run_in_order(plain: subprocess.CompletedProcess[bytes]) -> None:
    keys = [e["key"] for e in events(plain) if e["key"] not in ("train_loss", "tracked_stats")]
    block = ["block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop"]
    assert keys[:2] == ["cache_clear", "init_start"]
    assert keys[keys.index("init_stop") :] == ["init_stop", "run_start", *block, *block, "run_stop"]
    assert plain.stderr == b""


def test_log_holds_samples_speed_and_what_was_run(plain: subprocess.CompletedProcess[bytes]) -> None:
    run = parse(plain)
    assert [e.samples for e in run.evals] == [40, 80]
    assert [t.samples for t in run.train] == [40, 80]
    assert run.status == "aborted"
    stats = [e["value"] for e in events(plain) if e["key"] == "tracked_stats"]
    assert all(s["throughput"] * s["train_step_time"] == pytest.approx(4) for s in stats)
    known = {
        "seed": 1,
        "global_batch_size": 4,
        "opt_base_learning_rate": 0.005,
        "opt_learning_rate_training_steps": 20,
        "lora_rank": 16,
        "lora_alpha": 32.0,
    }
    assert known.items() <= dict(run.hyperparameters).items()


def test_the_log_discloses_what_mlperf_asks_for(plain: subprocess.CompletedProcess[bytes]) -> None:
    """All of 6.1's rules hold but for two: this is no benchmark of MLPerf, and its loss is above 1."""
    log = parse_log(plain.stdout.decode().replace('"peft_lora"', '"llama2_70b_lora"').splitlines(), "6.1.0")
    assert log.first("lowest_numerical_precision_in_linear") == "fp32"
    assert [text for text in complaints(log, "6.1.0") if "eval_accuracy" not in text] == []


@pytest.mark.usefixtures("imported")
def test_same_environment_gives_the_same_evals(plain: subprocess.CompletedProcess[bytes]) -> None:
    again = parse(trial(LORA_DROPOUT="0"))
    assert [e.loss for e in again.evals] == [e.loss for e in parse(plain).evals]


@pytest.mark.usefixtures("imported")
def test_stops_with_success_at_the_target(plain: subprocess.CompletedProcess[bytes]) -> None:
    first = parse(plain).evals[0]
    run = parse(trial(LORA_DROPOUT="0", TARGET=str(first.loss)))
    assert run.status == "success"
    assert [e.samples for e in run.evals] == [40]


@pytest.mark.usefixtures("imported")
def test_warm_up_changes_nothing_but_the_clock(plain: subprocess.CompletedProcess[bytes]) -> None:
    cold = parse(trial(LORA_DROPOUT="0", WARMUP="0"))
    assert [e.loss for e in cold.evals] == [e.loss for e in parse(plain).evals]


@pytest.mark.usefixtures("imported")
def test_probe_stops_after_one_eval_and_one_warm_block() -> None:
    done = trial(PROBE="1", MAX_STEPS="200", VAL_CHECK_INTERVAL="7")
    assert [e.samples for e in parse(done).evals] == [8]
    assert [e["key"] for e in events(done)].count("block_stop") == 2


@pytest.mark.usefixtures("imported")
def test_divergence_is_printed_and_ends_the_run(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(TINY, broken)
    weights = load_file(TINY / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    run = parse(trial(MODEL=str(broken), DATADIR=str(TINY)))
    assert run.status == "aborted"
    assert not run.evals
    assert math.isnan(run.train[0].loss)


# ---- several processes


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("layout", [{"MINIBS": "2"}, {"MINIBS": "2", "MBS": "1"}, {"TP": "2"}], ids=str)
def test_two_processes_train_what_one_trains(plain: subprocess.CompletedProcess[bytes], layout: dict[str, str]) -> None:
    run = parse(trial(*TORCHRUN, LORA_DROPOUT="0", **layout))
    assert run.hyperparameters["global_batch_size"] == 4
    assert [e.loss for e in run.evals] == pytest.approx([e.loss for e in parse(plain).evals], abs=2e-5)


FSDP: list[tuple[dict[str, str], dict[str, str]]] = [
    ({}, {}),
    ({}, {"MBS": "1", "FSDP_STRATEGY": "shard_grad_op", "FSDP_WRAP": "module"}),
    ({}, {"FSDP_WRAP": "none", "RECOMPUTE_GRANULARITY": "full"}),
    ({}, {"FSDP_SHARDS": "1"}),
    ({"DORA": "1", "MODULES_TO_SAVE": "lm_head"}, {}),
]
"""Knobs of a trial, and how it is sharded."""


def test_sharded_in_every_way_two_processes_train_what_one_trains(tmp_path: Path) -> None:
    adapter, steps = tmp_path / "adapter", 3
    common = {"SEQ": "32", "EVAL_SAMPLES": "4", "LORA_DROPOUT": "0"}
    sharded = [{**common, **own, **how, "FSDP": "1", "MINIBS": "2"} for own, how in FSDP]
    sharded[-1]["SAVE_ADAPTER"] = str(adapter)
    program = Path(__file__).with_name("sharded_trials.py")
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(program), json.dumps(sharded), str(steps)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    losses = json.loads(done.stdout.splitlines()[-1])
    expected = {own: loss_of({**common, **dict(own)}, steps) for own in {tuple(own.items()) for own, _ in FSDP}}
    assert losses == pytest.approx([expected[tuple(own.items())] for own, _ in FSDP], abs=2e-5)
    saved = PeftModel.from_pretrained(load_base(knobs.read(common)), adapter)
    validation = text.load(TINY, "validation", 32, byte_tokens).spread(4)
    batch = Batch.of(validation, torch.device("cpu"))
    with torch.no_grad():
        logits = saved.eval()(input_ids=batch.read).logits
    assert float(weighted_losses(logits, batch.predict, batch.weight).sum(1).mean()) == pytest.approx(
        losses[-1], abs=3e-5
    )


def test_a_lost_rank_ends_the_job_with_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **SHORT, "MINIBS": "2", "MAX_STEPS": "100000"}
    with log.open("wb") as out:
        job = subprocess.Popen([sys.executable, *TORCHRUN, "-m", MODULE], env=environment, stdout=out, stderr=out)
    try:
        wait_for(lambda: b"eval_accuracy" in log.read_bytes(), 60, "training")
        ranks = [p for p in psutil.Process(job.pid).children(recursive=True) if MODULE in p.cmdline()]
        ranks[-1].send_signal(signal.SIGKILL)
        assert job.wait(60) != 0
    finally:
        job.kill()
    assert b"run_stop" not in log.read_bytes()


class _Joined(Exception):
    pass


def test_ranks_that_offload_can_reduce_what_lies_in_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(backend: str, **_: object) -> None:
        raise _Joined(backend)

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", joined)
    with pytest.raises(_Joined, match="cpu:gloo"):
        connect(knobs.read({"FSDP": "1", "FSDP_OFFLOAD": "1"}))


PROCESSES = [
    ({"TP": "2"}, 1, "TP=2: allowed is 1 in a single process", InputError),
    ({"CP": "2"}, 1, "CP=2: allowed is 1 in a single process", InputError),
    ({"TP": "2"}, 3, "divides the 3 processes", InputError),
    ({"TP": "2"}, 4, "accelerate does not combine", InputError),
    ({"TP": "2", "CP": "2"}, 4, "accelerate does not combine", InputError),
    ({"CP": "4", "SEQ": "100"}, 4, "SEQ=100: allowed is a multiple of 2*CP=8", InputError),
    ({"CP": "2", "ATTN": "eager"}, 2, "ATTN='eager': allowed is sdpa", InputError),
    ({"CP": "2"}, 2, "CP=2: needs GPUs", SetupError),
    ({"FSDP": "1", "FSDP_OFFLOAD": "1"}, 2, "FSDP_OFFLOAD=1: there is no GPU here", SetupError),
    ({"FSDP": "1", "FSDP_SHARDS": "2"}, 3, "FSDP_SHARDS=2: allowed is a divisor of the 3 processes", InputError),
    ({"FSDP": "1", "CP": "2", "FSDP_WRAP": "none"}, 2, "allowed is CP=1; accelerate shards else", InputError),
    ({"FSDP": "1", "DORA": "1", "FSDP_WRAP": "none"}, 2, "not with DORA=1", InputError),
    ({"FSDP": "1", "LOAD_IN_4BIT": "nf4"}, 2, "LOAD_IN_4BIT='nf4': bitsandbytes' weights cannot be", InputError),
    ({"TP": "2", "MODULES_TO_SAVE": "lm_head"}, 2, "MODULES_TO_SAVE: whole modules are not trained in", InputError),
    ({"CP": "2", "PACKING": "1"}, 2, "PACKING=1: accelerate cuts a row", InputError),
    ({"TP": "2", "SAVE_ADAPTER": "/tmp/x"}, 2, "SAVE_ADAPTER: allowed with TP=1 and CP=1", InputError),
]


@pytest.mark.parametrize(("variables", "world", "message", "kind"), PROCESSES)
def test_parallelism_that_cannot_train_is_refused(
    variables: dict[str, str], world: int, message: str, kind: type[LoraTuneError]
) -> None:
    with pytest.raises(kind, match=message.replace("*", r"\*")):
        refuse(knobs.read(variables), world, cuda=False)


def test_tensor_parallelism_that_adapters_do_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 gives a rank's layer its share of the width, and peft an adapter of the whole."""
    monkeypatch.setattr("lora_tune_recipes.lora_model.installed", "5.17.0")
    with pytest.raises(SetupError, match=r"TP=2: transformers 5\.17\.0 is here; allowed is TP=1, or"):
        load_base(knobs.read({"TP": "2", "SEQ": "128"}))


def test_every_sequence_is_evaluated_once_by_some_rank() -> None:
    ranks = connect(knobs.read({}))
    for dp in (1, 2, 3):
        ranks.dp = dp
        seen = []
        for ranks.dp_rank in range(dp):
            shares = list(ranks.shares(7, 2))
            assert len(shares) == -(-7 // (2 * dp)), "ranks must take equal turns"
            seen += [row for share in shares for row in share.tolist() if row >= 0]
        assert sorted(seen) == list(range(7))


# ---- bad input


KNOBS = [
    ("LR", "abc"),
    ("LR", "0"),
    ("LR", "inf"),
    ("MIN_LR", "0.5"),
    ("MAX_STEPS", "0"),
    ("MAX_STEPS", "1.5"),
    ("WARMUP_STEPS", "200"),
    ("VAL_CHECK_INTERVAL", "-1"),
    ("MINIBS", "-1"),
    ("MINIBS", "1000000000"),
    ("MBS", "3"),
    ("TP", "0"),
    ("PP", "2"),
    ("SP", "1"),
    ("SEED", "-1"),
    ("TARGET", "0"),
    ("TARGET", "nan"),
    ("LORA_RANK", "0"),
    ("LORA_DROPOUT", "1"),
    ("GRAD_CLIP", "-1"),
    ("SEQ", "1"),
    ("DTYPE", "fp8"),
    ("ATTN", "flash"),
    ("RECOMPUTE_GRANULARITY", "some"),
    ("WARMUP", "maybe"),
    ("LOAD_IN_4BIT", "int4"),
    ("MODULES_TO_SAVE", "lm_head,lm_head"),
    ("FSDP_STRATEGY", "full_shard"),
    ("FSDP_WRAP", "layer"),
    ("FSDP_SHARDS", "2"),
    ("FSDP_OFFLOAD", "1"),
    ("MODEL", "/nowhere"),
    ("DATADIR", "/nowhere"),
]


@pytest.mark.parametrize(("name", "value"), KNOBS)
def test_a_bad_knob_is_named_with_what_came_and_what_is_allowed(name: str, value: str) -> None:
    with pytest.raises(InputError) as refused:
        knobs.read({name: value})
    message = str(refused.value)
    assert message.startswith(f"{name}={value!r}: allowed is ")
    assert "\n" not in message


def test_a_bad_knob_costs_one_line_and_exit_code_2() -> None:
    done = trial(LR="fast")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().splitlines() == ["peft_lora: LR='fast': allowed is a number above 0 and at most 10"]


def test_a_missing_library_is_named_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "peft.py").write_text("raise ImportError('no peft here')")
    done = trial(PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (3, b"")
    assert done.stderr.decode().splitlines() == ["peft_lora: no peft here; pip install 'lora-tune[peft]'"]


def test_a_full_disk_ends_the_run_with_an_error() -> None:
    variables = {**os.environ, **SHORT}
    command = [sys.executable, "-m", MODULE]
    with Path("/dev/full").open("wb") as full:
        silent = subprocess.run(command, env=variables, stdout=full, stderr=full, timeout=120)
        spoken = subprocess.run(command, env=variables, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert silent.returncode == spoken.returncode == 1
    assert spoken.stderr.decode().splitlines()[-1].endswith("OSError: [Errno 28] No space left on device")


def test_unset_and_empty_mean_the_default() -> None:
    assert knobs.read({"LR": "", "TARGET": " "}) == knobs.read({})


def test_the_page_names_every_variable_with_its_default() -> None:
    page = section("trainers.md", "PEFT")
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in page.splitlines() if line.startswith("| `")]
    defaults = {
        name: default
        for names, values in rows
        for name, default in zip_longest(re.findall("`([A-Z_0-9]+)`", names), values.split(", "), fillvalue="")
    }
    plain = {f.name.upper() for f in dataclasses.fields(knobs.Settings)}
    adapters = {f.name.upper() for f in dataclasses.fields(knobs.AdapterSettings)}
    named = {name if name in defaults else f"LORA_{name}" for name in adapters}
    sharding = {f"FSDP_{f.name.upper()}" for f in dataclasses.fields(Sharding)}
    assert plain - {"RECOMPUTE", "ADAPTERS", "SHARDING"} | named | sharding <= set(defaults)
    settings = knobs.read({})
    for name in ("LR", "MAX_STEPS", "SEQ", "WEIGHT_DECAY", "GRAD_CLIP"):
        assert float(defaults[name]) == getattr(settings, name.lower())
    for name in ("RANK", "ALPHA", "DROPOUT"):
        assert float(defaults[f"LORA_{name}"]) == getattr(settings.adapters, name.lower())
    for name in ("TARGET", "VAL_CHECK_INTERVAL", "EVAL_SAMPLES"):
        assert defaults[name].startswith(f"{getattr(settings, name.lower())} for the tiny task")


def test_only_the_shipped_task_has_a_target_of_its_own(tmp_path: Path) -> None:
    assert knobs.read({}).target == knobs.TINY_TARGET
    assert knobs.read({"DATADIR": str(tmp_path)}).target is None


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def _change(**keys: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **keys}))

    return change


MODELS = [
    (lambda folder: (folder / "config.json").unlink(), "no usable config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "no usable config.json"),
    (_change(model_type="t5"), "model_type 't5'; allowed are causal models"),
    (_change(num_hidden_layers=5), "9 missing_keys, such as model.layers.4"),
    (_change(num_hidden_layers=3), "9 unexpected_keys, such as model.layers.3"),
    (_change(vocab_size=512), "2 mismatched_keys"),
    (_change(max_position_embeddings=64), "SEQ=128: allowed is at most the model's 64 positions"),
    (lambda folder: (folder / "model.safetensors").unlink(), "weights not loaded"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "weights not loaded"),
]


@pytest.mark.parametrize(("damage", "message"), MODELS)
def test_an_unfit_checkpoint_is_refused(model: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(model)
    with pytest.raises(InputError, match=message):
        build(knobs.read({"MODEL": str(model)}))


# ---- data


def _objects(*rows: dict[str, object]) -> np.ndarray[Any, Any]:
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


def _write(folder: Path, name: str, content: object) -> None:
    if isinstance(content, np.ndarray):
        np.save(folder / name, content)
    else:
        assert isinstance(content, bytes)
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.txt", b"abcdefghi"),
        ("train.txt.gz", gzip.compress(b"abcdefghi", mtime=0)),
        ("train.jsonl", b'{"text": "abc"}\n\n{"text": "efghi"}\n'),
        ("train.npy", np.frombuffer(b"abcdeefghi", np.uint8).reshape(2, 5)),
    ],
)
def test_every_form_of_data_becomes_sequences_that_share_one_token(tmp_path: Path, name: str, content: object) -> None:
    _write(tmp_path, name, content)
    read = text.load(tmp_path, "train", 4, byte_tokens)
    middle = b"\n" if name == "train.jsonl" else b"d"
    assert [bytes(row.tolist()) for row in read.tokens] == [b"abc" + middle + b"e", b"efghi"]
    assert read.mask.all()


def test_packed_rows_are_filled_up_and_masked(tmp_path: Path) -> None:
    rows = _objects({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0]}, {"input_ids": [4, 5, 6, 7, 8]})
    np.save(tmp_path / "train.npy", rows)
    read = text.load(tmp_path, "train", 4, byte_tokens)
    assert read.tokens.tolist() == [[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]]
    assert read.mask.tolist() == [[False, True, False, False], [True] * 4]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("other.txt", b"abcdefgh", "there is none"),
        ("train.txt", b"abc", "3 tokens; SEQ=4 needs at least 5"),
        ("train.txt", b"\xff\xfe" * 9, "not readable as UTF-8"),
        ("train.txt.gz", b"abc", "not readable as UTF-8 text"),
        ("train.jsonl", b'{"text": "a"}\n{"text": 1}', 'train.jsonl:2: allowed is an object with a string "text"'),
        ("train.jsonl", b"{", "train.jsonl:1: not JSON"),
        ("train.npy", b"abc", "not readable as .npy"),
        ("train.npy", np.zeros((2, 4), np.int64), r"allowed are integers \[n, SEQ \+ 1 = 5\]"),
        ("train.npy", _objects({"ids": [1]}), "row 0 has no input_ids"),
        ("train.npy", _objects({"input_ids": [1] * 6}), "row 0 has 6 tokens"),
    ],
)
def test_unusable_data_is_refused(tmp_path: Path, name: str, content: object, message: str) -> None:
    _write(tmp_path, name, content)
    with pytest.raises(InputError, match=message):
        text.load(tmp_path, "train", 4, byte_tokens)


@pytest.mark.usefixtures("imported")
def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        np.save(tmp_path / f"{split}.npy", np.full((8, 129), 256))
    done = trial(DATADIR=str(tmp_path), MODEL=str(TINY))
    assert done.returncode == 2
    assert b"tokens from 256 to 256; the model's vocabulary allows 0 to 255" in done.stderr


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=20), seq=st.integers(3, 16))
def test_packed_samples_lose_no_token_and_see_no_other_sample(lengths: list[int], seq: int) -> None:
    samples = [[1000 * number + place for place in range(length)] for number, length in enumerate(lengths, 1)]
    pieces = [s[at : at + seq - 1] for s in samples for at in range(0, len(s), seq - 1)]
    expected = {(a, b) for piece in pieces for a, b in pairwise(piece)}
    if not expected:
        with pytest.raises(InputError, match="no sample of 2 tokens"):
            text.packed_samples(samples, seq)
        return
    rows = text.packed_samples(samples, seq)
    assert rows.positions is not None
    read, predicted = rows.tokens[:, :-1][rows.mask], rows.tokens[:, 1:][rows.mask]
    assert len(read) == len(expected)
    assert set(zip(read.tolist(), predicted.tolist(), strict=True)) == expected
    assert (rows.positions[:, 1:] == 0).any(axis=1).all(), "every row has a boundary"
    # Fewer rows than one a piece wherever two neighbours fit together.
    assert len(rows) <= len(pieces)


def test_what_samples_of_a_packed_row_learn_is_what_they_learn_in_rows_of_their_own(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "abcdefghij" * 2}), json.dumps({"text": "the other sample"})]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    settings = knobs.read({**SHORT, "LORA_DROPOUT": "0", "PACKING": "1", "SEQ": "64"})
    packed = text.load(tmp_path, "train", 64, byte_tokens, pack=True)
    apart = [text.packed_samples([list(byte_tokens(json.loads(line)["text"]))], 64) for line in lines]
    assert len(packed) == 1
    trainer = Trainer(settings, connect(settings))
    counts = [row.mask.sum() for row in apart]
    means = [trainer.evaluate(row) for row in apart]
    assert trainer.evaluate(packed) == pytest.approx(np.average(means, weights=counts), abs=1e-5)


def test_only_samples_are_packed(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("abcdefgh")
    with pytest.raises(InputError, match=r"PACKING=1: train\.txt has no samples to pack; allowed is train\.jsonl"):
        text.load(tmp_path, "train", 4, byte_tokens, pack=True)
    with pytest.raises(InputError, match="PACKING='1': allowed is 0 where ATTN=flash_attention_2 and MBS is above 1"):
        knobs.read({"PACKING": "1", "ATTN": "flash_attention_2", "MINIBS": "4"})


def test_four_bits_without_bitsandbytes_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    with pytest.raises(
        SetupError, match=r"LOAD_IN_4BIT='nf4': bitsandbytes is not here; pip install 'lora-tune\[qlora"
    ):
        load_base(knobs.read({"LOAD_IN_4BIT": "nf4"}))


@given(count=st.integers(1, 9), batch=st.integers(1, 12), seed=st.integers(0, 9))
def test_every_epoch_reads_every_sequence_once(count: int, batch: int, seed: int) -> None:
    batches = text.order(count, batch, seed)
    read = np.concatenate([next(batches) for _ in range(-(-3 * count // batch))])
    for epoch in range(3):
        assert sorted(read[epoch * count : (epoch + 1) * count].tolist()) == list(range(count))


def test_the_order_of_the_data_depends_on_the_seed() -> None:
    orders = [next(text.order(100, 50, seed)).tolist() for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


# ---- numbers


@given(
    peak=st.floats(1e-6, 1.0),
    ratio=st.floats(0.0, 1.0),
    warmup_steps=st.integers(0, 50),
    more=st.integers(1, 500),
)
def test_learning_rate_rises_to_the_peak_and_falls_to_the_floor(
    peak: float, ratio: float, warmup_steps: int, more: int
) -> None:
    steps = warmup_steps + more
    rates = [
        learning_rate(s, peak=peak, floor=ratio * peak, warmup_steps=warmup_steps, max_steps=steps)
        for s in range(steps + 1)
    ]
    assert rates[warmup_steps] == pytest.approx(peak)
    assert rates[steps] == pytest.approx(ratio * peak)
    rising, falling = rates[: warmup_steps + 1], rates[warmup_steps:]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(rising))
    assert all(a >= b * (1 - 1e-12) for a, b in pairwise(falling))
    assert rates[0] > 0


@given(limit=st.floats(0.01, 10.0), seed=st.integers(0, 99))
def test_clipping_equals_torchs_own(limit: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours = [torch.nn.Parameter(torch.zeros(shape)) for shape in (3, 5)]
    theirs = [torch.nn.Parameter(torch.zeros(shape)) for shape in (3, 5)]
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn(one.shape, generator=generator)
        other.grad = one.grad.clone()
    clip(ours, limit)
    torch.nn.utils.clip_grad_norm_(theirs, limit)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    settings = knobs.read({**SHORT, "LORA_DROPOUT": "0", "MBS": "2"})
    return Trainer(settings, connect(settings))


def _validation(count: int) -> Sequences:
    return text.load(TINY, "validation", 128, byte_tokens).spread(count)


def test_a_fresh_adapter_leaves_the_base_as_transformers_scores_it(trainer: Trainer) -> None:
    sequences = _validation(6)
    tokens = torch.from_numpy(np.ascontiguousarray(sequences.tokens))
    with torch.no_grad(), trainer._model.disable_adapter():
        score = trainer._model(input_ids=tokens, labels=tokens).loss
    assert trainer.evaluate(sequences) == pytest.approx(float(score), abs=1e-5)


def test_eval_loss_is_the_mean_of_per_sequence_means(trainer: Trainer) -> None:
    sequences = _validation(5)
    masked = Sequences(sequences.tokens, sequences.mask & (np.arange(128) >= np.array([[0], [100], [50], [0], [120]])))
    tokens = torch.from_numpy(np.ascontiguousarray(sequences.tokens))
    with torch.no_grad(), trainer._model.disable_adapter():
        spread = torch.log_softmax(trainer._model(input_ids=tokens[:, :-1]).logits, -1)
    losses = -spread.gather(2, tokens[:, 1:, None])[:, :, 0].numpy()
    means = [row[kept].mean() for row, kept in zip(losses, masked.mask, strict=True)]
    assert trainer.evaluate(masked) == pytest.approx(float(np.mean(means)), abs=1e-5)


def test_accumulation_and_recomputation_change_no_number() -> None:
    losses = []
    for variant in ({"MBS": "4"}, {"MBS": "1"}, {"RECOMPUTE_GRANULARITY": "full"}):
        settings = knobs.read({**SHORT, "LORA_DROPOUT": "0", **variant})
        one = Trainer(settings, connect(settings))
        batch = text.load(TINY, "train", 128, byte_tokens).spread(4)
        for _ in range(2):
            one.step(batch, 5e-3)
        losses.append(one.evaluate(_validation(4)))
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-5)


TENSOR_PARALLEL = pytest.param(
    {"TP": "2"}, marks=pytest.mark.skipif(not adapters_fit_shares(), reason="needs transformers 5.23")
)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", [{"MINIBS": "2", "FSDP": "1"}, {"CP": "2"}, TENSOR_PARALLEL], ids=str)
def test_two_gpus_train_what_one_trains(layout: dict[str, str]) -> None:
    one = parse(trial(LORA_DROPOUT="0", CUDA_VISIBLE_DEVICES="0"))
    two = parse(trial(*TORCHRUN, LORA_DROPOUT="0", CUDA_VISIBLE_DEVICES="0,1", **layout))
    assert [e.loss for e in two.evals] == pytest.approx([e.loss for e in one.evals], abs=5e-3)
