"""How many trials a pack's memory holds: known beforehand from what each takes alone, corrected by what went wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from lora_tune.base.errors import InputError

Result = TypeVar("Result")
USED = 0.85
"""Share of the free memory that is filled: the allocator cannot use all of it."""
BYTES_OF_A_WEIGHT = 16
"""float32: the weight, its gradient and AdamW's two moments."""
HOST_SHORT = "DefaultCPUAllocator: can't allocate memory"
"""What torch's allocator says where the host has no more memory."""


def short_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory was short: the device's, or the host's, which torch reports as any error."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and HOST_SHORT in str(error)


def attempted(action: Callable[[], Result]) -> Result | None:
    """None where the memory was short. What the action held is free again then: its error is gone, too."""
    try:
        return action()
    except (RuntimeError, MemoryError) as error:
        if not short_of_memory(error):
            raise
    torch.cuda.empty_cache()  # nothing where there is no GPU
    return None


class Admission:
    """Of the memory of ``device`` with the base on it. On a CPU the number of slots is the only limit."""

    def __init__(self, device: torch.device) -> None:
        self.limit: float | None = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
            self.limit = USED * torch.cuda.mem_get_info()[0]

    def check(self, weights: int) -> None:
        """Raise InputError for an adapter of so many weights that it fits nowhere here, whatever else ends."""
        needed = weights * BYTES_OF_A_WEIGHT
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if self.limit is None else self.limit
        if needed > there:
            raise InputError(
                f"LORA_RANK, LORA_TARGETS: the adapter has {weights:,} weights and takes {needed / 2**30:.1f} GiB with "
                f"its optimizer; allowed is what fits into {there / 2**30:.1f} GiB"
            )

    def fits(self, present: Sequence[int], new: int) -> bool:
        """Whether a trial that takes ``new`` bytes fits beside others; alone every one may try."""
        return self.limit is None or not present or sum(present) + new <= self.limit

    def too_much(self, present: Sequence[int]) -> None:
        """These together ran out of memory: less from now on."""
        most = sum(present) * (1 - 1 / (2 * len(present)))
        self.limit = most if self.limit is None else min(self.limit, most)
