"""The arithmetic of a pack: each round runs one forward and backward pass per slot and steps the slots that are due.

A slot's results depend only on its own knobs, data and seed: bit for bit on a CPU in float32; on a GPU the rounding of
batched products varies with their shape.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from lora_tune_recipes import text
from lora_tune_recipes.batch import Batch
from lora_tune_recipes.packed.base import PackedBase
from lora_tune_recipes.packed.dropout import SlotDropout
from lora_tune_recipes.packed.frozen import CHUNK
from lora_tune_recipes.packed.group import Group, Rows, exact, padded
from lora_tune_recipes.packed.layers import Part
from lora_tune_recipes.packed.slot import Slot
from lora_tune_recipes.settings import Settings
from lora_tune_recipes.step_graph import Inputs, StepGraph, short_of_memory

Key = TypeVar("Key")
EVAL_TOKENS = 2**17
"""Tokens of one pass of an evaluation on a GPU."""
RANKS = (16, 64, 256)
"""On a GPU ranks are padded to one of these, since few products over many slots are faster than the reverse."""

PATIENCE = 3.0
"""Seconds for which a group keeps its shape before its pass is recorded; later the time that a recording took."""


class SlotShape(NamedTuple):
    """What slots of one group have in common."""

    seq: int
    packing: bool
    mbs: int
    rank: int
    targets: tuple[str, ...]
    whole: tuple[str, ...]
    dora: bool
    drops: bool
    """Whether DoRA adapters have dropout, which needs a second frozen product to scale."""


class PassInputs(NamedTuple):
    """Inputs of a pass of one group: those of Batch, sequences of each slot's step [rows], dropout rates and seeds.

    The last two are empty without dropout, or on a CPU.
    """

    read: torch.Tensor
    predict: torch.Tensor
    weight: torch.Tensor
    position: torch.Tensor
    sizes: torch.Tensor
    rates: torch.Tensor
    seeds: torch.Tensor


class EvalInputs(NamedTuple):
    """Inputs of a recorded eval pass of one slot: those of Batch, and the slot's row [1]."""

    read: torch.Tensor
    predict: torch.Tensor
    weight: torch.Tensor
    position: torch.Tensor
    row: torch.Tensor


def numbers(losses: Mapping[Key, torch.Tensor]) -> dict[Key, float]:
    """The values of several losses, in one transfer from the device."""
    if not losses:
        return {}
    return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))


