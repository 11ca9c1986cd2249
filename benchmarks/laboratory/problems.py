"""The laboratory's problems by name: shipped surfaces with the spaces that users would search."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from benchmarks.laboratory.problem import Problem
from lora_tune.config.parameters import FloatParameter, IntParameter, LayoutParameter, Parameter
from lora_tune.config.space import Space
from lora_tune_simulation.h100 import function as h100
from lora_tune_simulation.tabular import TabularSurface


def hyperparameters() -> dict[str, Parameter]:
    """Ranges in which most configurations fail: what somebody without experience would give."""
    return {
        "LR": FloatParameter(type="float", low=1e-5, high=1e-2, log=True),
        "MAX_STEPS": IntParameter(type="int", low=100, high=2500),
        "WARMUP_STEPS": IntParameter(type="int", low=0, high=200),
    }


def h100_layouts() -> LayoutParameter:
    return LayoutParameter(type="layout", tp=(1, 2, 4, 8), pp=(1, 2, 4), cp=(1, 2, 4, 8), mbs=(1, 2), gbs=(8, 16, 32))


PUBLISHED_H100 = {"LR": 4e-4, "MAX_STEPS": 800, "WARMUP_STEPS": 0, "layout": "tp4 pp1 cp1 minibs4 mbs1"}
"""The best public entry on one node of eight H100, as the shipped study enqueues it."""


def h100_wide(variant: int) -> Problem:
    """8x H100, 113 layouts, wide ranges, MLPerf's score."""
    space = Space({**hyperparameters(), "layout": h100_layouts()}, nodes=1, gpus_per_node=8)
    return Problem("h100", h100.variant(variant), space, start=PUBLISHED_H100)


def lora_tiny(variant: int) -> Problem:
    """Measured trials of the tiny task, over the grid's own ranges; its schedules are the ones measured."""
    from lora_tune_simulation.lora_tables import tiny

    return _table("lora_tiny", tiny.variant(variant))


def lora_small(variant: int) -> Problem:
    """Measured trials of a 23.5 M Llama, likewise."""
    from lora_tune_simulation.lora_tables import small

    return _table("lora_small", small.variant(variant))


def _table(name: str, surface: TabularSurface) -> Problem:
    """A table's own ranges of rate, warm-up and batch, on 8 GPUs with every layout of those batches."""
    axes = surface.table.axes
    steps = [int(n) for n in axes["MAX_STEPS"]]
    layout = LayoutParameter(
        type="layout", tp=(1, 2, 4, 8), pp=(1, 2, 4), cp=(1, 2, 4, 8), mbs=(1, 2), gbs=tuple(map(int, axes["GBS"]))
    )
    space = Space(
        {
            "LR": FloatParameter(type="float", low=axes["LR"][0], high=axes["LR"][-1], log=True),
            "MAX_STEPS": IntParameter(
                type="int", low=steps[0], high=steps[-1], step=math.gcd(*np.diff(steps).tolist())
            ),
            "WARMUP_STEPS": IntParameter(type="int", low=0, high=int(axes["WARMUP_STEPS"][-1])),
            "layout": layout,
        },
        nodes=1,
        gpus_per_node=8,
    )
    return Problem(name, surface, space, target=surface.target, interval=surface.table.interval)


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "h100": h100_wide,
    "lora_tiny": lora_tiny,
    "lora_small": lora_small,
}
"""Name -> the problem at site ``variant`` (0: the public average)."""
