"""Gradients for recomputed layers that follow frozen embeddings."""

from __future__ import annotations

from typing import Any

import torch


def let_gradients_in(core: Any) -> None:
    """Enable gradients for the adapters of the recomputed layers of ``core``, one pipeline stage.

    PyTorch's checkpointing returns gradients only if an input requires one, and the output of frozen embeddings does
    not: the adapters of the first recomputed layers would silently not train, and the step would be too fast.
    """
    if core.pre_process:
        core.embedding.register_forward_hook(_ask_for_gradient)


def _ask_for_gradient(*hooked: Any) -> torch.Tensor:
    """Forward hook: make the output require a gradient. hooked: the module, its input and its output."""
    output: torch.Tensor = hooked[-1]
    return output.requires_grad_() if torch.is_grad_enabled() else output
