"""Recomputation behind frozen embeddings."""

from __future__ import annotations

from typing import Any

import torch


def let_gradients_in(core: Any) -> None:
    """Let gradients reach the adapters of the recomputed layers of ``core``, one pipeline stage.

    PyTorch's recomputation keeps a gradient only where an input asks for one. Behind frozen embeddings none does: every
    recomputed layer up to the first that is not would stay as it was, without a word, and look faster than it is.
    """
    if core.pre_process:
        core.embedding.register_forward_hook(_ask_for_gradient)


def _ask_for_gradient(*hooked: Any) -> torch.Tensor:
    """A forward hook's arguments are the module, its input and its output."""
    output: torch.Tensor = hooked[-1]
    return output.requires_grad_() if torch.is_grad_enabled() else output
