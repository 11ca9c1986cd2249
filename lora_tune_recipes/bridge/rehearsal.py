"""The rehearsal of a Megatron-Bridge trial (``megatron.rehearsal``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lora_tune_recipes.bridge import trial  # noqa: F401 - first: makes Megatron-Bridge importable
from lora_tune_recipes.bridge.model import build_model
from lora_tune_recipes.bridge.settings import BridgeSettings
from lora_tune_recipes.megatron.processes import Processes
from lora_tune_recipes.megatron.rehearsal import rehearse
from lora_tune_recipes.megatron.settings import Recompute


def run(settings: BridgeSettings, processes: Processes, *, cuda: bool) -> None:
    """Train one layer of the trial's model for a step."""

    def build(layer: BridgeSettings) -> Any:
        none = Recompute(granularity="", method="uniform", layers=0, modules=())
        speed = replace(layer.speed, recompute=none, tp_overlap=False, cuda_graph=False, te_rng=False, offloaded=0)
        provider = build_model(replace(layer, speed=speed), cuda=cuda)
        provider.finalize()
        return provider.provide_distributed_model(wrap_with_ddp=False, bf16=cuda, use_cpu_initialization=not cuda)[0]

    rehearse(settings, processes, build, cuda=cuda)
