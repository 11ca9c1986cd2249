"""Slots of one shape: their adapters as one matrix with a row each, and AdamW over its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from lora_tune.recipes.lora_model import initial_weights
from lora_tune.recipes.packed.slot import Slot
from lora_tune.recipes.settings import AdapterSettings

EPSILON = 1e-8
Widths = Mapping[str, tuple[int, int]]
"""Module name -> width in, width out; in the order of the model."""


class Rows(NamedTuple):
    """What training changes, one row a slot: weights, and AdamW's two moments. Each [k, all weights of an adapter]."""

    weights: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor


class Pair(NamedTuple):
    """The adapters of one module. a: [k, rank, width in]. b: [k, width out, rank]."""

    a: torch.Tensor
    b: torch.Tensor


class Group:
    """Slots that share every product: alike in modules, rank and micro-batch; anything else is each slot's own.

    widths: of the modules with adapters. rank: of the products; a slot of a lower rank is filled up with zeros, which
    stay zero: neither factor's gradient is anything else where the other one is zero.
    """

    def __init__(self, widths: Widths, rank: int, device: torch.device) -> None:
        self.slots: list[Slot] = []
        self._widths, self._rank, self._device = widths, rank, device
        self._places: dict[str, tuple[slice, slice]] = {}
        place = 0
        for name, (width_in, width_out) in widths.items():
            middle, end = place + rank * width_in, place + rank * (width_in + width_out)
            self._places[name] = slice(place, middle), slice(middle, end)
            place = end
        self.size = place
        self._rows = Rows(*(torch.zeros(0, place, device=device) for _ in range(3)))
        self._gradients = torch.zeros(0, place, device=device)
        self.losses = torch.zeros(0, device=device)
        self._second_factors = torch.zeros(place, device=device)
        for _, b in self._places.values():
            self._second_factors[b] = 1.0
        self._share_out()

    def join(self, slot: Slot, state: Rows | None = None) -> None:
        """Give the slot a row: ``state`` where it trained before, else the adapter that its seed makes."""
        new = state or self._fresh(slot)
        # All is made before anything is changed: where memory is short, the others' rows stay as they are.
        rows = Rows(*(torch.cat([old, row.to(self._device)]) for old, row in zip(self._rows, new, strict=True)))
        gradients = torch.cat([self._gradients, self._gradients.new_zeros(1, self.size)])
        losses = torch.cat([self.losses, self.losses.new_zeros(1)])
        self._rows, self._gradients, self.losses = rows, gradients, losses
        self.slots.append(slot)
        self._share_out()

    def leave(self, slot: Slot) -> Rows:
        """Take the slot's row out and return it."""
        at = self.slots.index(slot)
        taken = Rows(*(rows[at : at + 1].clone() for rows in self._rows))
        self._rows = Rows(*(torch.cat([rows[:at], rows[at + 1 :]]) for rows in self._rows))
        self._gradients = torch.cat([self._gradients[:at], self._gradients[at + 1 :]])
        self.losses = torch.cat([self.losses[:at], self.losses[at + 1 :]])
        del self.slots[at]
        self._share_out()
        return taken

    def state(self, slot: Slot) -> Rows:
        """A copy of the slot's row in the host's memory."""
        at = self.slots.index(slot)
        return Rows(*(rows[at : at + 1].to("cpu", copy=True) for rows in self._rows))

    def pairs(self, chosen: Sequence[int]) -> dict[str, Pair]:
        """The adapters of slots ``chosen`` by module, for passes that learn nothing."""
        index = torch.tensor(chosen, device=self._device)
        return {name: Pair(a.detach()[index], b.detach()[index]) for name, (a, b) in self.leaves.items()}

    def adapter(self, slot: Slot) -> dict[str, Pair]:
        """The slot's own adapter by module, without what fills its rank up."""
        at, found = self.slots.index(slot), {}
        for name, (a, b) in self.leaves.items():
            rank = slot.settings.adapters.rank_of(name)
            found[name] = Pair(a.detach()[at, :rank], b.detach()[at, :, :rank])
        return found

    def _fresh(self, slot: Slot) -> Rows:
        row = torch.zeros(1, self.size)
        adapters = slot.settings.adapters
        shapes = [(adapters.rank_of(name), width_in) for name, (width_in, _) in self._widths.items()]
        weights = initial_weights(shapes, slot.settings.seed)
        for (a, _), (rank, width_in), own in zip(self._places.values(), shapes, weights, strict=True):
            row[0, a].view(self._rank, width_in)[:rank] = own
        return Rows(row, torch.zeros_like(row), torch.zeros_like(row))

    def _share_out(self) -> None:
        """After every join and leave: the matrix's columns as leaves whose gradients gather in one matrix, too."""
        self.leaves: dict[str, Pair] = {}
        for name, (width_in, width_out) in self._widths.items():
            a, b = self._places[name]
            shapes = (self._rank, width_in), (width_out, self._rank)
            self.leaves[name] = Pair(*(self._leaf(c, s) for c, s in zip((a, b), shapes, strict=True)))
        every = [slot.settings for slot in self.slots]
        self.scales = self._scales([settings.adapters for settings in every])
        self._decay = self._column([s.weight_decay for s in every])
        # Without clipping the limit is infinite.
        self._limit = self._column([s.grad_clip or math.inf for s in every])
        self._beta1 = self._column([s.adam_beta1 for s in every])
        self._beta2 = self._column([s.adam_beta2 for s in every])
        ratios = [s.lora_plus_ratio for s in every]
        # LoRA+ (Hayou et al. 2024): the second factor learns faster.
        self._faster = 1 + (self._column(ratios) - 1) * self._second_factors if any(r != 1 for r in ratios) else None

    def _scales(self, every: Sequence[AdapterSettings]) -> dict[str, torch.Tensor]:
        """[k, 1, 1] by module; one tensor for all modules whose scales are the same."""
        made: dict[tuple[float, ...], torch.Tensor] = {}
        found = {}
        for name in self._widths:
            values = tuple(adapters.scale_of(name) for adapters in every)
            if values not in made:
                made[values] = self._column(values)[:, :, None]
            found[name] = made[values]
        return found

    def _leaf(self, columns: slice, shape: tuple[int, int]) -> torch.Tensor:
        leaf = self._rows.weights[:, columns].unflatten(1, shape).requires_grad_()
        leaf.grad = self._gradients[:, columns].unflatten(1, shape)
        return leaf

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).to(self._device, non_blocking=True).view(-1, 1)

    def forget(self) -> None:
        """Drop the gradients and losses of steps that are not whole yet."""
        self._gradients.zero_()
        self.losses.zero_()

    @torch.no_grad()
    def step(self, due: Sequence[int]) -> torch.Tensor:
        """One optimizer step of the slots ``due``; returns their losses [due] and clears their gradients.

        AdamW (Loshchilov and Hutter 2019, algorithm 2), after clipping each slot's gradient to its own norm.
        """
        slots = [self.slots[i] for i in due]
        numbers = self._column([x for slot in slots for x in (slot.rate(), slot.step + 1.0)]).view(-1, 2)
        whole = len(due) == len(self.slots)
        index = None if whole else torch.tensor(due, device=self._device)

        def own(rows: torch.Tensor) -> torch.Tensor:
            return rows if index is None else rows[index]

        weights, first, second = (own(rows) for rows in self._rows)
        gradients, losses = own(self._gradients), own(self.losses).clone()
        rate, taken = numbers[:, :1], numbers[:, 1:]
        if self._faster is not None:
            rate = rate * own(self._faster)
        norm = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
        gradients.mul_(torch.clamp(own(self._limit) / (norm + 1e-6), max=1.0))
        beta1, beta2 = own(self._beta1), own(self._beta2)
        # All memory is taken before anything is changed: a step that finds none left is made again as if for the
        # first time.
        squares, change = gradients * gradients, torch.empty_like(weights)
        faster, kept = rate / (1 - beta1**taken), 1 - rate * own(self._decay)
        first.lerp_(gradients, 1 - beta1)
        second.lerp_(squares, 1 - beta2)
        weights.mul_(kept)
        spread = torch.div(second, 1 - beta2**taken, out=squares).sqrt_().add_(EPSILON)
        weights.sub_(torch.div(first, spread, out=change).mul_(faster))
        gradients.zero_()
        if index is None:
            self.losses.zero_()
        else:
            for rows, changed in zip((*self._rows, self._gradients), (weights, first, second, gradients), strict=True):
                rows.index_copy_(0, index, changed)
            self.losses.index_fill_(0, index, 0.0)
        return losses
