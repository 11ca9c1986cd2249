"""The packed sequences as NeMo reads them."""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch
from nemo.lightning.data import WrappedDataLoader
from nemo.lightning.pytorch.plugins import MegatronDataSampler

from lora_tune.base.errors import InputError
from lora_tune.recipes import text
from lora_tune.recipes.nemo.settings import Settings
from lora_tune.recipes.text import Sequences


class IdTokenizer:
    """The data already holds token numbers; NeMo asks only for these."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.bos_id, self.eos_id, self.pad_id = 1, 2, 2


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The sequences of these numbers, in this order; number -1 is a sequence in which nothing counts."""

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
    """NeMo's batch of these sequences, all tensors [n, seq].

    ``loss_mask`` holds weights: each sequence counts 1, spread evenly over its predictions that count (0 where none
    does), so that the loss is a mean of per-sequence means and needs no communication to find the counts.
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


def synthetic(settings: Settings) -> dict[str, torch.Tensor]:
    """One rank's random batch for a step of the kernel warm-up, the same on every rank."""
    shape = (settings.layout.minibs, settings.seq + 1)
    tokens = np.random.default_rng(0).integers(0, settings.shape.vocab, shape)
    return batch(Sequences(tokens, np.ones((shape[0], settings.seq), np.bool_)))


class PackedData(pl.LightningDataModule):
    """``train`` and ``validation`` of ``DATADIR``; every validation sequence is read once in each evaluation.

    The order of the training data depends on the seed and the global batch only, so that every layout of one global
    batch reads the same. Raises InputError for data that cannot be used.
    """

    def __init__(self, settings: Settings, *, pin_memory: bool) -> None:
        super().__init__()
        layout = settings.layout
        self.seq_length, self.micro_batch_size, self.global_batch_size = settings.seq, layout.mbs, layout.batch
        self.tokenizer = IdTokenizer(settings.shape.vocab)
        self.data_sampler = MegatronDataSampler(
            seq_len=settings.seq,
            micro_batch_size=layout.mbs,
            global_batch_size=layout.batch,
            dataloader_type="batch",
            output_log=False,
        )
        self._settings, self._pin_memory = settings, pin_memory
        self.train, self.validation = load(settings)

    def train_dataloader(self) -> Any:
        settings = self._settings
        # One batch more than the run takes: Lightning would evaluate at the last batch, whatever the schedule says.
        batches = itertools.islice(
            text.order(len(self.train), settings.layout.batch, settings.seed), settings.max_steps + 1
        )
        return self._loader("train", Rows(self.train, np.concatenate(list(batches))))

    def val_dataloader(self) -> Any:
        count, whole = len(self.validation), self.global_batch_size
        numbers = np.full(-(-count // whole) * whole, -1, np.int64)
        numbers[:count] = np.arange(count)
        return self._loader("validation", Rows(self.validation, numbers))

    def _loader(self, mode: str, rows: Rows) -> Any:
        workers = self._settings.speed.workers
        return WrappedDataLoader(
            mode=mode,
            dataset=rows,
            num_workers=workers,
            pin_memory=self._pin_memory,
            persistent_workers=workers > 0,
            collate_fn=rows.collate_fn,
        )


def load(settings: Settings) -> tuple[Sequences, Sequences]:
    """Training and validation sequences. Raises InputError for missing or unusable files and unknown tokens."""
    found = []
    for split in ("train", "validation"):
        sequences = text.load(settings.datadir, split, settings.seq, text.byte_tokens)
        top = int(sequences.tokens.max())
        if top >= settings.shape.vocab or int(sequences.tokens.min()) < 0:
            raise InputError(
                f"{settings.datadir}/{split}: holds token {top};"
                f" the model's vocabulary allows 0 to {settings.shape.vocab - 1}"
            )
        found.append(sequences)
    train, validation = found
    return train, validation.spread(settings.eval_samples) if settings.eval_samples else validation
