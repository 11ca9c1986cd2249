"""Dropout of many slots at once, each from a random stream of its own.

What a slot drops depends on its seed, its step, the pass within the step and the layer, and on nothing else: not on
who trains beside it, nor on what was drawn before. A step that is run again drops the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MASK = (1 << 64) - 1


def mixed(*parts: int) -> int:
    """One seed below 2^63 from several numbers (splitmix64, Steele et al. 2014, over each in turn)."""
    state = 0
    for part in parts:
        state = (state + 0x9E3779B97F4A7C15 + part) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


@dataclass(frozen=True, slots=True)
class SlotDropout:
    """The dropout of one pass.

    rates: [k], one a slot. seeds: one a slot, for this pass. On a GPU the same two stand in ``on_device``.
    """

    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    on_device: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, rates: Sequence[float], seeds: Sequence[int], device: torch.device) -> SlotDropout | None:
        """None where no slot drops anything."""
        if not any(rates):
            return None
        if device.type != "cuda":
            return cls(tuple(rates), tuple(seeds))
        there = torch.tensor(rates, dtype=torch.float32).to(device, non_blocking=True)
        return cls(tuple(rates), tuple(seeds), (there, torch.tensor(seeds).to(device, non_blocking=True)))

    def __call__(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """``x`` [k, n, width] with its elements zeroed at each slot's rate, and the others scaled to keep the mean."""
        if self.on_device is not None:
            from lora_tune_recipes.packed.triton_dropout import Dropped

            dropped: torch.Tensor = Dropped.apply(x.contiguous(), *self.on_device, layer)
            return dropped
        return x * self._mask(x, layer)

    @torch.no_grad()
    def _mask(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        mask = torch.ones_like(x)
        generator = torch.Generator(x.device)
        for own, rate, seed in zip(mask, self.rates, self.seeds, strict=True):
            if rate:
                generator.manual_seed(mixed(seed, layer))
                own.bernoulli_(1 - rate, generator=generator).div_(1 - rate)
        return mask


def pass_seed(seed: int, step: int, number: int) -> int:
    """The seed of a slot's pass ``number`` within optimizer step ``step``."""
    return mixed(seed, step, number)
