"""The packed sequences as an iterator for Megatron-Bridge, in the recipes' order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.bridge.training.config import DatasetProvider
from megatron.core import parallel_state

from lora_tune_recipes import text
from lora_tune_recipes.bridge.settings import BridgeSettings
from lora_tune_recipes.megatron.data import NumberedSequences, batch, load
from lora_tune_recipes.text import Sequences

Batch = dict[str, torch.Tensor]


@dataclass(kw_only=True)
class BridgeData(DatasetProvider):
    """``train`` and ``validation`` of the data folder.

    The order of the training data depends only on the seed and the global batch, so that every layout of one global
    batch reads the same. Megatron-Bridge calls ``build_datasets`` once per chunk of a virtual pipeline.
    """

    settings: Any
    train: Any
    validation: Any
    dataloader_type: Any = "external"

    def build_datasets(self, context: Any) -> tuple[Any, None, None]:
        """The iterator over this rank's micro-batches; no evaluation data, because Run evaluates."""
        return _training_batches(self.settings, self.train, pin_memory=self.pin_memory), None, None


def packed_data(settings: BridgeSettings, *, cuda: bool) -> BridgeData:
    """The data of these settings. Raises InputError if it cannot be used."""
    train, validation = load(settings)
    workers = settings.speed.workers
    return BridgeData(settings=settings, train=train, validation=validation, num_workers=workers, pin_memory=cuda)


def _training_batches(settings: BridgeSettings, train: Sequences, *, pin_memory: bool) -> Iterator[Batch]:
    layout = settings.layout
    steps = itertools.islice(text.order(len(train), layout.batch, settings.seed), settings.max_steps)
    rank = parallel_state.get_data_parallel_rank()
    own = np.concatenate([numbers[rank * layout.minibs : (rank + 1) * layout.minibs] for numbers in steps])
    rows = NumberedSequences(train, own)
    return iter(
        torch.utils.data.DataLoader(
            rows,
            batch_size=layout.mbs,
            collate_fn=rows.collate_fn,
            num_workers=settings.speed.workers,
            pin_memory=pin_memory,
            persistent_workers=settings.speed.workers > 0,
        )
    )


def evaluation_batches(settings: BridgeSettings, validation: Sequences) -> list[Batch]:
    """This rank's share of an evaluation, padded with masked sequences to equal counts on all ranks."""
    size, layout = settings.speed.val_mbs, settings.layout
    own = share(len(validation), size * layout.turn, parallel_state.get_data_parallel_rank(), layout.dp)
    return [batch(validation.rows(own[i : i + size])) for i in range(0, len(own), size)]


def share(count: int, size: int, rank: int, ranks: int) -> npt.NDArray[np.int64]:
    """Indices of the sequences that ``rank`` of ``ranks`` evaluates, ``size`` at a time; -1 is padding.

    Every sequence below ``count`` belongs to one rank, and all ranks have equally many, a multiple of ``size``.
    """
    turns = -(-count // (size * ranks))
    numbers = np.arange(rank, turns * size * ranks, ranks)
    return np.where(numbers < count, numbers, -1)
