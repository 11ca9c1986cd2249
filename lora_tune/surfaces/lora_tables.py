"""Tables of real LoRA trials as surfaces: ``surface = "lora_tiny"`` or ``"lora_small"`` in a study.

Measured, on one GPU by ``python -m lora_tune.recipes.many_adapters`` with ``benchmarks/gpu/grid_tiny.json`` and
``grid_small.json``: every eval loss. ``python -m benchmarks.tables`` made the shipped files from what it wrote and
prints how the targets were chosen.

Assumption: everything on the clock, and memory. A job runs as if the 8x H100 of ``machine`` trained Llama-2-70B, slowed
down so that a good run takes about as long as there (25 minutes), with evals that take the same share of it.
"""

from __future__ import annotations

from pathlib import Path

from lora_tune.surfaces.h100 import USABLE_GB
from lora_tune.surfaces.machine import Machine
from lora_tune.surfaces.tabular import TabularSurface, read_table

TABLES = Path(__file__).parent / "tables"
PUBLIC_SAMPLES, PUBLIC_INTERVAL = 3100, 384
"""Samples of a good run of Llama-2-70B at GBS 8 in the public results, and between its evals."""


def shipped(name: str, target: float, good_samples: float) -> TabularSurface:
    """The surface over the shipped table ``name``. good_samples: of a good run to ``target``, which set the clock."""
    table = read_table(TABLES / f"{name}.npz")
    slower = good_samples / PUBLIC_SAMPLES
    machine = Machine(
        family="hopper", accelerator="H100", gpus=8, nodes=1, memory_gb=USABLE_GB,
        speed=slower, eval_speed=slower * PUBLIC_INTERVAL / table.interval,
    )  # fmt: skip
    return TabularSurface(table=table, machine=machine, target=target)
