"""Causal attention through PyTorch without Transformer Engine, with context parallelism by all-to-all.

Megatron-Core's unfused attention does not support context parallelism and materializes the scores.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch.nn import functional as F


class _Exchange(torch.autograd.Function):
    """All-to-all over the context-parallel group of x [s, b, h, d]: gather the sequence, split the heads; or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, gather: bool) -> torch.Tensor:
        ctx.group, ctx.gather = group, gather
        sent = torch.stack(x.chunk(group.size(), dim=2 if gather else 0)).contiguous()
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(0), dim=0 if gather else 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Exchange.apply(gradient.contiguous(), ctx.group, not ctx.gather), None, None


class SdpaAttention(MegatronModule):
    """Drop-in for ``core_attention`` of a Megatron-Core layer; tensors are [seq/CP, batch, heads/TP, channels]."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__(config)
        self.cp = config.context_parallel_size

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        shape = (query.shape[0], query.shape[1], -1)
        if self.cp == 1:
            return _causal(query, key, value).reshape(shape)
        group = parallel_state.get_context_parallel_group()
        held = zigzag(query.shape[0] * self.cp, self.cp, query.device)
        natural = torch.argsort(held)
        whole = [_Exchange.apply(x, group, True)[natural] for x in (query, key, value)]
        out = _Exchange.apply(_causal(*whole)[held].contiguous(), group, False)
        return out.reshape(shape)


def zigzag(seq: int, cp: int, device: Any) -> torch.Tensor:
    """Positions in the order of the ``cp`` ranks that hold them.

    Megatron-Core cuts a sequence into 2*CP chunks and gives rank r the chunks r and 2*CP-1-r, which balances the work
    of causal attention.
    """
    chunks = torch.arange(seq, device=device).chunk(2 * cp)
    return torch.cat([torch.cat((chunks[r], chunks[2 * cp - 1 - r])) for r in range(cp)])


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.permute(2, 0, 1, 3)
