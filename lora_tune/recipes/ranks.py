"""The processes that share one run: who reads which data, and how they talk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from lora_tune.errors import InputError, SurroundingsError
from lora_tune.recipes.settings import Settings

SILENCE = timedelta(minutes=5)
"""How long a rank waits for another in a collective before it fails: a lost rank must not hang the job."""


class Ranks:
    """This process among ``world``: data-parallel rank ``dp_rank`` of ``dp``.

    batch: sequences per optimizer step over all ranks (the global batch size).
    """

    def __init__(self, accelerator: Accelerator, settings: Settings) -> None:
        self._accelerator = accelerator
        self.rank = accelerator.process_index
        self.world = accelerator.num_processes
        self.device: torch.device = accelerator.device
        self.device_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        self.dp = self.world
        self.dp_rank = self.rank
        self.batch = settings.minibs * self.dp

    def prepare(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        return self._accelerator.prepare(model, optimizer)

    def unsynchronized(self, model: Any) -> AbstractContextManager[None]:
        """No gradient exchange within: for all but the last forward pass of a step."""
        return self._accelerator.no_sync(model) if self.dp > 1 else nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        self._accelerator.backward(loss)

    def share(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """This rank's part of a global batch."""
        return rows[self.dp_rank :: self.dp]

    def shares(self, count: int, size: int) -> Iterator[npt.NDArray[np.int64]]:
        """This rank's part of ``count`` sequences, ``size`` at a time; -1 fills up, so that turns are equal."""
        turn = size * self.dp
        rows = np.arange(-(-count // turn) * turn)
        rows[count:] = -1
        for start in range(0, len(rows), turn):
            yield self.share(rows[start : start + turn])

    def sum(self, value: torch.Tensor) -> float:
        """The sum over the data-parallel ranks."""
        return float(self._accelerator.reduce(value, "sum")) if self.world > 1 else float(value)

    def mean(self, value: torch.Tensor) -> float:
        return self.sum(value) / self.dp

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read next sees finished work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def disconnect(self) -> None:
        self._accelerator.end_training()


def connect(settings: Settings) -> Ranks:
    """Join the processes that the launcher started (``WORLD_SIZE``), one without a launcher.

    Raises InputError where the asked parallelism does not fit their number.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    for name, degree in (("TP", settings.tp), ("CP", settings.cp)):
        if degree > 1 and world == 1:
            raise InputError(
                f"{name}={degree}: allowed is 1 in a single process; start several with torchrun or accelerate launch"
            )
    if world % (settings.tp * settings.cp):
        raise InputError(f"TP={settings.tp} CP={settings.cp}: allowed is a product that divides the {world} processes")
    if settings.tp > 1 or settings.cp > 1:
        raise SurroundingsError("TP and CP above 1 are not supported yet")
    return Ranks(
        Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision=precision(settings),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=SILENCE)],
        ),
        settings,
    )


def precision(settings: Settings) -> str:
    """accelerate's name of the precision that the forward pass computes in."""
    if settings.dtype == "auto":
        return "bf16" if torch.cuda.is_available() else "no"
    return "bf16" if settings.dtype == "bfloat16" else "no"
