"""What is told of a pack's gain before a job is spent on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.llama import SHAPES, Shape
from lora_tune.config.study import Study
from lora_tune.workloads import load
from lora_tune_recipes.pack_gain import pair_gain

RECORD = Path(__file__).parents[2] / "benchmarks" / "records" / "packed_h200.json"


def measured_pairs() -> list[dict[str, Any]]:
    """Every shape that was measured with two slots beside one."""
    return [row for row in json.loads(RECORD.read_text())["speed"] if row["slots"] == 2]


@pytest.mark.parametrize("row", measured_pairs(), ids=lambda row: f"{row['shape']} {row['batch']}x{row['seq']}")
def test_the_gain_of_a_pair_is_what_an_h200_measured(row: dict[str, Any]) -> None:
    assert pair_gain(SHAPES[row["shape"]], row["batch"], row["seq"]) == pytest.approx(row["gain"], abs=0.25)


@given(
    shape=st.sampled_from(sorted(SHAPES)),
    sequences=st.integers(1, 64),
    seq=st.sampled_from([1, 64, 512, 8192]),
)
def test_a_pair_is_worth_one_to_two_and_less_the_more_there_is_to_compute(shape: str, sequences: int, seq: int) -> None:
    gain = pair_gain(SHAPES[shape], sequences, seq)
    assert 1 <= gain <= 2
    assert pair_gain(SHAPES[shape], sequences + 1, seq) <= gain


def write_config(folder: Path, shape: Shape) -> Path:
    folder.mkdir()
    config = {
        "num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_groups, "vocab_size": shape.vocab,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def doubts(model: Path, space: dict[str, Any], **site: Any) -> list[str]:
    whole = {"name": "peft", "workload": {"kind": "peft"}, "objective": {"target": 1.0}, "budget": {"trials": 1}}
    own = {"launcher": "slurm", "gpus_per_node": 1, "model": str(model), "slots": 4, **site}
    return list(load(Study.model_validate({**whole, "space": space, "site": own}), "study.toml").check())


LARGE = {"SEQ": 1024, "MINIBS": 8}


def test_packs_that_gain_nothing_are_told_beforehand(tmp_path: Path) -> None:
    (said,) = doubts(write_config(tmp_path / "8b", SHAPES["8b"]), LARGE)
    assert said.startswith("site.slots: 8 x 1,024 tokens over a model of 8.0 billion weights fill a GPU by themselves")
    assert "about 1.00 times the steps of one" in said


@pytest.mark.parametrize(
    ("shape", "space", "site"),
    [
        ("1b", {"SEQ": 512, "MINIBS": 4}, {}),
        ("8b", {"SEQ": {"type": "categorical", "choices": [4096, 64]}, "MINIBS": 1}, {}),
        ("8b", {"SEQ": 64, "layout": {"type": "layout", "minibs": [8], "mbs": [1, 8]}}, {}),
        ("8b", {"MINIBS": 8}, {}),
        ("8b", LARGE, {"slots": None}),
    ],
    ids=["it gains", "short sequences gain", "small passes gain", "length not known", "no slots"],
)
def test_nothing_is_told_where_some_trials_gain_or_it_is_not_known(
    tmp_path: Path, shape: str, space: dict[str, Any], site: dict[str, Any]
) -> None:
    assert doubts(write_config(tmp_path / shape, SHAPES[shape]), space, **site) == []


@pytest.mark.parametrize(
    "broken", [None, 0, -1, "many", [], float("inf"), float("nan")], ids=lambda value: f"heads {value!r}"
)
def test_a_config_that_says_no_size_says_nothing(tmp_path: Path, broken: Any) -> None:
    file = write_config(tmp_path / "8b", SHAPES["8b"]) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_attention_heads": broken}))
    assert doubts(file.parent, LARGE) == []
    for text in ("", "[]", "{}"):
        file.write_text(text)
        assert doubts(file.parent, LARGE) == []


def test_a_length_that_is_no_number_says_nothing(tmp_path: Path) -> None:
    model = write_config(tmp_path / "8b", SHAPES["8b"])
    assert doubts(model, {"SEQ": {"type": "categorical", "choices": ["long", 2.5]}, "MINIBS": 8}) == []
