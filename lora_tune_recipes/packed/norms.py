"""The norms of a frozen base, in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def fuse_norms(model: Any) -> None:
    """Let torch's own RMS norm, one pass over memory, stand in for those of the model that compute the same.

    What a norm computes is tried, not read from its name: some families add one to the weight. A pack is wide, so the
    passes that the plain form makes over its activations are an eighth of a step at 1 B.
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
        # Its weight is looked up at each call: a slot's copy may stand in for it.
        return torch.nn.functional.rms_norm(x, tuple(self.weight.shape), self.weight, self.variance_epsilon)
