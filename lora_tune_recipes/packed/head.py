"""The loss over a frozen output layer, some tokens at a time: all logits at once would take most of the memory."""

from __future__ import annotations

from typing import Any

import torch

CHUNK = 8192
"""Tokens whose logits exist at one time."""


class FrozenHeadLoss(torch.autograd.Function):
    """The weighted cross entropy of each token [t] of hidden states [t, width] under a frozen head.

    The head does not learn, so the gradient of each chunk is known as soon as its logits are: it is kept in place of
    them. weight [vocabulary, width], bias [vocabulary] or None, predict [t], counts [t]: what each token counts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        predict: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        wanted = ctx.needs_input_grad[0]
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden) if wanted else None
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            logits = torch.nn.functional.linear(hidden[part], weight, bias).float()
            truth, own = predict[part, None], counts[part]
            normal = torch.logsumexp(logits, 1)
            losses[part] = (normal - logits.gather(1, truth)[:, 0]) * own
            if gradient is not None:
                chances = logits.sub_(normal[:, None]).exp_()
                chances.scatter_add_(1, truth, torch.full_like(truth, -1, dtype=chances.dtype))
                gradient[part] = chances.mul_(own[:, None]).to(hidden.dtype) @ weight
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0][:, None].to(gradient.dtype), None, None, None, None
