"""Many adapters at once train what each of them trains alone, and what the PEFT recipe trains."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lora_tune.base.errors import InputError
from lora_tune_recipes import many_adapters, text
from lora_tune_recipes import settings as knobs
from lora_tune_recipes.packed.pack import Pack
from lora_tune_recipes.ranks import connect
from lora_tune_recipes.schedule import learning_rate
from lora_tune_recipes.settings import Settings
from lora_tune_recipes.trainer import DROPOUT_SEEDS, Trainer

FIXED: dict[str, object] = {"MAX_STEPS": 12, "VAL_CHECK_INTERVAL": 20, "EVAL_SAMPLES": 4, "SEQ": 64, "LORA_DROPOUT": 0}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def single_trial(settings: Settings) -> list[float]:
    """The eval losses of the PEFT recipe's own trainer."""
    trainer = Trainer(settings, connect(settings))
    torch.manual_seed(settings.seed + DROPOUT_SEEDS)
    train = text.load(settings.datadir, "train", settings.seq, text.byte_tokens)
    validation = text.load(settings.datadir, "validation", settings.seq, text.byte_tokens)
    validation = validation.spread(settings.eval_samples)
    order = text.order(len(train), settings.minibs, settings.seed)
    losses = []
    for step in range(settings.max_steps):
        lr = learning_rate(
            step,
            peak=settings.lr,
            floor=settings.min_lr,
            warmup_steps=settings.warmup_steps,
            max_steps=settings.max_steps,
        )
        trainer.step(train.rows(next(order)), lr)
        if (step + 1) % settings.interval(settings.minibs) == 0 or step + 1 == settings.max_steps:
            losses.append(trainer.evaluate(validation))
    return losses


def test_each_of_several_trains_what_the_recipe_trains() -> None:
    varied = {"LR": [1e-3, 2e-2], "WARMUP_STEPS": [0, 5], "SEED": [1, 2]}
    grid = {**FIXED, **varied, "WEIGHT_DECAY": 0.1, "GRAD_CLIP": 0.5, "MIN_LR": 1e-4}
    table = many_adapters.run(grid, tokens=5 * 4 * 64)
    for row, point in enumerate(many_adapters.points(grid)):
        alone = single_trial(knobs.read({name: str(value) for name, value in point.items()}))
        assert table["eval_loss"][row].tolist() == pytest.approx(alone, abs=3e-5)
        assert all(table[name][row] == value for name, value in point.items())


def test_trials_of_different_length_and_batch_share_a_table() -> None:
    grid = {**FIXED, "MAX_STEPS": [5, 12], "MINIBS": [2, 4]}
    table = many_adapters.run(grid, tokens=4096)
    nan = float("nan")
    expected = [[10, nan, nan], [20, nan, nan], [20, 24, nan], [20, 40, 48]]
    np.testing.assert_array_equal(table["samples"], expected)
    np.testing.assert_array_equal(np.isnan(table["eval_loss"]), np.isnan(table["samples"]))


def test_out_of_time_leaves_whole_trials_out() -> None:
    table = many_adapters.run({**FIXED, "MAX_STEPS": [2, 3]}, tokens=1, seconds=0.0)
    assert table["MAX_STEPS"].tolist() == []
    assert json.loads(table["meta"])["left_out"] == 2


def test_what_does_not_fit_the_memory_leaves_the_rest_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Pack.round

    def short_at_rank_16(pack: Pack) -> object:
        if pack.slots[0].settings.adapters.rank == 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rounds(pack)

    monkeypatch.setattr(Pack, "round", short_at_rank_16)
    table = many_adapters.run({**FIXED, "MAX_STEPS": 2, "LORA_RANK": [16, 4]}, tokens=2**18)
    assert table["LORA_RANK"].tolist() == [4]
    assert json.loads(table["meta"])["left_out"] == 1


def test_every_trial_is_in_one_pass_of_its_own_kind() -> None:
    grid = {"MAX_STEPS": [10, 20], "LR": [1e-3, 2e-3, 3e-3], "MODEL": str(knobs.TINY)}
    trials = [knobs.read({k: str(v) for k, v in point.items()}) for point in many_adapters.points(grid)]
    together = list(many_adapters.passes(trials, tokens=2 * 4 * 128 + 9))
    assert together == [[0, 1], [2], [3, 4], [5]]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"LR": []}, "grid: LR: allowed is a value or a list of at least one"),
        ({"TARGET": 1.6}, "grid: TARGET: has no place here"),
        ({"TP": 2}, "grid: TP: has no place here"),
        ({"FSDP": 1}, "FSDP=1: a trial in a pack has one process; allowed is 0"),
        ({"LR": [1, "x"]}, "LR='x': allowed is"),
    ],
)
def test_a_bad_grid_is_refused(grid: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        many_adapters.run(grid, tokens=1)


def test_program_writes_a_table_that_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = tmp_path / "grid.json"
    grid.write_text(json.dumps({**FIXED, "MAX_STEPS": 5, "SEED": [1, 2]}))
    out = tmp_path / "tables" / "tiny.npz"
    assert many_adapters.main(["--grid", str(grid), "--out", str(out)]) == 0
    table = np.load(out)
    assert table["SEED"].tolist() == [1, 2]
    assert json.loads(str(table["meta"]))["task"] == "tiny"
    assert many_adapters.main(["--grid", str(tmp_path / "none.json"), "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith("many_adapters: --grid ")
