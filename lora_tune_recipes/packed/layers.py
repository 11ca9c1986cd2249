"""Frozen layers with the adapters of all slots of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft.utils.integrations import dequantize_module_weight
from torch.func import functional_call

from lora_tune_recipes.packed.dropout import SlotDropout, drop
from lora_tune_recipes.packed.group import AdapterPair, Copies


class Share(NamedTuple):
    """One layer's share of a part of a pass, without module names.

    Layers of one kind then differ only in tensors, so that one compiled program serves all. start, stop: the part's
    sequences. slots: how many share them. dropout: rates and seeds, see :func:`drop`.
    """

    start: int
    stop: int
    slots: int
    pair: AdapterPair | None
    scale: torch.Tensor | None
    copies: Mapping[str, torch.Tensor] | None
    dropout: tuple[Any, Any] | None


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive sequences of a pass, and their adapters.

    rows: the sequences. slots: how many slots share them, equally. pairs: adapters by module, [slots, ...].
    scales: of the adapters by module, [slots, 1, 1]. copies: of the modules that these slots train whole.
    """

    rows: slice
    slots: int
    pairs: Mapping[str, AdapterPair]
    scales: Mapping[str, torch.Tensor]
    copies: Copies
    dropout: SlotDropout | None = None

    def share(self, name: str, number: int) -> Share:
        """The share of the layer ``name``; ``number``: of the layer, which seeds its dropout."""
        dropout = None if self.dropout is None else self.dropout.of_layer(number)
        return Share(
            self.rows.start,
            self.rows.stop,
            self.slots,
            self.pairs.get(name),
            self.scales.get(name),
            self.copies.get(name),
            dropout,
        )


class PackedLayer(torch.nn.Module):
    """A frozen layer with the adapters of the current pass in ``shares``.

    The base class fits a layer of any kind: it takes no adapters, but slots can train copies of it.
    """

    def __init__(self, base: Any, name: str, number: int) -> None:
        super().__init__()
        self.base = base
        self.name, self.number = name, number
        self.shares: tuple[Share, ...] = ()
        self._squares: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.shares
        if shares and all(share.copies is not None for share in shares):
            return torch.cat([self._copied(share, x[share.start : share.stop]) for share in shares])
        y: torch.Tensor = self.base(x)
        if not shares:
            return y
        if len(shares) == 1:
            return self._through(shares[0], x, y)
        return torch.cat([self._through(s, x[s.start : s.stop], y[s.start : s.stop]) for s in shares])

    def _copied(self, share: Share, x: torch.Tensor) -> torch.Tensor:
        """Each slot's own copy of the layer, applied to its rows of ``x``."""
        own = {n: value.to(self.base.get_parameter(n).dtype) for n, value in (share.copies or {}).items()}
        copies = [
            functional_call(self.base, {name: value[slot] for name, value in own.items()}, (rows,))
            for slot, rows in enumerate(x.chunk(share.slots))
        ]
        return torch.cat(copies)

    @property
    def width_in(self) -> int:
        """Columns of the A factors."""
        raise NotImplementedError

    @property
    def width_out(self) -> int:
        """Rows of the B factors."""
        raise NotImplementedError

    @torch.no_grad()
    def norms(self) -> torch.Tensor:
        """The norm of each row of the frozen weight: [width out], float32; the initial magnitudes of DoRA."""
        if self._squares is None:
            self._squares = self._weight().float().square().sum(1)
        return self._squares.sqrt()

    def _through(self, share: Share, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if share.copies is not None:
            return self._copied(share, x)
        if share.pair is None or share.scale is None:
            return y
        own = y.reshape(share.slots, -1, y.shape[-1])
        return self._adapted(share, share.pair, share.scale, x, own).view_as(y)

    def _adapted(
        self, share: Share, pair: AdapterPair, scale: torch.Tensor, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """``y`` [slots, n, width out] of the frozen layer plus ``scale`` times the adapter ``pair`` of ``x``."""
        raise NotImplementedError

    def _weight(self) -> torch.Tensor:
        """The frozen weight [width out, width in], dequantized from 4 bits if necessary."""
        raise NotImplementedError

    @torch.no_grad()
    def _inverse_norms(self, pair: AdapterPair, scale: torch.Tensor) -> torch.Tensor:
        """One over the norm of each row of W + s B A: [slots, 1, width out].

        Computed without materializing W + s B A: its rows have the squared norms |w|^2 + 2 s b.(W A^T) +
        s^2 b.(A A^T) b, products of ``rank`` columns. As in DoRA (Liu et al. 2024, section 4.3) the norm has no
        gradient.
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

    def _adapted(
        self, share: Share, pair: AdapterPair, scale: torch.Tensor, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        own = x.reshape(share.slots, -1, x.shape[-1])
        if share.dropout is not None:
            own = drop(own, *share.dropout)
        inner = torch.bmm(own.to(y.dtype), pair.a.mT.to(y.dtype)) * scale.to(y.dtype)
        if pair.magnitude is None:
            return torch.baddbmm(y, inner, pair.b.mT.to(y.dtype))
        # The adapter's dropout also applies to the frozen product that DoRA scales.
        plain = y if share.dropout is None else self.base(own)
        if self.base.bias is not None:
            plain = plain - self.base.bias
        ratio = pair.magnitude[:, None] * self._inverse_norms(pair, scale)
        return y + (ratio - 1).to(y.dtype) * plain + ratio.to(y.dtype) * torch.bmm(inner, pair.b.mT.to(y.dtype))


class PackedEmbedding(PackedLayer):
    """The input embeddings. As in peft, their adapters have no dropout."""

    @property
    def width_in(self) -> int:
        return int(self.base.num_embeddings)

    @property
    def width_out(self) -> int:
        return int(self.base.embedding_dim)

    def _weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.base.weight.mT
        return weight

    def _adapted(
        self, share: Share, pair: AdapterPair, scale: torch.Tensor, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        tokens = x.reshape(share.slots, -1)
        slots = torch.arange(share.slots, device=x.device)[:, None]
        inner = pair.a.mT[slots, tokens].to(y.dtype) * scale.to(y.dtype)
        if pair.magnitude is None:
            return torch.baddbmm(y, inner, pair.b.mT.to(y.dtype))
        ratio = pair.magnitude[:, None] * self._inverse_norms(pair, scale)
        return ratio.to(y.dtype) * (y + torch.bmm(inner, pair.b.mT.to(y.dtype)))
