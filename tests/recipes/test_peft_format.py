"""Which adapters of peft's the Megatron-Bridge recipe goes on with: plain LoRA of q, k, v and o, all of it.

The folders are written by peft itself, of a base with random weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from lora_tune.base.errors import InputError
from lora_tune_recipes.bridge.peft_format import CONFIG, WEIGHTS, check
from lora_tune_recipes.bridge.settings import BridgeSettings, read
from tests.recipes.served import TINY

SIZES = {"HIDDEN": 64, "FFN": 96, "HEADS": 4, "KV_GROUPS": 2, "VOCAB": 256, "LAYERS": 2, "NORM_EPS": 1e-6}
QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(scope="module")
def settings() -> BridgeSettings:
    knobs = {"DATADIR": TINY, "SEQ": 64, "FP8": 0, "LORA_RANK": 4, "LORA_ALPHA": 8, "MAX_STEPS": 2000, **SIZES}
    return read({name: str(value) for name, value in knobs.items()}, 1)


def written(folder: Path, **said: Any) -> Path:
    """A folder with an adapter that peft made and saved."""
    torch.manual_seed(1)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2, vocab_size=256))
    config = LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": QKVO, **said})
    get_peft_model(base, config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal"])
def test_plain_lora_is_taken_however_it_began(tmp_path: Path, settings: BridgeSettings, start: object) -> None:
    check(written(tmp_path, init_lora_weights=start), settings)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_2", "olora", "mica"])
def test_an_adapter_whose_start_changed_the_base_is_refused(
    tmp_path: Path, settings: BridgeSettings, start: str
) -> None:
    """Beside the unchanged base it would be another function, and its losses worse for no reason that shows."""
    with pytest.raises(InputError, match=f"init_lora_weights is '{start}'.*converted to plain LoRA"):
        check(written(tmp_path, init_lora_weights=start), settings)


def test_pissa_that_peft_converted_is_refused_for_its_rank_alone(tmp_path: Path, settings: BridgeSettings) -> None:
    """peft doubles the rank as it converts, so LORA_RANK and LORA_ALPHA have to say so."""
    doubled = written(tmp_path, r=8, lora_alpha=16, init_lora_weights=True)
    with pytest.raises(InputError, match="r is 8; allowed is 4, as LORA_RANK"):
        check(doubled, settings)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"use_rslora": True}, "use_rslora is True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is {'q_proj': 2}"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern is {'q_proj': 2}"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"layers_to_transform": [0]}, r"layers_to_transform is \[0\]"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"trainable_token_indices": [1, 2]}, r"trainable_token_indices is \[1, 2\]"),
        ({"target_modules": ["q_proj", "v_proj"]}, "target_modules are .*allowed are q, k, v and o_proj"),
        ({"target_modules": [*QKVO, "up_proj"]}, "target_modules are .*allowed are q, k, v and o_proj"),
        ({"target_modules": "all-linear"}, "target_modules are .*allowed are q, k, v and o_proj"),
        ({"r": 8}, "r is 8; allowed is 4"),
        ({"lora_alpha": 16}, "lora_alpha is 16; allowed is 8"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_whatever_is_more_or_less_than_plain_lora_is_refused_by_name(
    tmp_path: Path, settings: BridgeSettings, said: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        check(written(tmp_path, **said), settings)


def stated(**values: object) -> Callable[[Path], object]:
    """The configuration says this besides."""

    def state(folder: Path) -> None:
        file = folder / CONFIG
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return state


def renamed(old: str, new: str, *, kept: bool = False) -> Callable[[Path], object]:
    """The tensors of one name have another; ``kept``: as well."""

    def rename(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        moved = {key.replace(old, new): tensor.clone() for key, tensor in tensors.items()}
        save_file({**(tensors if kept else {}), **moved}, folder / WEIGHTS)

    return rename


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: os.truncate(folder / WEIGHTS, 500), "cannot be read"),
        (lambda folder: (folder / WEIGHTS).unlink(), "adapter_model.safetensors is missing"),
        (lambda folder: (folder / CONFIG).write_text("{"), "no readable adapter_config.json"),
        (lambda folder: (folder / CONFIG).write_text("[1]"), "no readable adapter_config.json"),
        (renamed("layers.0", "layers.9", kept=True), "layers.9.self_attn.k_proj.lora_A.weight is in the file"),
        (renamed("layers.1.", "h.1."), "layers.1.self_attn.q_proj.lora_A.weight is missing"),
        (stated(peft_type="IA3"), "peft_type is 'IA3'; allowed is 'LORA'"),
        (stated(target_modules=["c_attn", "c_proj"]), "target_modules are .'c_attn', 'c_proj'."),
        (stated(target_modules=["query_key_value", "dense"]), "target_modules are"),
        (stated(target_modules=[["q_proj"]]), "target_modules are"),
        (stated(target_modules={"q_proj": 1}), "target_modules are"),
        (stated(r=None), "r is None; allowed is 4"),
        (stated(a_variant_of_2027={"scale": 2}), "a_variant_of_2027 is {'scale': 2}; allowed is plain LoRA"),
    ],
)
def test_an_adapter_that_is_damaged_or_of_another_model_is_refused(
    tmp_path: Path, settings: BridgeSettings, damage: Callable[[Path], object], words: str
) -> None:
    folder = written(tmp_path)
    damage(folder)
    with pytest.raises(InputError, match=words):
        check(folder, settings)


@pytest.mark.parametrize(("knob", "value"), [("HEADS", 8), ("KV_GROUPS", 4), ("HIDDEN", 128), ("LAYERS", 3)])
def test_an_adapter_of_another_size_is_refused(tmp_path: Path, knob: str, value: int) -> None:
    knobs = {"DATADIR": TINY, "SEQ": 64, "FP8": 0, "LORA_RANK": 4, "LORA_ALPHA": 8, "MAX_STEPS": 2000, **SIZES}
    other = read({name: str(one) for name, one in {**knobs, knob: value}.items()}, 1)
    folder = written(tmp_path)
    with pytest.raises(InputError, match=r"self_attn\..*; allowed is"):
        check(folder, other)
