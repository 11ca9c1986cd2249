"""Tables of real LoRA trials as surfaces: ``surface = "lora_tiny"`` or ``"lora_small"`` in a study.

Measured, on one GPU by ``python -m lora_tune_recipes.many_adapters`` with ``benchmarks/gpu/grid_tiny.json`` and
``grid_small.json``: every eval loss. ``python -m benchmarks.tables`` makes the shipped files from its output and
prints how the targets were chosen.

Assumed: time and memory. A job runs as if the 8x H100 of ``machine`` trained Llama-2-70B, slowed down so that the
samples of the best measured point take as long as there (25 minutes), and evals the same share of it.
"""

from __future__ import annotations

from lora_tune_simulation.h100 import USABLE_GB
from lora_tune_simulation.machine import Machine
from lora_tune_simulation.tabular import TABLES, Table, TabularSurface, read_table

PUBLIC_SAMPLES, PUBLIC_INTERVAL = 3100, 384
"""Samples of a good run of Llama-2-70B at GBS 8 in the public results, and its eval interval."""


def shipped(name: str, target: float) -> TabularSurface:
    """The surface over the shipped table ``name``."""
    table = read_table(TABLES / f"{name}.npz")
    slower = fewest_samples(table, target) / PUBLIC_SAMPLES
    machine = Machine(
        family="hopper", accelerator="H100", gpus=8, nodes=1, memory_gb=USABLE_GB,
        speed=slower, eval_speed=slower * PUBLIC_INTERVAL / table.interval,
    )  # fmt: skip
    return TabularSurface(table=table, machine=machine, target=target)


def fewest_samples(table: Table, target: float) -> float:
    """Mean samples to ``target`` over the seeds of the best measured point."""
    return float(table.stops(target).mean(axis=-1).min())


tiny = shipped("lora_tiny", target=1.64)
small = shipped("lora_small", target=1.08)
