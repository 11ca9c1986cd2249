"""The arithmetic of a pack: slots join and leave, every slot makes one pass a round, and those with a whole step learn.

What a slot computes depends on its own knobs, data and seed alone. On a CPU in float32 it is the same to the bit
whoever trains beside it; on a GPU the products of a batch are rounded by the shape that they are computed in.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from lora_tune_recipes.packed.base import PackedBase
from lora_tune_recipes.packed.dropout import SlotDropout
from lora_tune_recipes.packed.group import AdapterPair, Group, Rows
from lora_tune_recipes.packed.head import CHUNK
from lora_tune_recipes.packed.layers import Part
from lora_tune_recipes.packed.slot import Slot
from lora_tune_recipes.settings import Settings

Key = TypeVar("Key")
EVAL_TOKENS = 2**17
"""Tokens of one pass of an evaluation on a GPU."""
RANKS = (16, 64, 256)
"""On a GPU ranks are filled up to one of these: few products of many slots are faster than many of few."""


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
    """Of DoRA, whether the adapters drop anything: the frozen product that they scale is another one then."""


def numbers(losses: Mapping[Key, torch.Tensor]) -> dict[Key, float]:
    """The numbers of several losses, in one transfer from the device."""
    if not losses:
        return {}
    return dict(zip(losses, torch.stack(list(losses.values())).tolist(), strict=True))


class Pack:
    """Slots over ``base``, none at first."""

    def __init__(self, base: PackedBase) -> None:
        self.base = base
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
        """How many weights the adapter of a trial of ``settings`` has here; its modules are made ready to take it."""
        rank = self.shape(settings).rank
        whole = [parameter for own in self.base.whole(settings).values() for parameter in own.values()]
        adapters = sum(module.weights(rank) for module in self.base.modules(settings).values())
        return adapters + sum(parameter.numel() for parameter in whole)

    def join(self, slot: Slot, state: Rows | None = None) -> None:
        """From the next round on ``slot`` trains; ``state`` is where it left off, None for a fresh adapter."""
        shape = self.shape(slot.settings)
        group = self._groups.get(shape) or self._group(slot.settings, shape.rank)
        group.join(slot, state)
        self._groups[shape] = group  # only now: a group without slots would end the next round

    def _group(self, settings: Settings, rank: int) -> Group:
        return Group(self.base.modules(settings), rank, self.base.device, self.base.whole(settings))

    def leave(self, slot: Slot) -> Rows:
        """Take ``slot`` out; its weights and moments."""
        shape = self.shape(slot.settings)
        group = self._groups[shape]
        state = group.leave(slot)
        slot.again()
        if not group.slots:
            del self._groups[shape]
        return state

    def group(self, slot: Slot) -> Group:
        """The group that ``slot`` is in."""
        return self._groups[self.shape(slot.settings)]

    def trains(self, slot: Slot) -> bool:
        """Whether a pass of ``slot`` by itself raises nothing; it is left as it is. For a round that failed."""
        copied, own = Pack(self.base), Slot(slot.settings, slot.texts, slot.step)
        try:
            copied.join(own, self.group(slot).state(slot))
            copied.round()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this slot's
            print(f"a pass by itself: {type(error).__qualname__}: {' '.join(str(error).split())}", flush=True)
            return False
        return True

    def rewind(self) -> None:
        """After a round that failed half way: every slot begins its step anew."""
        for group in self._groups.values():
            group.forget()
            for slot in group.slots:
                slot.again()

    def round(self, done: dict[Slot, torch.Tensor] | None = None) -> dict[Slot, torch.Tensor]:
        """One pass of every slot; the loss, on the device, of each slot whose step is now whole.

        done: filled with these as they come, so that a round that fails half way tells which slots have stepped.
        """
        done = {} if done is None else done
        # Rows of one length whose attention and whose logits are computed in one way share a pass.
        passes: dict[tuple[int, bool, bool], list[Group]] = {}
        for shape, group in sorted(self._groups.items()):
            key = shape.seq, shape.packing, self.base.makes_logits(group.slots[0].settings.adapters)
            passes.setdefault(key, []).append(group)
        for groups in passes.values():
            self._forward_backward(groups)
        for group in self._groups.values():
            due = [i for i, slot in enumerate(group.slots) if slot.passed()]
            if due:
                losses = group.step(due)
                for i, loss in zip(due, losses, strict=True):
                    done[group.slots[i]] = loss
                    group.slots[i].stepped()
        return done

    def _forward_backward(self, groups: Sequence[Group]) -> None:
        """One pass of groups that can share it."""
        parts, sequences, at = [], [], 0
        for group in groups:
            seeds, rates = [s.pass_seed() for s in group.slots], [s.settings.adapters.dropout for s in group.slots]
            dropout = SlotDropout.of(rates, seeds, self.base.device)
            sequences += [slot.texts.train.rows(slot.rows()) for slot in group.slots]
            count = len(group.slots) * group.slots[0].settings.mbs
            rows = slice(at, at + count)
            parts.append(Part(rows, len(group.slots), group.leaves, group.scales, group.copies, dropout))
            at += count
        batches = [self._batches(group) for group in groups]
        with self.base.through(parts, training=True), warnings.catch_warnings():
            losses = self.base.losses(sequences)
            own = [losses[p.rows].view(p.slots, -1).sum(1) / size for p, size in zip(parts, batches, strict=True)]
            # Gradients lie in columns of one matrix on purpose; torch warns that this is not its own layout.
            warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
            torch.cat(own).sum().backward()
        for group, loss in zip(groups, own, strict=True):
            group.losses += loss.detach()

    def _batches(self, group: Group) -> torch.Tensor:
        """Sequences of each slot's optimizer step: [k]."""
        sizes = [float(slot.settings.minibs) for slot in group.slots]
        return torch.tensor(sizes).to(self.base.device, non_blocking=True)

    @torch.no_grad()
    def evaluate(self, slots: Sequence[Slot]) -> list[float]:
        """The eval losses of ``slots``: the mean over a slot's validation sequences of each one's mean loss."""
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
        index = [group.slots.index(slot) for slot in slots]
        pairs: dict[str, AdapterPair] = group.pairs(index)
        copies = group.copies_of(index)
        chosen = torch.tensor(index, device=self.base.device)
        scales = {name: scale[chosen] for name, scale in group.scales.items()}
        validation, settings = slots[0].texts.validation, slots[0].settings
        size = settings.mbs
        if self.base.device.type == "cuda":
            most = CHUNK if self.base.makes_logits(settings.adapters) else EVAL_TOKENS
            size = max(size, most // (len(slots) * settings.seq))
        total = torch.zeros(len(slots), device=self.base.device)
        for start in range(0, len(validation), size):
            rows = validation.rows(np.arange(start, min(start + size, len(validation))))
            part = Part(slice(0, len(rows) * len(slots)), len(slots), pairs, scales, copies)
            with self.base.through([part], training=False):
                total += self.base.losses([rows] * len(slots)).view(len(slots), -1).sum(1)
        return [float(loss) for loss in total / len(validation)]
