"""How many trials a pack's memory holds: known beforehand from what each takes alone, corrected by what went wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch

USED = 0.85
"""Share of the free memory that is filled: the allocator cannot use all of it."""


class Admission:
    """Of the memory of ``device`` with the base on it. On a CPU the number of slots is the only limit."""

    def __init__(self, device: torch.device) -> None:
        self.limit: float | None = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
            self.limit = USED * torch.cuda.mem_get_info()[0]

    def fits(self, present: Sequence[int], new: int) -> bool:
        """Whether a trial that takes ``new`` bytes fits beside others; alone every one may try."""
        return self.limit is None or not present or sum(present) + new <= self.limit

    def too_much(self, present: Sequence[int]) -> None:
        """These together ran out of memory: less from now on."""
        most = sum(present) * (1 - 1 / (2 * len(present)))
        self.limit = most if self.limit is None else min(self.limit, most)
