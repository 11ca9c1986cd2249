"""TEST ONLY: writes the base that MODEL names as a NeMo checkpoint folder, to the folder in SAVE_TO."""

from __future__ import annotations

import os
from typing import Any

import torch

from tests.recipes import cpu_shim  # first: NeMo looks for CUDA while it is imported

import lightning.pytorch as pl  # isort: skip

from lora_tune_recipes.megatron.processes import read_processes
from lora_tune_recipes.nemo import settings as knobs
from lora_tune_recipes.nemo.callbacks import Base
from lora_tune_recipes.nemo.data import PackedData
from lora_tune_recipes.nemo.model import build_model, build_optimizer, build_trainer


class Save(pl.Callback):
    """Saves the model before the first step and ends the run."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(os.environ["SAVE_TO"], weights_only=True)
        trainer.should_stop = True
        trainer.limit_val_batches = 0


def main() -> int:
    torch.set_num_threads(1)
    cpu_shim.install_states(1)
    processes = read_processes(os.environ)
    os.environ.update(processes.variables())
    settings = knobs.read(os.environ, processes.world)
    model = build_model(settings, cuda=False)
    build_optimizer(settings, cuda=False).connect(model)
    trainer = build_trainer(settings, processes, [Base(settings), Save()], cuda=False)
    trainer.fit(model, PackedData(settings, pin_memory=False))
    return 0
