"""Sequences on the device, and the loss of MLPerf's LoRA benchmark over them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from lora_tune_recipes.text import Sequences


class Batch(NamedTuple):
    """Tensors [n, seq] on the device.

    read: input tokens. predict: the token after each. weight: of each prediction. position: of each token in its
    sample.
    """

    read: torch.Tensor
    predict: torch.Tensor
    weight: torch.Tensor
    position: torch.Tensor

    @classmethod
    def of(cls, sequences: Sequences, device: torch.device) -> Batch:
        """Each sequence has weight 1, spread over its predictions: the loss is MLPerf's mean of per-sequence means."""
        tokens = torch.from_numpy(np.ascontiguousarray(sequences.tokens)).to(device)
        weight = sequences.mask / np.maximum(1, sequences.mask.sum(axis=1, keepdims=True))
        read = tokens[:, :-1]
        positions = torch.arange(read.shape[1], device=device).expand_as(read)
        if sequences.positions is not None:
            positions = torch.from_numpy(np.ascontiguousarray(sequences.positions)).to(device)
        return cls(
            read,
            tokens[:, 1:],
            torch.from_numpy(weight.astype(np.float32)).to(device),
            positions,
        )

    def split(self, size: int) -> list[Batch]:
        """Batches of ``size`` sequences."""
        return [Batch(*parts) for parts in zip(*(tensor.split(size) for tensor in self), strict=True)]


def weighted_losses(logits: torch.Tensor, predict: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The weighted cross entropy of each prediction: [n, seq] of logits [n, seq, vocabulary]."""
    losses = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), predict.flatten(), reduction="none")
    return losses.view_as(weight) * weight
