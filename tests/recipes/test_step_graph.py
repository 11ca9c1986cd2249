"""A step as a CUDA graph, and compiled layers: when they are used, and that they train the same thing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, MistralConfig

from lora_tune.base.errors import InputError
from lora_tune_recipes import settings as knobs
from lora_tune_recipes.lora_model import build
from lora_tune_recipes.ranks import connect, refuse
from lora_tune_recipes.step_graph import CAUSAL, is_plainly_causal, why_eager
from lora_tune_recipes.text import Sequences
from lora_tune_recipes.trainer import Trainer

NO_DROPOUT = {"LORA_DROPOUT": "0", "MINIBS": "2", "SEQ": "32"}


def sequences(count: int, seq: int) -> Sequences:
    tokens = np.random.default_rng(7).integers(0, 256, (count, seq + 1))
    return Sequences(tokens, np.ones((count, seq), np.bool_))


def losses(steps: int, **variables: str) -> list[float]:
    """Of the same steps, and of an eval after them; from fresh adapters after a warm-up."""
    settings = knobs.read({**NO_DROPOUT, **variables})
    trainer = Trainer(settings, connect(settings))
    trainer.warm_up()
    data = sequences(2 * steps, settings.seq)
    every = [float(trainer.step(data.rows(np.arange(2 * i, 2 * i + 2)), 1e-3 * (1 + i))) for i in range(steps)]
    return [*every, trainer.evaluate(data.rows(np.arange(4)))]


@pytest.mark.parametrize(
    ("variables", "device", "world", "reason"),
    [
        ({}, "cuda", 1, ""),
        ({}, "cpu", 1, "GPU"),
        ({}, "cuda", 2, "one process"),
        ({"RECOMPUTE_GRANULARITY": "full"}, "cuda", 1, "random numbers"),
        ({"PACKING": "1"}, "cuda", 1, "PACKING=1"),
        ({"ATTN": "eager"}, "cuda", 1, "ATTN=eager"),
        ({"LOAD_IN_4BIT": "nf4"}, "cuda", 1, "4-bit"),
        ({"WARMUP": "0"}, "cuda", 1, "warm-up"),
    ],
)
def test_a_step_is_recorded_on_one_gpu_where_nothing_looks_at_values_on_the_host(
    variables: dict[str, str], device: str, world: int, reason: str
) -> None:
    why = why_eager(knobs.read(variables), device, world)
    assert (reason in why) if reason else why == ""


def test_a_graph_that_is_asked_for_and_cannot_be_is_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match="CUDA_GRAPH=1: it needs a CUDA GPU; allowed is auto or 0"):
        refuse(knobs.read({"CUDA_GRAPH": "1"}), 1, cuda=False)
    with pytest.raises(InputError, match="TORCH_COMPILE=1 with 2 processes"):
        refuse(knobs.read({"TORCH_COMPILE": "1"}), 2, cuda=True)


def test_layers_that_attend_to_a_part_of_the_sequence_are_known_by_the_config() -> None:
    assert is_plainly_causal(LlamaConfig(), 4096)
    assert is_plainly_causal(MistralConfig(sliding_window=64), 64)
    assert not is_plainly_causal(MistralConfig(sliding_window=64), 65)
    assert not is_plainly_causal(LlamaConfig(layer_types=["linear_attention"] * 32), 8)


def test_attention_without_a_mask_is_the_causal_one() -> None:
    model = build(knobs.read(NO_DROPOUT)).eval()
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    masked = model(input_ids=tokens, use_cache=False).logits
    model.get_base_model().set_attn_implementation(CAUSAL)
    torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, masked)


def test_compiled_layers_train_as_eager_ones() -> None:
    assert losses(2, TORCH_COMPILE="1") == pytest.approx(losses(2), rel=1e-4)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="records CUDA graphs; python -m benchmarks.gpu.fast_step, too"
)
@pytest.mark.parametrize("compiled", ["0", "1"])
@pytest.mark.parametrize("passes", ["2", "1"])
def test_a_recorded_step_trains_as_an_eager_one(compiled: str, passes: str) -> None:
    graph = losses(6, CUDA_GRAPH="1", TORCH_COMPILE=compiled, MBS=passes)
    assert graph == pytest.approx(losses(6, CUDA_GRAPH="0", MBS=passes), rel=1e-2)
