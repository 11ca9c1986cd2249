"""Slots of one shape: their adapters as one matrix with a row each, and AdamW over its rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from lora_tune_recipes.lora_model import initial_embedding, initial_weights
from lora_tune_recipes.packed.slot import Slot
from lora_tune_recipes.step_graph import StepGraph

EPSILON = 1e-8
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Padded row counts of recorded groups; above them multiples of 32."""
Room = Callable[[int, int], int]
"""(slots, current rows) -> rows of a group."""


def exact(slots: int, _rows: int) -> int:
    """A row for each slot."""
    return slots


def padded(slots: int, rows: int) -> int:
    """One of SIZES, so that joins and leaves seldom change the shape; shrinks only if half of the rows are empty."""
    if rows // 2 < slots <= rows:
        return rows
    return next((size for size in SIZES if size >= slots), -(-slots // 32) * 32)


class Module(NamedTuple):
    """A module with adapters. norms: of the frozen weight's rows [width out], for DoRA; else None."""

    width_in: int
    width_out: int
    embedding: bool = False
    norms: torch.Tensor | None = None

    def weights(self, rank: int) -> int:
        """Number of weights of its adapter of this rank."""
        return rank * (self.width_in + self.width_out) + (0 if self.norms is None else self.width_out)


class Rows(NamedTuple):
    """Trained state, one row per slot: weights and AdamW's two moments, each [k, all weights of an adapter]."""

    weights: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor


Copies = Mapping[str, Mapping[str, torch.Tensor]]
"""Module name -> parameter name -> the slots' copies [k, *shape], for modules that are trained whole."""


class AdapterPair(NamedTuple):
    """The adapters of one module. a: [k, rank, width in]. b: [k, width out, rank]. magnitude (DoRA): [k, width out]."""

    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None = None


class AdapterColumns(NamedTuple):
    """The columns of a module's adapter in the group's matrix."""

    a: slice
    b: slice
    magnitude: slice | None


class Group:
    """Slots with the same modules, rank and micro-batch, which share every product; other settings may differ.

    modules: modules with adapters, by name, in the model's order. whole: modules trained whole, with the frozen
    parameters from which each slot's copy starts. rank: of the products; a slot of a lower rank is zero-padded, and the
    padding stays zero, because the gradient of either factor is zero where the other is. room: number of rows; rows
    beyond the slots' are zero and stay zero.

    graph: the recorded pass over all rows; evaluation: of one slot's evaluation; None if not recorded. since: when the
    rows were laid out (monotonic seconds). evaluations: how often slots were evaluated since.
    """

    def __init__(
        self,
        modules: Mapping[str, Module],
        rank: int,
        device: torch.device,
        whole: Mapping[str, Mapping[str, torch.Tensor]],
        room: Room = exact,
    ) -> None:
        self.slots: list[Slot] = []
        self.modules, self._rank, self._device, self._whole, self.room = modules, rank, device, whole, room
        self._places: dict[str, AdapterColumns] = {}
        place = 0
        for name, module in modules.items():
            middle, last = place + rank * module.width_in, place + rank * (module.width_in + module.width_out)
            end = place + module.weights(rank)
            magnitude = slice(last, end) if module.norms is not None else None
            self._places[name] = AdapterColumns(slice(place, middle), slice(middle, last), magnitude)
            place = end
        self._copied: dict[tuple[str, str], slice] = {}
        for name, parameters in whole.items():
            for part, start in parameters.items():
                self._copied[name, part] = slice(place, place + start.numel())
                place += start.numel()
        self.size = place
        self._second_factors = torch.zeros(place, device=device)
        for place_of in self._places.values():
            self._second_factors[place_of.b] = 1.0
        self.leaves: dict[str, AdapterPair] = {}
        self._lay_out(self._moved(0))

    @property
    def rows(self) -> int:
        """Rows of a pass, including empty ones after the slots'."""
        return len(self.losses)

    def join(self, slot: Slot, state: Rows | None = None) -> None:
        """Give the slot a row: ``state`` if it trained before, else the initial adapter of its seed."""
        new = Rows(*(row.to(self._device) for row in state or self._fresh(slot)))
        count = len(self.slots) + 1
        # Allocate everything before changing anything, so that running out of memory leaves the other rows intact.
        moved = self._moved(self.rows if count <= self.rows else self.room(count, self.rows))
        self.slots.append(slot)
        self._lay_out(moved)
        with torch.no_grad():
            for rows, row in zip(self._rows, new, strict=True):
                rows[count - 1] = row[0]
        self._constants()

    def leave(self, slot: Slot) -> Rows:
        """Remove the slot and return its row; the last slot moves into its place."""
        at, last = self.slots.index(slot), len(self.slots) - 1
        taken = Rows(*(rows[at : at + 1].clone() for rows in self._rows))
        self.slots[at] = self.slots[last]
        del self.slots[last]
        with torch.no_grad():
            for rows in (*self._rows, self._gradients, self.losses):
                rows[at] = rows[last]
                rows[last] = 0.0
        self._constants()
        self.settle(math.inf)
        return taken

    def settle(self, patience: float = 0.0) -> None:
        """Free surplus rows: at once without a graph, else only after ``patience`` seconds of surplus.

        Trials that begin together also end together and are soon replaced, and then the recorded shape fits again.
        """
        rows, now = self.room(len(self.slots), self.rows), time.monotonic()
        if rows == self.rows:
            self._sparse_since = math.inf
            return
        self._sparse_since = min(self._sparse_since, now)
        if self.graph is None or now - self._sparse_since >= patience:
            self._lay_out(self._moved(rows))
            self._constants()

    @torch.no_grad()
    def _moved(self, count: int) -> tuple[Rows, torch.Tensor, torch.Tensor] | None:
        """Rows, gradients and losses reallocated for ``count`` rows; None if the count is unchanged."""
        if self.leaves and count == self.rows:
            return None
        every = [torch.zeros(count, self.size, device=self._device) for _ in range(4)]
        losses, used = torch.zeros(count, device=self._device), len(self.slots)
        if used:
            for new, old in zip((*every, losses), (*self._rows, self._gradients, self.losses), strict=True):
                new[:used] = old[:used]
        return Rows(*every[:3]), every[3], losses

    def _lay_out(self, moved: tuple[Rows, torch.Tensor, torch.Tensor] | None) -> None:
        """Adopt these tensors, with their columns as leaves whose gradients are columns of one matrix."""
        if moved is None:
            return
        self._rows, self._gradients, self.losses = moved
        self.graph: StepGraph[Any] | None = None
        self.evaluation: StepGraph[Any] | None = None
        self.since, self._sparse_since, self.evaluations = time.monotonic(), math.inf, 0
        self.leaves = {}
        for name, module in self.modules.items():
            place = self._places[name]
            self.leaves[name] = AdapterPair(
                self._leaf(place.a, (self._rank, module.width_in)),
                self._leaf(place.b, (module.width_out, self._rank)),
                None if place.magnitude is None else self._leaf(place.magnitude, (module.width_out,)),
            )
        copies: dict[str, dict[str, torch.Tensor]] = {}
        for (name, part), columns in self._copied.items():
            copies.setdefault(name, {})[part] = self._leaf(columns, tuple(self._whole[name][part].shape))
        self.copies: Copies = copies
        self._scales = torch.ones(len(self.modules), self.rows, device=self._device)
        self.scales = {name: scale.view(-1, 1, 1) for name, scale in zip(self.modules, self._scales, strict=True)}

    def state(self, slot: Slot) -> Rows:
        """A copy of the slot's row in the host's memory."""
        at = self.slots.index(slot)
        return Rows(*(rows[at : at + 1].to("cpu", copy=True) for rows in self._rows))

    def pairs(self, index: torch.Tensor) -> dict[str, AdapterPair]:
        """The adapters of the slots ``index`` [k] by module, detached, for passes without training."""
        pairs = {}
        for name, (a, b, magnitude) in self.leaves.items():
            own = None if magnitude is None else magnitude.detach()[index]
            pairs[name] = AdapterPair(a.detach()[index], b.detach()[index], own)
        return pairs

    def copies_of(self, index: torch.Tensor) -> Copies:
        """As :meth:`pairs`, of the modules that are trained whole."""
        return {n: {part: leaf.detach()[index] for part, leaf in own.items()} for n, own in self.copies.items()}

    def index(self, slots: Sequence[Slot]) -> torch.Tensor:
        """The rows of these slots."""
        return torch.tensor([self.slots.index(slot) for slot in slots], device=self._device)

    def adapter(self, slot: Slot) -> dict[str, AdapterPair]:
        """The slot's own adapter by module, without the rank padding."""
        at, adapter = self.slots.index(slot), {}
        for name, (a, b, magnitude) in self.leaves.items():
            rank = slot.settings.adapters.rank_of(name)
            own = None if magnitude is None else magnitude.detach()[at]
            adapter[name] = AdapterPair(a.detach()[at, :rank], b.detach()[at, :, :rank], own)
        return adapter

    def _fresh(self, slot: Slot) -> Rows:
        row = torch.zeros(1, self.size)
        adapters, seed = slot.settings.adapters, slot.settings.seed
        linear = {name: module for name, module in self.modules.items() if not module.embedding}
        shapes = [(adapters.rank_of(name), module.width_in) for name, module in linear.items()]
        first = dict(zip(linear, initial_weights(shapes, seed), strict=True))
        for name, place in self._places.items():
            module, rank = self.modules[name], adapters.rank_of(name)
            if module.embedding:
                drawn = initial_embedding((module.width_out, rank), seed)
                row[0, place.b].view(module.width_out, self._rank)[:, :rank] = drawn
            else:
                row[0, place.a].view(self._rank, module.width_in)[:rank] = first[name]
            if module.norms is not None:
                row[0, place.magnitude] = module.norms.cpu()
        for (name, part), columns in self._copied.items():
            row[0, columns] = self._whole[name][part].detach().float().flatten().cpu()
        return Rows(row, torch.zeros_like(row), torch.zeros_like(row))

    def _constants(self) -> None:
        """Recompute the per-slot constants of passes and steps, after every join and leave."""
        every = [slot.settings for slot in self.slots]
        scales = [s.adapters.scale_of(name) for name in self.modules for s in every]
        self._scales[:, : len(every)] = self._column(scales).view(len(self.modules), len(every))
        self._decay = self._column([s.weight_decay for s in every])
        # Without clipping the limit is infinite.
        self._limit = self._column([s.grad_clip or math.inf for s in every])
        self._beta1 = self._column([s.adam_beta1 for s in every])
        self._beta2 = self._column([s.adam_beta2 for s in every])
        ratios = [s.lora_plus_ratio for s in every]
        # LoRA+ (Hayou et al. 2024): the second factor learns faster.
        self._faster = 1 + (self._column(ratios) - 1) * self._second_factors if any(r != 1 for r in ratios) else None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore gradients and losses at the end."""
        before = self._gradients.clone(), self.losses.clone()
        try:
            yield
        finally:
            self._gradients.copy_(before[0])
            self.losses.copy_(before[1])

    def _leaf(self, columns: slice, shape: tuple[int, ...]) -> torch.Tensor:
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
            return rows[: len(due)] if index is None else rows[index]

        weights, first, second = (own(rows) for rows in self._rows)
        gradients, losses = own(self._gradients), own(self.losses).clone()
        rate, taken = numbers[:, :1], numbers[:, 1:]
        if self._faster is not None:
            rate = rate * own(self._faster)
        norm = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
        gradients.mul_(torch.clamp(own(self._limit) / (norm + 1e-6), max=1.0))
        beta1, beta2 = own(self._beta1), own(self._beta2)
        # Allocate everything before changing anything, so that a step that runs out of memory can simply be repeated.
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