class Pack:
    """The slots that train over ``base``, initially none.

    patience: see PATIENCE. A group's recorded pass is a CUDA graph over a padded number of rows, so that joins and
    leaves seldom change it; groups without a graph share one eager pass. Recording only after ``patience`` seconds
    costs at most twice the time of knowing in advance how long a shape lasts.
    """

    def __init__(self, base: PackedBase, patience: float = PATIENCE) -> None:
        self.base, self._patience = base, patience
        self._groups: dict[SlotShape, Group] = {}

    @property
    def slots(self) -> list[Slot]:
        """All slots, in no particular order."""
        return [slot for group in self._groups.values() for slot in group.slots]

    def shape(self, settings: Settings) -> SlotShape:
        """The group that a trial of ``settings`` belongs to."""
        adapters = settings.adapters
        rank = max(adapters.rank_of(name) for name in adapters.targets)
        if self.base.device.type == "cuda":
            rank = next((r for r in RANKS if r >= rank), -(-rank // 64) * 64)
        drops = adapters.dora and adapters.dropout > 0
        return SlotShape(
            settings.seq,
            settings.packing,
            settings.mbs,
            rank,
            adapters.targets,
            adapters.modules_to_save,
            adapters.dora,
            drops,
        )

    def weights(self, settings: Settings) -> int:
        """Number of adapter weights of a trial of ``settings``; makes its modules ready for adapters."""
        rank = self.shape(settings).rank
        whole = [parameter for own in self.base.whole(settings).values() for parameter in own.values()]
        adapters = sum(module.weights(rank) for module in self.base.modules(settings).values())
        return adapters + sum(parameter.numel() for parameter in whole)

    def join(self, slot: Slot, state: Rows | None = None) -> None:
        """Train ``slot`` from the next round on; ``state`` is its saved state, None for a fresh adapter."""
        shape = self.shape(slot.settings)
        self.make_room(slot.settings)
        group = self._groups.get(shape) or self._group(slot.settings, shape.rank)
        group.join(slot, state)
        self._groups[shape] = group  # after the join: a group without slots would break the next round

    def _group(self, settings: Settings, rank: int) -> Group:
        room = exact if self.base.why_not_recorded(settings) else padded
        return Group(self.base.modules(settings), rank, self.base.device, self.base.whole(settings), room)

    def leave(self, slot: Slot) -> Rows:
        """Remove ``slot``; returns its weights and moments."""
        shape = self.shape(slot.settings)
        group = self._groups[shape]
        state = group.leave(slot)
        slot.again()
        self._settle({shape: group}, math.inf)
        return state

    def make_room(self, settings: Settings) -> None:
        """Free unused rows if a trial of these settings needs a new group, before it allocates memory."""
        if self.shape(settings) not in self._groups:
            self.give_up()

    def give_up(self) -> None:
        """Free rows without slots and the graphs recorded over them, when memory is short."""
        self._settle(self._groups, 0.0)

    def _settle(self, groups: Mapping[SlotShape, Group], patience: float) -> None:
        for shape, group in list(groups.items()):
            group.settle(patience)
            if not group.slots and group.graph is None:
                del self._groups[shape]

    def group(self, slot: Slot) -> Group:
        """The group that ``slot`` is in."""
        return self._groups[self.shape(slot.settings)]

    def trains(self, slot: Slot) -> bool:
        """Whether a pass of ``slot`` alone succeeds, after a failed round; works on a copy of the slot."""
        copied, own = Pack(self.base), Slot(slot.settings, slot.texts, slot.step)
        try:
            copied.join(own, self.group(slot).state(slot))
            copied.round()
        except Exception as error:  # noqa: BLE001 - any error counts against this slot
            print(f"a pass by itself: {type(error).__qualname__}: {' '.join(str(error).split())}", flush=True)
            return False
        return True

    def rewind(self) -> None:
        """Restart every slot's current step, after a round that failed half way."""
        for group in self._groups.values():
            group.forget()
            for slot in group.slots:
                slot.again()
        self.give_up()

    def round(self, done: dict[Slot, torch.Tensor] | None = None) -> dict[Slot, torch.Tensor]:
        """One pass of every slot; returns the loss, on the device, of each slot that completed a step.

        done: receives these losses as they come, so that the caller knows which slots stepped if the round fails.
        """
        done = {} if done is None else done
        self._settle(self._groups, self._patience)
        # Rows of one length with the same kind of attention and logits share a pass.
        passes: dict[tuple[int, bool, bool], list[Group]] = {}
        for shape, group in sorted(self._groups.items()):
            if not group.slots or self._replayed(group):
                continue
            key = shape.seq, shape.packing, self.base.makes_logits(group.slots[0].settings.adapters)
            passes.setdefault(key, []).append(group)
        for groups in passes.values():
            self._learn(groups, [self._inputs(group) for group in groups])
        for group in self._groups.values():
            due = [i for i, slot in enumerate(group.slots) if slot.passed()]
            if due:
                losses = group.step(due)
                for i, loss in zip(due, losses, strict=True):
                    done[group.slots[i]] = loss
                    group.slots[i].stepped()
        return done

    def record(self) -> None:
        """Record the pass of every group that can be recorded."""
        for group in self._groups.values():
            self._recorded(group, self._inputs(group))

    def _replayed(self, group: Group) -> bool:
        """Run a group's pass by its graph, recording it first if that is due; False if the pass was not run."""
        if group.room is exact or (group.graph is None and time.monotonic() - group.since < self._patience):
            return False
        inputs = self._inputs(group)
        if not (group.graph is not None and group.graph.fits(inputs)) and not self._recorded(group, inputs):
            return False
        assert group.graph is not None, "it has just been recorded"
        group.graph.replay(inputs)
        return True

    def _recorded(self, group: Group, inputs: PassInputs) -> bool:
        """Record the pass of a group; False if it cannot be recorded or memory is short: it then stays eager."""
        if group.room is exact:
            return False
        group.graph, began = None, time.monotonic()
        with group.kept():
            group.graph = self._graph(lambda own: self._learn([group], [own], compiled=True), inputs)
        if group.graph is None:
            group.room = exact
        elif self._patience:
            self._patience = time.monotonic() - began
        return group.graph is not None

    def _graph(self, work: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> StepGraph[Inputs] | None:
        """A recording of ``work``; None if memory is short."""
        try:
            return self.base.record(work, inputs)
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            if not short_of_memory(error):
                raise
        print("no memory for a recorded pass: kernels are launched one by one", flush=True)
        torch.cuda.empty_cache()
        return None

    def _inputs(self, group: Group) -> PassInputs:
        """The inputs of a group's next pass."""
        slots, device, empty = group.slots, self.base.device, group.rows - len(group.slots)
        sequences = [slot.texts.train.rows(slot.rows()) for slot in slots]
        batch = Batch.of(text.joined(sequences, group.rows * slots[0].settings.mbs), device)
        sizes = torch.tensor([float(slot.settings.minibs) for slot in slots] + [1.0] * empty)
        dropout = self._dropout(group) if device.type == "cuda" else None
        none = torch.zeros(0, device=device)
        rates, seeds = (none, none) if dropout is None else dropout
        return PassInputs(*batch, sizes.to(device, non_blocking=True), rates, seeds)

    def _dropout(self, group: Group) -> SlotDropout | None:
        empty = group.rows - len(group.slots)
        rates = [slot.settings.adapters.dropout for slot in group.slots] + [0.0] * empty
        seeds = [slot.pass_seed() for slot in group.slots] + [0] * empty
        return SlotDropout.of(rates, seeds, self.base.layers, self.base.device)

    def _learn(self, groups: Sequence[Group], inputs: Sequence[PassInputs], *, compiled: bool = False) -> torch.Tensor:
        """One pass over groups that can share it; returns the losses of their rows, also added to the groups'."""
        parts, at = [], 0
        for group, own in zip(groups, inputs, strict=True):
            dropout = SlotDropout(own.rates, own.seeds) if len(own.rates) else None
            if self.base.device.type != "cuda":
                dropout = self._dropout(group)
            rows = slice(at, at + len(own.read))
            parts.append(Part(rows, group.rows, group.leaves, group.scales, group.copies, dropout))
            at = rows.stop
        batch = Batch(
            *(torch.cat(t) if len(inputs) > 1 else t[0] for t in zip(*(own[:4] for own in inputs), strict=True))
        )
        settings = groups[0].slots[0].settings
        whole = self.base.makes_logits(settings.adapters)
        with self.base.through(parts, compiled=compiled), warnings.catch_warnings():
            losses = self.base.losses(batch, whole_logits=whole, packing=settings.packing)
            means = [
                losses[part.rows].view(part.slots, -1).sum(1) / own.sizes
                for part, own in zip(parts, inputs, strict=True)
            ]
            # Gradients are strided columns of one matrix by design; torch warns about that layout.
            warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
            total = torch.cat(means)
            total.sum().backward()
        for group, loss in zip(groups, means, strict=True):
            group.losses += loss.detach()
        return total.detach()

    @torch.no_grad()
    def evaluate(self, slots: Sequence[Slot]) -> list[float]:
        """The eval loss of each slot: the mean over its validation sequences of their mean losses."""
        losses: dict[Slot, float] = {}
        together: dict[tuple[SlotShape, int], list[Slot]] = {}
        for slot in slots:
            key = self.shape(slot.settings), id(slot.texts)
            together.setdefault(key, []).append(slot)
        for (shape, _), alike in together.items():
            losses |= dict(zip(alike, self._evaluate(self._groups[shape], alike), strict=True))
        return [losses[slot] for slot in slots]

    def _evaluate(self, group: Group, slots: Sequence[Slot]) -> list[float]:
        """The eval losses of slots of one group that read the same validation sequences."""
        # A batched eval pass seldom repeats its shape, and the first evaluation may be the only one: record neither.
        if group.graph is not None and group.evaluations and (losses := self._replayed_evaluation(group, slots)):
            return losses
        group.evaluations += 1
        index, validation = group.index(slots), slots[0].texts.validation
        total = torch.zeros(len(slots), device=self.base.device)
        for rows in self._validation_passes(slots[0], len(slots)):
            own = [validation.rows(rows)] * len(slots)
            batch = Batch.of(text.joined(own, len(rows) * len(slots)), self.base.device)
            total += self._score(group, batch, index).view(len(slots), -1).sum(1)
        return [float(loss) for loss in total / len(validation)]

    def _replayed_evaluation(self, group: Group, slots: Sequence[Slot]) -> list[float]:
        """As :meth:`_evaluate`, slot by slot through one recorded pass; empty if memory is short."""
        validation = slots[0].texts.validation
        totals = torch.zeros(len(slots), device=self.base.device)
        passes = self._validation_passes(slots[0], 1)
        for rows in passes:
            batch = Batch.of(text.joined([validation.rows(rows)], len(passes[0])), self.base.device)
            for number, row in enumerate(group.index(slots)[:, None]):
                inputs = EvalInputs(*batch, row)
                if group.evaluation is None or not group.evaluation.fits(inputs):
                    group.evaluation = self._graph(
                        lambda own: self._score(group, Batch(*own[:4]), own.row, compiled=True).sum(), inputs
                    )
                if group.evaluation is None:
                    group.graph, group.room = None, exact
                    return []
                totals[number] += group.evaluation.replay(inputs)
        return [float(loss) for loss in totals / len(validation)]

    def _validation_passes(self, slot: Slot, slots: int) -> list[npt.NDArray[np.int64]]:
        """The sequence numbers of each pass when ``slots`` slots like this one are evaluated."""
        settings, count = slot.settings, len(slot.texts.validation)
        size = settings.mbs
        if self.base.device.type == "cuda":
            most = CHUNK if self.base.makes_logits(settings.adapters) else EVAL_TOKENS
            size = max(size, most // (slots * settings.seq))
        return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]

    @torch.no_grad()
    def _score(self, group: Group, batch: Batch, index: torch.Tensor, *, compiled: bool = False) -> torch.Tensor:
        """The mean loss of each sequence [n] under the adapters of slots ``index`` [k], n/k sequences for each."""
        scales = {name: scale[index] for name, scale in group.scales.items()}
        rows = slice(0, len(batch.read))
        part = Part(rows, len(index), group.pairs(index), scales, group.copies_of(index))
        whole = self.base.makes_logits(group.slots[0].settings.adapters)
        with self.base.through([part], compiled=compiled):
            return self.base.losses(batch, whole_logits=whole)
