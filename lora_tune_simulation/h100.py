"""8x H100 80 GB, one node, and 64 such nodes; 72 GB200 in 18 nodes of 4, one NVLink domain.

``surface = "h100"``, ``"h100_time"``, ``"h100_switches"``, ``"h100x64"`` or ``"gb200x72"`` in a study.
"""

from __future__ import annotations

from dataclasses import replace

from lora_tune_simulation.machine import Machine
from lora_tune_simulation.simulated_run import SimulatedRun, SiteSwitches, SwitchedRun

USABLE_GB = 78.0
"""Memory of an 80 GB card after CUDA contexts and NCCL (assumption)."""

function = SimulatedRun(machine=Machine(family="hopper", accelerator="H100", gpus=8, nodes=1, memory_gb=USABLE_GB))
with_switches = SwitchedRun(run=function, switches=SiteSwitches(number=0))
time_to_target = replace(function, score="time_to_target")
sixty_four_nodes = SimulatedRun(
    machine=Machine(family="hopper", accelerator="H100", gpus=512, nodes=64, memory_gb=USABLE_GB)
)
gb200x72 = SimulatedRun(
    machine=Machine(family="blackwell", accelerator="GB200", gpus=72, nodes=18, memory_gb=180.0, init_median=150.0)
)
