"""Adapters of every kind train, are saved in peft's format, and have the same loss when they are loaded elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lora_tune.base.errors import InputError
from lora_tune_recipes import settings as knobs
from lora_tune_recipes import text
from lora_tune_recipes.batch import Batch, weighted_losses
from lora_tune_recipes.lora_model import load_base
from lora_tune_recipes.packed import checkpoint
from lora_tune_recipes.packed.base import PackedBase
from lora_tune_recipes.packed.pack import Pack
from lora_tune_recipes.packed.slot import Slot
from lora_tune_recipes.ranks import connect
from lora_tune_recipes.settings import Settings
from lora_tune_recipes.text import Sequences
from lora_tune_recipes.trainer import Trainer
from tests.recipes.test_many_adapters import single_trial

FEW: dict[str, object] = {"MAX_STEPS": 3, "SEQ": 32, "EVAL_SAMPLES": 3, "VAL_CHECK_INTERVAL": 1000, "LORA_DROPOUT": 0}


def trial(**changed: object) -> Settings:
    return knobs.read({name: str(value) for name, value in {**FEW, **changed}.items()})


def validation_of(settings: Settings) -> Sequences:
    return text.load(settings.datadir, "validation", settings.seq, text.byte_tokens).spread(settings.eval_samples)


@torch.no_grad()
def loss_elsewhere(settings: Settings, folder: Path) -> float:
    """What peft makes of the saved adapter, without our code between."""
    model = PeftModel.from_pretrained(load_base(settings), folder).eval()
    batch = Batch.of(validation_of(settings), torch.device("cpu"))
    logits = model(input_ids=batch.read).logits
    return float(weighted_losses(logits, batch.predict, batch.weight).sum(1).mean())


@pytest.mark.parametrize(
    "changed",
    [
        {"LORA_TARGETS": "all", "RSLORA": 1},
        {"RANK_PATTERN": "q_proj=32,v_proj=4", "ALPHA_PATTERN": "v_proj=64"},
        {"DORA": 1, "LORA_PLUS_RATIO": 4},
        {"LORA_TARGETS": "embed_tokens,q_proj"},
        {"RECOMPUTE_GRANULARITY": "full", "LORA_RANK": 4},
        {"MODULES_TO_SAVE": "lm_head,norm"},
    ],
)
def test_a_saved_adapter_has_the_same_loss_elsewhere(tmp_path: Path, changed: dict[str, object]) -> None:
    settings = trial(**changed)
    trainer = Trainer(settings, connect(settings))
    train = text.load(settings.datadir, "train", settings.seq, text.byte_tokens)
    before = trainer.evaluate(validation_of(settings))
    for step in range(settings.max_steps):
        trainer.step(train.rows(np.arange(4) + 4 * step), 1e-3)
    after = trainer.evaluate(validation_of(settings))
    assert after != before
    trainer.save_adapter(tmp_path / "adapter")
    assert loss_elsewhere(settings, tmp_path / "adapter") == pytest.approx(after, abs=3e-5)


def test_an_adapter_over_four_bits_trains_alike_alone_in_a_pack_and_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="QLoRA needs lora-tune[qlora]")
    settings = trial(LOAD_IN_4BIT="nf4")
    base = PackedBase(settings)
    pack, slot = Pack(base), Slot(settings, base.texts(settings))
    pack.join(Slot(trial(LOAD_IN_4BIT="nf4", SEED=3), base.texts(settings)))
    pack.join(slot)
    while slot.step < settings.max_steps:
        pack.round()
    found = pack.evaluate([slot])[0]
    assert found == pytest.approx(single_trial(settings)[-1], abs=3e-5)
    assert found != pytest.approx(single_trial(trial())[-1], abs=1e-3), "four bits are not thirty-two"
    checkpoint.save_adapter(tmp_path / "adapter", pack.group(slot), slot)
    assert loss_elsewhere(settings, tmp_path / "adapter") == pytest.approx(found, abs=3e-5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"MODULES_TO_SAVE": "head"}, "MODULES_TO_SAVE: this model has no module head; allowed are"),
        ({"MODULES_TO_SAVE": "q_proj"}, "MODULES_TO_SAVE: q_proj is in LORA_TARGETS; allowed is one of the two"),
    ],
)
def test_a_whole_module_that_cannot_be_trained_is_refused(changed: dict[str, object], message: str) -> None:
    settings = trial(**changed)
    with pytest.raises(InputError, match=message):
        Trainer(settings, connect(settings))


@pytest.mark.parametrize(
    "changed",
    [
        {"LORA_TARGETS": "all", "RSLORA": 1, "RANK_PATTERN": "down_proj=16", "ALPHA_PATTERN": "q_proj=8"},
        {"LORA_TARGETS": "embed_tokens,lm_head,q_proj", "DORA": 1},
        {"MODULES_TO_SAVE": "lm_head,norm", "LR": 1e-2},
    ],
)
def test_an_adapter_out_of_a_pack_has_the_same_loss_elsewhere(tmp_path: Path, changed: dict[str, object]) -> None:
    settings = trial(LORA_RANK=8, **changed)
    base = PackedBase(settings)
    pack, slot = Pack(base), Slot(settings, base.texts(settings))
    pack.join(Slot(trial(SEED=3), base.texts(settings)))
    pack.join(slot)
    before = pack.evaluate([slot])[0]
    while slot.step < settings.max_steps:
        pack.round()
    found = pack.evaluate([slot])[0]
    assert abs(found - before) > 0.01
    checkpoint.save_adapter(tmp_path / "adapter", pack.group(slot), slot)
    assert loss_elsewhere(settings, tmp_path / "adapter") == pytest.approx(found, abs=3e-5)


def qwen3() -> Any:
    config = Qwen3Config(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def gpt_neox() -> Any:
    config = GPTNeoXConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "targets", "dora"),
    [
        (qwen3, "all", 0),
        (qwen3, "embed_tokens,v_proj", 1),
        (gpt_neox, "query_key_value,dense_4h_to_h", 0),
        (gpt_neox, "query_key_value,embed_in", 1),
    ],
    ids=["qwen3", "qwen3, tied embeddings", "gpt_neox", "gpt_neox, with biases"],
)
def test_other_causal_models_train_in_a_pack_what_they_train_alone(
    tmp_path: Path, make: Any, targets: str, dora: int
) -> None:
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "model")
    common = {"MODEL": tmp_path / "model", "LORA_TARGETS": targets, "DATADIR": knobs.TINY, "DORA": dora}
    settings = trial(**common)
    base = PackedBase(settings)
    pack, slot = Pack(base), Slot(settings, base.texts(settings))
    pack.join(Slot(trial(**common, SEED=3), base.texts(settings)))
    pack.join(slot)
    while slot.step < settings.max_steps:
        pack.round()
    assert pack.evaluate([slot]) == pytest.approx(single_trial(settings)[-1:], abs=3e-5)
