"""Faster, smaller parts of a frozen base: the loss over its output layer, computed in chunks, and its norms.

All logits at once would take most of the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CHUNK = 8192
"""Tokens per chunk of logits."""


def chunk_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    predict: torch.Tensor,
    counts: torch.Tensor,
    learns: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The losses of :class:`FrozenHeadLoss` and, if ``learns``, the gradient with respect to ``hidden``."""
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

    As the head is frozen, each chunk's gradient is computed with its logits and kept in their place. weight
    [vocabulary, width], bias [vocabulary] or None, predict [t], counts [t]: weight of each token. chunk:
    :func:`chunk_losses`, optionally compiled.
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


@torch.no_grad()
def fuse_norms(model: Any) -> None:
    """Replace the model's RMS norms by torch's, which passes over memory once, if they compute the same.

    This is tested on a probe, not by name: some families add one to the weight. In a pack the plain norm's passes over
    activations take an eighth of a step at 1 B.
    """
    for module in model.modules():
        epsilon, weight = getattr(module, "variance_epsilon", None), getattr(module, "weight", None)
        if epsilon is None or weight is None or weight.dim() != 1:
            continue
        shape = tuple(weight.shape)
        probe = torch.linspace(-2, 2, 4 * len(weight), device=weight.device, dtype=weight.dtype).view(4, -1)
        fused = torch.nn.functional.rms_norm(probe, shape, weight, epsilon)
        if torch.allclose(module(probe).float(), fused.float(), rtol=0.02, atol=1e-3):
            module.__class__ = FusedNorm


class FusedNorm(torch.nn.Module):
    """A norm with ``weight`` and ``variance_epsilon``, in one pass over memory."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Look the weight up at each call, because a slot's copy may replace it.
        return torch.nn.functional.rms_norm(x, tuple(self.weight.shape), self.weight, self.variance_epsilon)
