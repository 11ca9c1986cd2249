"""The dropout of a pack as one GPU kernel, which computes the mask on the fly and never stores it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Elements per program divided by four: Philox yields four random numbers at once."""


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(x, y, rates, seeds, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    slot = tl.program_id(1).to(tl.int64)
    rate = tl.load(rates + slot)
    seed = tl.load(seeds + slot)
    lane = tl.arange(0, block)
    numbers = tl.rand4x(seed, tl.program_id(0) * block + lane)
    for i in tl.static_range(4):
        at = (tl.program_id(0) * 4 + i) * block + lane
        inside = at < size
        value = tl.load(x + slot * size + at, mask=inside).to(tl.float32)
        kept = tl.where(numbers[i] >= rate, value / (1 - rate), 0.0)
        tl.store(y + slot * size + at, kept, mask=inside)


def launch(x: torch.Tensor, rates: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """``x`` [k, n, width] with each slot's dropout applied."""
    x = x.contiguous()
    y = torch.empty_like(x)
    size = x[0].numel()
    _kernel[(triton.cdiv(size, 4 * BLOCK), len(x))](x, y, rates, seeds, size, BLOCK)
    return y
