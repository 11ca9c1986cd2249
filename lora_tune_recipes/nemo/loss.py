"""The loss as NVIDIA's MLPerf implementation defines it: the mean over sequences of each sequence's mean loss.

NeMo's own reduction weights every token of a batch equally, which differs if sequences have different numbers of
unmasked tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from nemo.lightning.megatron_parallel import MegatronLossReduction


class PerSequenceLoss(MegatronLossReduction):
    """Sums the losses of a micro-batch with the weights of ``data.batch`` in ``loss_mask``.

    The differentiated loss is the mean over the micro-batch's sequences; Megatron then averages over micro-batches
    and data-parallel ranks, and sums over context-parallel ranks, each of which holds a part of every sequence.
    """

    def forward(
        self, batch: dict[str, torch.Tensor], forward_out: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """forward_out: per-token losses [mbs, seq/CP]. Returns this rank's share of the mean, and of the sum."""
        total = (forward_out.float() * batch["loss_mask"]).sum()
        return total / len(forward_out), {"sum": total.detach()}

    def reduce(self, losses_reduced_per_micro_batch: Any) -> torch.Tensor:
        """This rank's share of the sum over the sequences of a step, without communication."""
        return torch.stack([one["sum"] for one in losses_reduced_per_micro_batch]).sum()
