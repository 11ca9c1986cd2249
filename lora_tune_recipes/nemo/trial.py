"""One NeMo LoRA run on this rank."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from nemo import lightning as nl
from nemo.collections import llm
from nemo.utils import logging as nemo_logging

from lora_tune_recipes.megatron import checkpoint, hf, start
from lora_tune_recipes.megatron.processes import Processes
from lora_tune_recipes.megatron.states import bound_waiting
from lora_tune_recipes.nemo.callbacks import Base, NemoRun, Recomputation, Seeds
from lora_tune_recipes.nemo.data import PackedData
from lora_tune_recipes.nemo.model import (
    attention_name,
    build_lora,
    build_model,
    build_optimizer,
    build_trainer,
    check_machine,
)
from lora_tune_recipes.nemo.settings import NemoSettings


class Bounded(pl.Callback):
    """Sets the trial's timeout on every process group, so that no rank waits forever for a lost one."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        bound_waiting(self._seconds)


def run(settings: NemoSettings, processes: Processes, *, cuda: bool) -> bool:
    """Train until the target, the last step or divergence, and print the log; returns whether the target was met.

    Before the log's ``run_start`` raises InputError for unusable data or checkpoint, SetupError for an unsupported
    machine.
    """
    log = start.open_log(processes)
    nemo_logging.setLevel(nemo_logging.ERROR)
    check_machine(settings, cuda=cuda)
    foreign = settings.model is not None and hf.is_hf(settings.model)
    if settings.model is not None:
        checkpoint.check(settings.model, settings.shape)
    start.set_environment(settings, processes)
    pl.seed_everything(settings.seed, workers=True, verbose=False)
    data = PackedData(settings, pin_memory=cuda)
    texts = (len(data.train), len(data.validation))
    start.log_settings(log, settings, processes, texts=texts, attention=attention_name(), cuda=cuda)
    lora = build_lora(settings)
    watch = NemoRun(settings, log, cuda=cuda, sequences=len(data.validation))
    callbacks = [Bounded(settings.timeout), Seeds(settings, cuda=cuda), lora, watch]
    if foreign:
        callbacks.insert(0, Base(settings))
    if settings.speed.recompute:
        callbacks.append(Recomputation())
    with _log_folder(settings) as folder:
        llm.finetune(
            model=build_model(settings, cuda=cuda),
            data=data,
            trainer=build_trainer(settings, processes, callbacks, cuda=cuda),
            log=nl.NeMoLogger(log_dir=folder, use_datetime_version=False, ckpt=None),
            optim=build_optimizer(settings, cuda=cuda),
            peft=lora,
            resume=None if foreign else _base(settings),
        )
    return watch.reached


def _base(settings: NemoSettings) -> Any:
    """The NeMo folder with the frozen weights; None leaves them random, which suffices to measure speed."""
    if settings.model is None:
        return None
    restore = nl.RestoreConfig(path=str(settings.model), load_optim_state=False, load_artifacts=False)
    return nl.AutoResume(restore_config=restore)


@contextlib.contextmanager
def _log_folder(settings: NemoSettings) -> Iterator[str]:
    """Folder for NeMo's own log files: LOGDIR, or a temporary one."""
    if settings.logdir:
        yield str(settings.logdir)
        return
    with tempfile.TemporaryDirectory(prefix="nemo-", ignore_cleanup_errors=True) as folder:
        cancel = signal.getsignal(signal.SIGTERM)

        def clean(number: int, frame: FrameType | None) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            if callable(cancel):
                cancel(number, frame)

        # Every second trial is cancelled and ends at once; its node must not keep these files.
        signal.signal(signal.SIGTERM, clean)
        yield folder
