"""TEST ONLY: the workload kind of a study whose Megatron-Bridge trials run on a CPU."""

from __future__ import annotations

from typing import ClassVar

from lora_tune_recipes.workloads import BridgeWorkload


class BridgeOnCpu(BridgeWorkload):
    """Workload ``bridge`` whose program is ``bridge_client``."""

    module: ClassVar[str] = "tests.recipes.bridge_client"
