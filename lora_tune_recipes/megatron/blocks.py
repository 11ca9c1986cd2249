"""The training blocks of a trial's log, from one evaluation to the next, with their memory use."""

from __future__ import annotations

import torch

from lora_tune_recipes.trial_log import TrialLog

GIB = 2**30


class Blocks:
    """Opens and closes the blocks of ``log``; ``open`` says whether one is in progress."""

    def __init__(self, log: TrialLog, batch: int, *, cuda: bool) -> None:
        """batch: the global batch size, sequences. cuda: whether to log the GPU's memory use."""
        self._log, self._batch, self._cuda = log, batch, cuda
        self.open = False

    def start(self, samples: int) -> None:
        """Start a block after ``samples`` sequences."""
        self.open = True
        self._log.block_start(samples)

    def stop(self, samples: int) -> None:
        """End it after ``samples``. ``max_memory_usage`` is the peak of this rank's allocator, GiB."""
        if self._cuda:
            torch.cuda.synchronize()
            peak = round(torch.cuda.max_memory_reserved() / GIB, 3)
            self._log.event("tracked_stats", {"max_memory_usage": peak}, step=samples)
        self.open = False
        self._log.block_stop(samples, self._batch)
