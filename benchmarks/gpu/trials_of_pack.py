"""The trials by which packs are measured an hour, and what share of an H200 a figure of them is."""

from __future__ import annotations

from collections.abc import Mapping

from lora_tune.base.llama import Shape

PEAK = 790e12
"""bf16 floating-point operations a second of an H200, as a large product of matrices reaches them."""
SMALL: dict[str, object] = {"SEQ": 256, "MINIBS": 8, "MAX_STEPS": 160, "EVAL_SAMPLES": 64, "VAL_CHECK_INTERVAL": 128}
"""The trial of the ``trials`` part of ``benchmarks.gpu.packed``: that of ``grid_small.json``."""
LARGE: dict[str, object] = {"SEQ": 512, "MINIBS": 4, "MAX_STEPS": 60, "EVAL_SAMPLES": 16, "VAL_CHECK_INTERVAL": 128}
"""The trial of its ``large`` part."""


def peak_share(shape: Shape, trial: Mapping[str, object], per_hour: float) -> float:
    """Model FLOPs of the training passes of so many trials an hour, of ``PEAK``."""
    seq, batch, steps = (int(str(trial[name])) for name in ("SEQ", "MINIBS", "MAX_STEPS"))
    return shape.step_flops(seq * batch * steps, seq) * per_hour / 3600 / PEAK
