"""72 GB200 in 18 nodes of 4, one NVLink domain. ``surface = "gb200x72"`` in a study."""

from __future__ import annotations

from lora_tune.launchers.simulated.machine import Machine
from lora_tune.launchers.simulated.simulated_run import SimulatedRun

function = SimulatedRun(
    machine=Machine(family="blackwell", accelerator="GB200", gpus=72, nodes=18, memory_gb=180.0, init_median=150.0)
)
