"""8x H100 80 GB, one node; and 64 such nodes.

``surface = "h100"``, ``"h100_time"``, ``"h100_switches"`` or ``"h100x64"`` in a study.
"""

from __future__ import annotations

from dataclasses import replace

from lora_tune.launchers.simulated.machine import Machine
from lora_tune.launchers.simulated.simulated_run import SimulatedRun, SiteSwitches, SwitchedRun

USABLE_GB = 78.0
"""Memory of an 80 GB card that CUDA contexts and NCCL leave (assumption)."""

function = SimulatedRun(machine=Machine(family="hopper", accelerator="H100", gpus=8, nodes=1, memory_gb=USABLE_GB))
with_switches = SwitchedRun(run=function, switches=SiteSwitches(number=0))
time_to_target = replace(function, score="time_to_target")
sixty_four_nodes = SimulatedRun(
    machine=Machine(family="hopper", accelerator="H100", gpus=512, nodes=64, memory_gb=USABLE_GB)
)
