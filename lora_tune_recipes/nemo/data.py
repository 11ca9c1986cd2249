"""The packed sequences as NeMo's data module."""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import numpy as np
from nemo.lightning.data import WrappedDataLoader
from nemo.lightning.pytorch.plugins import MegatronDataSampler

from lora_tune_recipes import text
from lora_tune_recipes.megatron.data import NumberedSequences, load
from lora_tune_recipes.nemo.settings import NemoSettings


class IdTokenizer:
    """Provides the token ids that NeMo asks for; the data is already tokenized."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.bos_id, self.eos_id, self.pad_id = 1, 2, 2


class PackedData(pl.LightningDataModule):
    """``train`` and ``validation`` of ``DATADIR``; each evaluation reads every validation sequence once.

    The order of the training data depends only on the seed and the global batch, so that every layout of one global
    batch reads the same. Raises InputError for data that cannot be used.
    """

    def __init__(self, settings: NemoSettings, *, pin_memory: bool) -> None:
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
        # One batch more than the run takes: Lightning would evaluate at the last batch, whatever the schedule.
        batches = itertools.islice(
            text.order(len(self.train), settings.layout.batch, settings.seed), settings.max_steps + 1
        )
        return self._loader("train", NumberedSequences(self.train, np.concatenate(list(batches))))

    def val_dataloader(self) -> Any:
        count, whole = len(self.validation), self.global_batch_size
        numbers = np.full(-(-count // whole) * whole, -1, np.int64)
        numbers[:count] = np.arange(count)
        return self._loader("validation", NumberedSequences(self.validation, numbers))

    def _loader(self, mode: str, rows: NumberedSequences) -> Any:
        workers = self._settings.speed.workers
        return WrappedDataLoader(
            mode=mode,
            dataset=rows,
            num_workers=workers,
            pin_memory=self._pin_memory,
            persistent_workers=workers > 0,
            collate_fn=rows.collate_fn,
        )
