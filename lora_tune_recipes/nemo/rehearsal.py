"""The rehearsal of a NeMo trial (``megatron.rehearsal``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lora_tune_recipes.megatron.processes import Processes
from lora_tune_recipes.megatron.rehearsal import rehearse
from lora_tune_recipes.megatron.settings import Recompute
from lora_tune_recipes.nemo.model import build_model
from lora_tune_recipes.nemo.settings import NemoSettings


def run(settings: NemoSettings, processes: Processes, *, cuda: bool) -> None:
    """Train one layer of the trial's model for a step."""

    def build(layer: NemoSettings) -> Any:
        none = Recompute(granularity="", method="uniform", layers=0, modules=())
        speed = replace(layer.speed, recompute=none, tp_overlap=False, cuda_graph=False)
        model = build_model(replace(layer, speed=speed), cuda=cuda)
        if not cuda:
            return model.config.configure_model(model.tokenizer)
        model.config.bf16, model.config.params_dtype = True, torch.bfloat16
        return model.config.configure_model(model.tokenizer).to("cuda", torch.bfloat16)

    rehearse(settings, processes, build, cuda=cuda)
