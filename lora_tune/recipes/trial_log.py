"""What a trial prints: MLLOG lines on standard output, in the order and with the keys of MLPerf's LoRA benchmark."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path

from mlperf_logging import mllog
from mlperf_logging.mllog import constants

TRAIN_LOSS_EVERY = 10
"""Optimizer steps between two ``train_loss`` lines, as in NVIDIA's logs."""


class TrialLog:
    """The log of one run; silent on every rank but the first.

    Sample counts are global and cumulative. A block is the training between two evaluations; its throughput is
    in samples a second and its step time in seconds.
    """

    def __init__(self, *, enabled: bool) -> None:
        # Trims the paths in the metadata; mllog reads it as a regular expression.
        mllog.config(root_dir=re.escape(str(Path(__file__).parents[2])), default_stack_offset=2)
        self._mllogger = mllog.get_mllogger()
        self._mllogger.logger.disabled = not enabled
        for handler in self._mllogger.logger.handlers:
            handler.handleError = _lost
        self._block: tuple[int, float] = (0, 0.0)

    def event(self, key: str, value: object, **metadata: object) -> None:
        self._mllogger.event(key, value, metadata=metadata)

    def start(self, key: str, **metadata: object) -> None:
        self._mllogger.start(key, metadata=metadata)

    def end(self, key: str, **metadata: object) -> None:
        self._mllogger.end(key, metadata=metadata)

    def init(self, values: Mapping[str, object]) -> None:
        """What the run is, one event each."""
        for key, value in values.items():
            self.event(key, value)

    def block_start(self, samples: int) -> None:
        self._block = (samples, time.perf_counter())
        self.start(constants.BLOCK_START, samples_count=samples)

    def block_stop(self, samples: int, batch: int) -> None:
        """End the block at ``samples`` and, where it trained, report its speed at a global batch of ``batch``."""
        began, clock = self._block
        if samples > began:
            throughput = (samples - began) / (time.perf_counter() - clock)
            value = {"throughput": throughput, "train_step_time": batch / throughput}
            self.event("tracked_stats", value, step=samples)
        self.end(constants.BLOCK_STOP, samples_count=samples)

    def train_loss(self, loss: float, samples: int, lr: float) -> None:
        self.event("train_loss", loss, samples_count=samples, lr=lr)

    def eval_loss(self, loss: float, samples: int) -> None:
        self.event(constants.EVAL_ACCURACY, loss, samples_count=samples)

    def run_stop(self, samples: int, *, success: bool) -> None:
        status = constants.SUCCESS if success else constants.ABORTED
        self.end(constants.RUN_STOP, status=status, samples_count=samples)


def _lost(_record: object) -> None:
    """A line could not be written: raise it. logging would go on, and a run without its log counts for nothing."""
    raise  # noqa: PLE0704 - called while the error is handled
