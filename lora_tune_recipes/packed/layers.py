"""Frozen layers with the adapters of all slots of a pass beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft.utils.integrations import dequantize_module_weight
from torch.func import functional_call

from lora_tune_recipes.packed.dropout import SlotDropout
from lora_tune_recipes.packed.group import AdapterPair, Copies


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring sequences of a pass, and the adapters that they go through.

    rows: the sequences. slots: how many slots share them, equally. pairs: adapters by module, [slots, ...].
    scales: of the adapters by module, [slots, 1, 1]. copies: of the modules that these slots train whole.
    """

    rows: slice
    slots: int
    pairs: Mapping[str, AdapterPair]
    scales: Mapping[str, torch.Tensor]
    copies: Copies
    dropout: SlotDropout | None = None


class PackedLayer(torch.nn.Module):
    """A frozen layer with the adapters of every part of the pass, which ``parts`` holds while it goes on.

    As it is, of any kind: it takes no adapters, but slots can train copies of it.
    """

    def __init__(self, base: Any, name: str, number: int, parts: list[Part]) -> None:
        super().__init__()
        self.base = base
        self._name, self._number, self._parts = name, number, parts
        self._squares: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._parts and all(self._name in part.copies for part in self._parts):
            return torch.cat([self._copied(part, x[part.rows]) for part in self._parts])
        y: torch.Tensor = self.base(x)
        if not self._parts:
            return y
        if len(self._parts) == 1:
            return self._through(self._parts[0], x, y)
        return torch.cat([self._through(part, x[part.rows], y[part.rows]) for part in self._parts])

    def _copied(self, part: Part, x: torch.Tensor) -> torch.Tensor:
        """What each slot's own copy of the layer makes of its rows of ``x``."""
        own = {name: value.to(self.base.get_parameter(name).dtype) for name, value in part.copies[self._name].items()}
        copies = [
            functional_call(self.base, {name: value[slot] for name, value in own.items()}, (rows,))
            for slot, rows in enumerate(x.chunk(part.slots))
        ]
        return torch.cat(copies)

    @property
    def width_in(self) -> int:
        """How many columns the first factors have."""
        raise NotImplementedError

    @property
    def width_out(self) -> int:
        """How many rows the second factors have."""
        raise NotImplementedError

    @torch.no_grad()
    def norms(self) -> torch.Tensor:
        """The norm of each row of the frozen weight: [width out], float32. DoRA's magnitudes begin with them."""
        if self._squares is None:
            self._squares = self._weight().float().square().sum(1)
        return self._squares.sqrt()

    def _through(self, part: Part, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self._name in part.copies:
            return self._copied(part, x)
        pair = part.pairs.get(self._name)
        if pair is None:
            return y
        own = y.reshape(part.slots, -1, y.shape[-1])
        return self._adapted(part, pair, x, own).view_as(y)

    def _adapted(self, part: Part, pair: AdapterPair, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``y`` [slots, n, width out] of the frozen layer, with what ``pair`` makes of ``x``."""
        raise NotImplementedError

    def _weight(self) -> torch.Tensor:
        """The frozen weight [width out, width in], out of its four bits where it has those."""
        raise NotImplementedError

    @torch.no_grad()
    def _inverse_norms(self, pair: AdapterPair, scale: torch.Tensor) -> torch.Tensor:
        """One over the norm of each row of W + s B A: [slots, 1, width out].

        No slot's W + s B A is made for that: its rows have the squared norms |w|^2 + 2 s b.(W A^T) + s^2 b.(A A^T) b,
        which cost a product of ``rank`` columns. As in DoRA (Liu et al. 2024, section 4.3) the norm has no gradient.
        """
        weight = self._weight()
        a, b = pair.a.detach(), pair.b.detach()
        across = torch.bmm(a.to(weight.dtype), weight.mT.expand(len(a), -1, -1)).mT.float()
        within = torch.bmm(b, torch.bmm(a, a.mT))
        change = 2 * scale * across + scale * scale * within
        return (self.norms().square() + (b * change).sum(2)).rsqrt()[:, None]


class PackedLinear(PackedLayer):
    """A linear layer."""

    @property
    def width_in(self) -> int:
        return int(self.base.in_features)

    @property
    def width_out(self) -> int:
        return int(self.base.out_features)

    def _weight(self) -> torch.Tensor:
        weight: torch.Tensor = dequantize_module_weight(self.base)
        return weight

    def _adapted(self, part: Part, pair: AdapterPair, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        own, scale = x.reshape(part.slots, -1, x.shape[-1]), part.scales[self._name]
        if part.dropout is not None:
            own = part.dropout(own, self._number)
        inner = torch.bmm(own.to(y.dtype), pair.a.mT.to(y.dtype)) * scale.to(y.dtype)
        if pair.magnitude is None:
            return torch.baddbmm(y, inner, pair.b.mT.to(y.dtype))
        # What the adapter drops, it drops of the frozen product that it scales, too.
        plain = y if part.dropout is None else self.base(own)
        if self.base.bias is not None:
            plain = plain - self.base.bias
        ratio = pair.magnitude[:, None] * self._inverse_norms(pair, scale)
        return y + (ratio - 1).to(y.dtype) * plain + ratio.to(y.dtype) * torch.bmm(inner, pair.b.mT.to(y.dtype))


class PackedEmbedding(PackedLayer):
    """The input embeddings. As in peft, their adapters drop nothing."""

    @property
    def width_in(self) -> int:
        return int(self.base.num_embeddings)

    @property
    def width_out(self) -> int:
        return int(self.base.embedding_dim)

    def _weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.base.weight.mT
        return weight

    def _adapted(self, part: Part, pair: AdapterPair, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        tokens, scale = x.reshape(part.slots, -1), part.scales[self._name]
        slots = torch.arange(part.slots, device=x.device)[:, None]
        inner = pair.a.mT[slots, tokens].to(y.dtype) * scale.to(y.dtype)
        if pair.magnitude is None:
            return torch.baddbmm(y, inner, pair.b.mT.to(y.dtype))
        ratio = pair.magnitude[:, None] * self._inverse_norms(pair, scale)
        return ratio.to(y.dtype) * (y + torch.bmm(inner, pair.b.mT.to(y.dtype)))
