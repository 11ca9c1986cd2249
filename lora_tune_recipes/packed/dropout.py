"""Dropout of many slots at once, each from its own random stream.

A slot's dropout depends only on its seed, step, pass within the step, and layer: not on the other slots or earlier
draws. A repeated step drops the same elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_MASK = (1 << 64) - 1
LAYER = 0x9E3779B97F4A7C1
"""On a GPU a layer's seed is the pass's seed XOR this times the layer's number."""


def mixed(*parts: int) -> int:
    """One seed below 2^63 from several numbers (splitmix64, Steele et al. 2014, over each in turn)."""
    state = 0
    for part in parts:
        state = (state + 0x9E3779B97F4A7C15 + part) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class SlotDropout(NamedTuple):
    """The dropout of one pass: rates [k] and seeds [k], one per slot; on a GPU tensors, with seeds [layers, k]."""

    rates: Any
    seeds: Any

    @classmethod
    def of(cls, rates: Sequence[float], seeds: Sequence[int], layers: int, device: torch.device) -> SlotDropout | None:
        """None if no slot has dropout. layers: number of numbered layers."""
        if not any(rates):
            return None
        if device.type != "cuda":
            return cls(tuple(rates), tuple(seeds))
        own = torch.tensor(seeds)[None] ^ (torch.arange(layers)[:, None] * LAYER)
        there = torch.tensor(rates, dtype=torch.float32).to(device, non_blocking=True)
        return cls(there, own.to(device, non_blocking=True))

    def of_layer(self, number: int) -> tuple[Any, Any]:
        """Rates and seeds for :func:`drop` in the layer of this number."""
        if isinstance(self.seeds, torch.Tensor):
            return self.rates, self.seeds[number]
        return self.rates, tuple(mixed(seed, number) for seed in self.seeds)


def drop(x: torch.Tensor, rates: Any, seeds: Any) -> torch.Tensor:
    """``x`` [k, n, width] with its elements zeroed at each slot's rate, and the others scaled to keep the mean."""
    if isinstance(seeds, torch.Tensor):
        dropped: torch.Tensor = drop_on_gpu(x, rates, seeds)
        return dropped
    return x * _kept(x, rates, seeds)


# A custom operator, not an autograd.Function: torch does not cache compiled programs with the latter, so every process
# would compile them again.
@torch.library.custom_op("lora_tune::drop", mutates_args=(), device_types="cuda")
def drop_on_gpu(x: torch.Tensor, rates: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """As :func:`drop`; its backward pass redraws the same numbers."""
    from lora_tune_recipes.packed.triton_dropout import launch

    return launch(x, rates, seeds)


@drop_on_gpu.register_fake
def _(x: torch.Tensor, _rates: torch.Tensor, _seeds: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:  # noqa: ARG001 - torch names it
    ctx.save_for_backward(*inputs[1:])


def _drop_again(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return drop_on_gpu(gradient, *ctx.saved_tensors), None, None


drop_on_gpu.register_autograd(_drop_again, setup_context=_keep)


@torch.no_grad()
def _kept(x: torch.Tensor, rates: Sequence[float], seeds: Sequence[int]) -> torch.Tensor:
    mask = torch.ones_like(x)
    generator = torch.Generator(x.device)
    for own, rate, seed in zip(mask, rates, seeds, strict=True):
        if rate:
            generator.manual_seed(seed)
            own.bernoulli_(1 - rate, generator=generator).div_(1 - rate)
    return mask


def pass_seed(seed: int, step: int, number: int) -> int:
    """The seed of a slot's pass ``number`` within optimizer step ``step``."""
    return mixed(seed, step, number)
