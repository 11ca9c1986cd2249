"""One forward pass, its loss, and an evaluation over all sequences in any layout."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from lora_tune_recipes.bridge.data import Batch
from lora_tune_recipes.megatron.attention import zigzag
from lora_tune_recipes.megatron.loss import over_ranks

LOSS = "lm loss"
"""Megatron-Bridge's name of the loss in a step's results."""


def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    """A forward pass without a mask, because every attention used here is causal."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    part = _part_of_context({name: one.to(device, non_blocking=True) for name, one in next(data_iterator).items()})
    losses = model(
        input_ids=part["tokens"], position_ids=part["position_ids"], attention_mask=None, labels=part["labels"]
    )
    return losses, partial(per_sequence_loss, weights=part["loss_mask"])


def per_sequence_loss(losses: torch.Tensor, *, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This rank's share of the mean loss over a micro-batch's sequences, and of the sum, which is reported.

    losses, weights: [mbs, seq/CP]. Megatron-Core multiplies the first by CP, divides it by the micro-batches and
    averages gradients over the data- and context-parallel ranks, so the parts of a sequence add up. The sum is a
    separate tensor because Megatron-Core scales the first in place.
    """
    total = (losses.float() * weights).sum()
    return total / len(losses), {LOSS: total.detach().clone()}


def _part_of_context(whole: Batch) -> Batch:
    """This context-parallel rank's part of each sequence."""
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return whole
    tokens = whole["tokens"]
    held = zigzag(tokens.shape[1], ranks, tokens.device).chunk(ranks)[parallel_state.get_context_parallel_rank()]
    return {name: one[:, held].contiguous() for name, one in whole.items()}


def passes(
    models: list[Any], batches: Iterator[Batch], *, count: int, mbs: int, forward_only: bool, function: Any = None
) -> list[dict[str, torch.Tensor]]:
    """Run ``count`` micro-batches through the pipeline; the last stage's results of ``forward_step``."""
    config, groups = get_model_config(models[0]), get_pg_collection(models[0])
    function = function or forward_backward(models)
    chunks = [iter(own) for own in _copies(batches, len(models), count)]
    result: list[dict[str, torch.Tensor]] = function(
        forward_step_func=forward_step,
        data_iterator=chunks if len(models) > 1 else chunks[0],
        model=models,
        num_microbatches=count,
        seq_length=config.seq_length,
        micro_batch_size=mbs,
        decoder_seq_length=config.seq_length,
        forward_only=forward_only,
        p2p_communicator=P2PCommunicator(pp_group=groups.pp, config=config),
        pg_collection=groups,
    )
    return result


def forward_backward(models: list[Any]) -> Any:
    """Megatron-Core's schedule for the layout of these chunks."""
    groups = get_pg_collection(models[0])
    return get_forward_backward_func(
        pp_size=groups.pp.size(), vp_size=get_model_config(models[0]).virtual_pipeline_model_parallel_size
    )


def _copies(batches: Iterator[Batch], chunks: int, count: int) -> list[list[Batch]]:
    """The same micro-batches for each chunk of a virtual pipeline."""
    held = [next(batches) for _ in range(count)]
    return [held] * chunks


def evaluate(models: list[Any], batches: list[Batch], sequences: int, *, mbs: int) -> float:
    """The mean over ``sequences`` sequences of each one's mean loss; the same on every rank."""
    training = [model.training for model in models]
    for model in models:
        model.eval()
    with torch.no_grad():
        results = passes(models, iter(batches), count=len(batches), mbs=mbs, forward_only=True)
    for model, was in zip(models, training, strict=True):
        model.train(was)
    device = next(models[0].parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for one in results:
        total += one[LOSS].double()
    return over_ranks(total) / sequences
