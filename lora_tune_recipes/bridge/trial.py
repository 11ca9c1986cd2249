"""One Megatron-Bridge LoRA run on this rank."""

from __future__ import annotations

import warnings

from lora_tune_recipes.bridge import imports

imports.prepare()

from megatron.bridge.training.pretrain import pretrain  # noqa: E402 - Megatron-Bridge can be imported from here on

from lora_tune_recipes.bridge import adapter_files, base, peft_format  # noqa: E402
from lora_tune_recipes.bridge.data import packed_data  # noqa: E402
from lora_tune_recipes.bridge.model import (  # noqa: E402
    attention_name,
    build_config,
    build_lora,
    build_model,
    check_machine,
)
from lora_tune_recipes.bridge.run import BridgeRun  # noqa: E402
from lora_tune_recipes.bridge.settings import BridgeSettings  # noqa: E402
from lora_tune_recipes.bridge.step import forward_step  # noqa: E402
from lora_tune_recipes.megatron import checkpoint, start  # noqa: E402
from lora_tune_recipes.megatron.processes import Processes  # noqa: E402


def run(settings: BridgeSettings, processes: Processes, *, cuda: bool) -> bool:
    """Train until the target, the last step or divergence, and print the log; returns whether the target was met.

    Before the log's ``run_start`` raises InputError for unusable data, adapter or checkpoint, SetupError for an
    unsupported machine.
    """
    log = start.open_log(processes)
    warnings.filterwarnings("ignore")
    check_machine(settings, cuda=cuda)
    if settings.model is not None:
        checkpoint.check(settings.model, settings.shape)
    if settings.adapter is not None:
        peft_format.check(settings.adapter, settings)
    if settings.save_adapter is not None:
        adapter_files.make_folder(settings.save_adapter)
    start.set_environment(settings, processes)
    data = packed_data(settings, cuda=cuda)
    texts = (len(data.train), len(data.validation))
    start.log_settings(log, settings, processes, texts=texts, attention=attention_name(), cuda=cuda)
    model = build_model(settings, cuda=cuda)
    model.register_pre_wrap_hook(base.prepare(settings, build_lora(settings)))
    watch = BridgeRun(settings, log, data, cuda=cuda)
    pretrain(build_config(settings, model, data, cuda=cuda), forward_step, callbacks=[watch])
    return watch.reached
