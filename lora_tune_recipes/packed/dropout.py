"""Dropout of many slots at once, each from a random stream of its own.

What a slot drops depends on its seed, its step, the pass within the step and the layer, and on nothing else: not on
who trains beside it, nor on what was drawn before. A step that is run again drops the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_MASK = (1 << 64) - 1
LAYER = 0x9E3779B97F4A7C1
"""On a GPU the seed of a layer is that of the pass, crossed with so many times the layer's number."""


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
    """The dropout of one pass: rates [k] and seeds [k], one a slot. On a GPU tensors, and seeds [layers, k]."""

    rates: Any
    seeds: Any

    @classmethod
    def of(cls, rates: Sequence[float], seeds: Sequence[int], layers: int, device: torch.device) -> SlotDropout | None:
        """None where no slot drops anything. layers: how many have numbers."""
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


# An operator of its own, not an autograd.Function: a program with one of those is made anew by every process, as torch
# does not look for it in the compiler's cache.
@torch.library.custom_op("lora_tune::drop", mutates_args=(), device_types="cuda")
def drop_on_gpu(x: torch.Tensor, rates: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """As :func:`drop`; its backward pass draws the same numbers again."""
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
