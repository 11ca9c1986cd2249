"""The learning rate at a step."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, floor: float, warmup_steps: int, max_steps: int) -> float:
    """The rate of optimizer step ``step`` (from 0): linear warm-up, then a half cosine from ``peak`` to ``floor``.

    The warm-up starts at ``peak / (warmup_steps + 1)``, as NeMo's does, so that no step has a rate of zero.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / (max_steps - warmup_steps)
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
