"""Distributed checkpoints of NeMo and Megatron-Bridge: what is refused before a model is built for them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as torch_dist

from lora_tune.base.errors import InputError
from lora_tune.base.llama import SHAPES
from lora_tune_recipes.megatron import hf
from lora_tune_recipes.megatron.checkpoint import check, expected, is_nemo, weights_folder
from tests.conftest import REPOSITORY

SHAPE = SHAPES["tiny"]
BASE = REPOSITORY / "lora_tune_recipes" / "tiny"
Damage = Callable[[Path], object]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """v6.0's form, whole."""
    folder = tmp_path / "iter_0000000"
    tensors = {key: torch.zeros(size) for key, size in expected(SHAPE).items()}
    torch_dist.save(tensors, checkpoint_id=folder, no_dist=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("0\n")
    return tmp_path


def test_a_whole_checkpoint_is_taken(model: Path) -> None:
    check(model, SHAPE)
    assert weights_folder(model) == model / "iter_0000000"
    assert not is_nemo(weights_folder(model))


def weights(model: Path) -> Path:
    (file,) = (model / "iter_0000000").glob("*.distcp")
    return file


DISTRIBUTED: dict[str, tuple[Damage, str]] = {
    "a file lost": (lambda model: weights(model).unlink(), "__0_0.distcp is missing; .metadata says"),
    "a copy cut off": (
        lambda model: weights(model).write_bytes(weights(model).read_bytes()[:-1]),
        "bytes; .metadata says",
    ),
    "an empty file": (lambda model: weights(model).write_bytes(b""), "__0_0.distcp has 0 bytes"),
    "metadata cut off": (
        lambda model: (model / "iter_0000000/.metadata").write_bytes(b"\x80"),
        ".metadata cannot be read",
    ),
    "foreign metadata": (
        lambda model: (model / "iter_0000000/.metadata").write_bytes(pickle.dumps({"a": 1})),
        ".metadata cannot be read",
    ),
    "another iteration named": (
        lambda model: (model / "latest_checkpointed_iteration.txt").write_text("7"),
        "no checkpoint of NeMo or Megatron-Bridge",
    ),
    "a path named": (
        lambda model: (model / "latest_checkpointed_iteration.txt").write_text("../other/iter_0000000"),
        "no checkpoint of NeMo or Megatron-Bridge",
    ),
    "bytes that are no text": (
        lambda model: (model / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\xfe"),
        "no checkpoint of NeMo or Megatron-Bridge",
    ),
}


@pytest.mark.parametrize("damage", DISTRIBUTED)
def test_a_damaged_checkpoint_is_refused_in_one_line_before_a_model_is_built(model: Path, damage: str) -> None:
    done, words = DISTRIBUTED[damage]
    done(model)
    with pytest.raises(InputError) as caught:
        check(model, SHAPE)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """The shipped base, a Hugging Face folder of one's own."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(BASE / name, tmp_path)
    return tmp_path


def stated(**values: object) -> Damage:
    def state(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return state


def held(**tensors: torch.Tensor | None) -> Damage:
    """Tensors by name, with __ for a dot, put into the file or taken out of it."""

    def hold(folder: Path) -> None:
        file = folder / "model.safetensors"
        kept = {**load_file(file), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
        save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, file)

    return hold


HUGGING_FACE: dict[str, tuple[Damage, str]] = {
    "a copy cut off": (
        lambda folder: os.truncate(folder / "model.safetensors", 5000),
        "cannot be read: SafetensorError",
    ),
    "an index of files that are not there": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
        "cannot be read: FileNotFoundError",
    ),
    "an index cut off": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
        "cannot be read: JSONDecodeError",
    ),
    "a tensor lost": (held(model__norm__weight=None), "model.norm.weight is not in the checkpoint"),
    "another vocabulary": (
        held(lm_head__weight=torch.zeros(255, 128)),
        "lm_head.weight is (255, 128), config.json asks",
    ),
    "quantized weights": (
        held(lm_head__weight=torch.zeros(256, 128, dtype=torch.int8)),
        "lm_head.weight holds I8; allowed is one of BF16",
    ),
    "more than is described": (held(lm_head__bias=torch.zeros(256)), "lm_head.bias is in the checkpoint, but"),
    "more layers": (stated(num_hidden_layers=3), "model.layers.3.input_layernorm.weight is in the checkpoint, but"),
    "biases": (stated(mlp_bias=True), "mlp_bias is True; allowed is a Llama without it"),
    "another activation": (stated(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "heads of another width": (stated(head_dim=64), "head_dim is 64"),
    "a quantized model": (stated(quantization_config={"quant_method": "gptq"}), "quantization_config is"),
}


@pytest.mark.parametrize("damage", HUGGING_FACE)
def test_what_is_no_plain_llama_is_refused_in_one_line_before_a_model_is_built(llama: Path, damage: str) -> None:
    """What a file holds and nobody reads would be left out of the model without a word."""
    done, words = HUGGING_FACE[damage]
    check(llama, hf.shape_of(llama))
    done(llama)
    with pytest.raises(InputError) as caught:
        check(llama, hf.shape_of(llama))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_follows_from_the_configuration_may_lie_in_the_file(llama: Path) -> None:
    held(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(16))(llama)
    check(llama, hf.shape_of(llama))


def test_a_checkpoint_of_another_model_is_refused(model: Path) -> None:
    with pytest.raises(InputError, match="give the checkpoint's shape"):
        check(model, SHAPES["small"])
