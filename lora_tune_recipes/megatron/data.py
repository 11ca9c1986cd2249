"""The packed sequences as inputs of Megatron-Core's models."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from lora_tune_recipes import text
from lora_tune_recipes.megatron.settings import CommonSettings
from lora_tune_recipes.text import Sequences


class NumberedSequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The sequences of these numbers, in this order; -1 is a fully masked sequence."""

    def __init__(self, sequences: Sequences, numbers: npt.NDArray[np.int64]) -> None:
        self._sequences, self._numbers = sequences, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        one = self._sequences.rows(self._numbers[index : index + 1])
        return {name: value[0] for name, value in batch(one).items()}

    @staticmethod
    def collate_fn(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def batch(sequences: Sequences) -> dict[str, torch.Tensor]:
    """The batch of these sequences, all tensors [n, seq].

    ``loss_mask`` holds weights: each sequence has total weight 1, spread evenly over its unmasked predictions (0 if
    there are none), so that the loss is a mean of per-sequence means and ranks need not exchange counts.
    """
    tokens = torch.from_numpy(np.ascontiguousarray(sequences.tokens))
    weights = sequences.mask / np.maximum(1, sequences.mask.sum(axis=1, keepdims=True))
    seq = tokens.shape[1] - 1
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.from_numpy(weights.astype(np.float32)),
        "position_ids": torch.arange(seq).expand(len(tokens), seq).contiguous(),
    }


def synthetic(settings: CommonSettings) -> dict[str, torch.Tensor]:
    """One rank's random batch for a step of the kernel warm-up, the same on every rank."""
    shape = (settings.layout.minibs, settings.seq + 1)
    tokens = np.random.default_rng(0).integers(0, settings.shape.vocab, shape)
    return batch(Sequences(tokens, np.ones((shape[0], settings.seq), np.bool_)))


def load(settings: CommonSettings) -> tuple[Sequences, Sequences]:
    """Training and validation sequences. Raises InputError for files that cannot be used."""
    train, validation = (
        text.load(settings.datadir, split, settings.seq, text.byte_tokens) for split in ("train", "validation")
    )
    text.check(train, validation, settings.shape.vocab, settings.datadir)
    return train, validation.spread(settings.eval_samples) if settings.eval_samples else validation
