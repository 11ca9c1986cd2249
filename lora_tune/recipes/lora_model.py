"""The base model from its checkpoint folder, with LoRA adapters on the attention's projections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM

from lora_tune.errors import InputError
from lora_tune.recipes import text
from lora_tune.recipes.ranks import precision
from lora_tune.recipes.settings import Settings

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def build(settings: Settings) -> Any:
    """The frozen base with fresh adapters in float32; draws from torch's random state.

    Raises InputError where the folder holds no Llama checkpoint or one whose weights do not match its config.
    """
    try:
        config = LlamaConfig.from_pretrained(settings.model)
    except (OSError, ValueError) as error:
        raise InputError(f"MODEL={str(settings.model)!r}: no usable config.json: {_line(error)}") from error
    if config.model_type != "llama":
        raise InputError(f"MODEL={str(settings.model)!r}: model_type {config.model_type!r}; allowed is llama")
    if settings.seq > config.max_position_embeddings:
        raise InputError(
            f"SEQ={settings.seq}: allowed is at most the model's {config.max_position_embeddings} positions"
        )
    dtype = torch.bfloat16 if precision(settings) == "bf16" else torch.float32
    try:
        base = LlamaForCausalLM.from_pretrained(
            settings.model, config=config, dtype=dtype, attn_implementation=settings.attn
        )
    except (OSError, RuntimeError, ValueError, ImportError, SafetensorError) as error:
        raise InputError(f"MODEL={str(settings.model)!r}: weights not loaded: {_line(error)}") from error
    base.config.use_cache = False
    adapters = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=list(TARGETS),
    )
    return get_peft_model(base, adapters)


def tokenizer(folder: Path) -> text.Tokenize:
    """The checkpoint's own tokenizer; bytes where it ships none."""
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer.model").is_file():
        return text.byte_tokens
    from transformers import AutoTokenizer  # only here: half a second that the byte model does without

    own = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return lambda stream: list(own(stream, add_special_tokens=False).input_ids)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
