"""The first trial that runs out of memory says what no other trial needs to try, whatever its other parameters are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.config.study import parse_study
from lora_tune.search.session import SearchPoint, Session
from lora_tune.search.sizes import is_size, smaller
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Trial, Verdict

STUDY = """
objective = { metric = "val_loss" }
budget = { trials = 60 }
[workload]
kind = "command"
argv = ["train", "--lr={LR}", "--bs={BATCH_SIZE}", "--r={LORA_RANK}"]
log = { kind = "regex", eval = 'step (?P<step>\\d+) val_loss (?P<val_loss>\\S+)', loss = "val_loss" }
[space]
LR = { type = "float", low = 1e-5, high = 1e-2, log = true }
BATCH_SIZE = { type = "categorical", choices = [8, 16, 32, 64] }
LORA_RANK = { type = "categorical", choices = [8, 16, 32] }
[search]
sampler = "SAMPLER"
"""


@pytest.mark.parametrize("sampler", ["random", "tpe", "auto"])
def test_no_size_that_died_is_proposed_again_nor_a_larger_one(sampler: str) -> None:
    text = STUDY.replace("SAMPLER", sampler).replace(', loss = "val_loss"', "").replace("<val_loss>", "<loss>")
    study = parse_study(text.replace('metric = "val_loss"', 'metric = "loss"'), Path("mine.toml"))
    session, died = Session(study), list[dict[str, Any]]()
    for _ in range(40):
        asked = session.ask()
        assert isinstance(asked, SearchPoint)
        sizes = {name: asked.tuned[name] for name in ("BATCH_SIZE", "LORA_RANK")}
        again = [d for d in died if all(sizes[n] >= d[n] for n in sizes)]
        assert not again, f"{sizes} after {again}"
        needed = sizes["BATCH_SIZE"] * (64 + sizes["LORA_RANK"])
        trial = Trial(number=asked.number, seed=1, tuned=asked.tuned, parameters=asked.tuned)
        if needed > 2000:
            died.append(sizes)
            session.tell(trial.finished(Verdict.INFEASIBLE, "infeasible: CUDA out of memory", 1.0))
        else:
            reached = replace(trial, metrics=TrialMetrics(objective=1.0 + asked.tuned["LR"], node_hours=0.1))
            session.tell(reached.finished(Verdict.REACHED, "it ended", 1.0))
    assert 1 <= len(died) <= 6, "each of them something new"


def test_what_a_person_asks_for_is_run_as_it_stands() -> None:
    text = STUDY.replace("SAMPLER", "random").replace(', loss = "val_loss"', "").replace("<val_loss>", "<loss>")
    study = parse_study(text.replace('metric = "val_loss"', 'metric = "loss"'), Path("mine.toml"))
    session = Session(study)
    large = {"LR": 1e-3, "BATCH_SIZE": 64, "LORA_RANK": 32}
    for _ in range(2):
        session.enqueue(large, "by hand", 1)
        asked = session.ask()
        assert isinstance(asked, SearchPoint)
        assert asked.tuned == large
        trial = Trial(number=asked.number, seed=1, tuned=asked.tuned, parameters=asked.tuned)
        session.tell(trial.finished(Verdict.INFEASIBLE, "infeasible: CUDA out of memory", 1.0))


CHOICES = {"BATCH_SIZE": [8, 16, 32], "LORA_RANK": [4, 8]}
POINT = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()})


@given(POINT, st.lists(POINT, max_size=4), st.lists(POINT, max_size=4))
def test_sizes_give_way_only_to_deaths_that_no_survivor_refutes(
    point: dict[str, int], died: list[dict[str, int]], lived: list[dict[str, int]]
) -> None:
    def reaches(one: dict[str, int], other: dict[str, int]) -> bool:
        return all(one[name] >= other[name] for name in CHOICES)

    believed = [d for d in died if not any(reaches(other, d) for other in lived)]
    moved = {**point, **smaller(point, CHOICES, died, lived)}
    if not any(reaches(point, d) for d in believed):
        assert moved == point
    elif any(not any(reaches(other, d) for d in believed) for other in [{"BATCH_SIZE": 8, "LORA_RANK": 4}]):
        assert not any(reaches(moved, d) for d in believed)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("BATCH_SIZE", True), ("per_device_train_batch_size", True), ("LORA_RANK", True), ("MAX_SEQ_LEN", True),
        ("block_size", True), ("MINIBS", True), ("LR", False), ("GLOBAL_BATCH_SIZE", False), ("WARMUP_STEPS", False),
        ("ACCUMULATION", False),
    ],
)  # fmt: skip
def test_which_names_are_sizes(name: str, size: bool) -> None:
    assert is_size(name, 8) == size
    assert not is_size(name, "8")
