"""Parts of the Megatron-Bridge recipe that need neither it nor a GPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from lora_tune.base.errors import InputError
from lora_tune_recipes import packed_data
from lora_tune_recipes.bridge import settings
from lora_tune_recipes.bridge.imports import StandIns, present
from lora_tune_recipes.megatron.data import load


def test_a_stand_in_is_imported_and_never_called() -> None:
    finder = StandIns(["absent_package"])
    try:
        deep = importlib.import_module("absent_package.deep.module")
        assert isinstance(deep.Name, type)
        assert not isinstance(3, deep.Name)
        assert not present("absent_package")
        with pytest.raises(RuntimeError, match=r"absent_package\.deep\.module\.Name was called"):
            deep.Name()
    finally:
        finder.remove()
    assert "absent_package" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent_package")


def test_what_is_installed_is_present() -> None:
    assert present("json")
    assert not present("no_such_package_at_all")
    assert not present("no_such_package.below_it")


ROW = {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 1, 1, 1, 1], "seq_start_id": [0]}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "validation: no sequences; allowed is one at least"),
        ([ROW, {**ROW, "loss_mask": [0] * 5}], "validation: sequence 1 has no token that counts"),
        ([{**ROW, "input_ids": [1, 2, 3, 4, 256]}], "validation: tokens from 1 to 256"),
    ],
    ids=["empty", "nothing counts", "another vocabulary"],
)
def test_validation_data_that_have_no_mean_loss_are_refused(tmp_path: Path, rows: list[object], words: str) -> None:
    """A sequence without a token that counts would count as one of loss 0: the target would come too early."""
    for split, held in (("train", [ROW]), ("validation", rows)):
        packed_data.write(tmp_path, split, np.array(held, dtype=object))
    knobs = {"DATADIR": str(tmp_path), "SEQ": "4", "LLAMA": "small", "FP8": "0", "MAX_STEPS": "2000"}
    with pytest.raises(InputError, match=words):
        load(settings.read(knobs, 1))
