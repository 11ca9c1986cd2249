"""The loss as NVIDIA's MLPerf implementation defines it: the mean over sequences of each sequence's mean loss.

``data.batch`` puts each sequence's weights into ``loss_mask``, so a weighted sum over tokens is a sum over sequences,
also for a rank that holds parts of them.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state


def over_ranks(share: torch.Tensor) -> float:
    """The sum of the shares of all data- and context-parallel ranks, the same on every rank.

    Only shares on the last pipeline stage count; other stages may pass anything.
    """
    total = share.detach().double().clone()
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast(total, last, group=parallel_state.get_pipeline_model_parallel_group())
    return float(total)
