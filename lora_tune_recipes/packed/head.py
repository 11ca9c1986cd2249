"""The loss over a frozen output layer, some tokens at a time: all logits at once would take most of the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CHUNK = 8192
"""Tokens whose logits exist at one time."""


def chunk_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    predict: torch.Tensor,
    counts: torch.Tensor,
    learns: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The losses of :class:`FrozenHeadLoss` and, where one ``learns``, the gradient by ``hidden``."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    truth = predict[:, None]
    normal = torch.logsumexp(logits, 1)
    losses = (normal - logits.gather(1, truth)[:, 0]) * counts
    if not learns:
        return losses, None
    if torch.compiler.is_compiling():  # one program without stores between: a scatter would want them
        chances = torch.exp(logits - normal[:, None])
        chances = torch.where(torch.arange(len(weight), device=hidden.device) == truth, chances - 1, chances)
    else:
        chances = logits.sub_(normal[:, None]).exp_()
        chances.scatter_add_(1, truth, torch.full_like(truth, -1, dtype=chances.dtype))
    return losses, chances.mul_(counts[:, None]).to(hidden.dtype) @ weight


Chunk = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class FrozenHeadLoss(torch.autograd.Function):
    """The weighted cross entropy of each token [t] of hidden states [t, width] under a frozen head.

    The head does not learn, so the gradient of each chunk is known as soon as its logits are: it is kept in place of
    them. weight [vocabulary, width], bias [vocabulary] or None, predict [t], counts [t]: what each token counts.
    chunk: :func:`chunk_losses`, perhaps compiled.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        predict: torch.Tensor,
        counts: torch.Tensor,
        chunk: Chunk,
    ) -> torch.Tensor:
        learns = ctx.needs_input_grad[0]
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden) if learns else None
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            losses[part], own = chunk(hidden[part], weight, bias, predict[part], counts[part], learns)
            if gradient is not None and own is not None:
                gradient[part] = own
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0][:, None].to(gradient.dtype), None, None, None, None, None
