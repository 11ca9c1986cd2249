"""One NeMo LoRA run on this process's share of the machine."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from mlperf_logging.mllog import constants
from nemo import lightning as nl
from nemo.collections import llm
from nemo.utils import logging as nemo_logging

from lora_tune.mlperf.disclosures import disclosures
from lora_tune.recipes.nemo import checkpoint, hf
from lora_tune.recipes.nemo.callbacks import Base, Recomputation, Run, Seeds
from lora_tune.recipes.nemo.data import PackedData
from lora_tune.recipes.nemo.model import (
    attention_name,
    build_lora,
    build_model,
    build_optimizer,
    build_trainer,
    check_machine,
)
from lora_tune.recipes.nemo.processes import Processes
from lora_tune.recipes.nemo.settings import Settings
from lora_tune.recipes.trial_log import TrialLog


class Bounded(pl.Callback):
    """Ends a run in which a rank waits for a lost one: every process group gets the trial's time limit.

    Megatron-Core makes its groups with half an hour of patience, which a scheduler would bill for each lost rank.
    """

    def __init__(self, seconds: int) -> None:
        self._limit = timedelta(seconds=seconds)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        from torch.distributed import distributed_c10d as c10d

        for group in list(c10d._world.pg_map):
            c10d._set_pg_timeout(self._limit, group)


def run(settings: Settings, processes: Processes, *, cuda: bool) -> bool:
    """Train until the target, the last step or divergence, and print the log; returns whether the target was met.

    Raises InputError for data or a checkpoint that cannot be used and SetupError for what this machine cannot
    do, both before the log's ``run_start``.
    """
    log = TrialLog(enabled=processes.rank == 0)
    log.event(constants.CACHE_CLEAR, True)
    log.start(constants.INIT_START)
    log.identity(os.environ)
    nemo_logging.setLevel(nemo_logging.ERROR)
    check_machine(settings, cuda=cuda)
    foreign = settings.model is not None and hf.is_hf(settings.model)
    if settings.model and not foreign:
        checkpoint.check(settings.model, settings.shape)
    os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(settings.timeout)
    os.environ.update(processes.variables())
    pl.seed_everything(settings.seed, workers=True, verbose=False)
    data = PackedData(settings, pin_memory=cuda)
    describe(settings, processes, log, data, cuda=cuda)
    lora = build_lora(settings)
    watch = Run(settings, log, cuda=cuda, sequences=len(data.validation))
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


def _base(settings: Settings) -> Any:
    """A NeMo folder to take the frozen weights from; None leaves them random, which is enough to measure speed."""
    if settings.model is None:
        return None
    restore = nl.RestoreConfig(path=str(settings.model), load_optim_state=False, load_artifacts=False)
    return nl.AutoResume(restore_config=restore)


@contextlib.contextmanager
def _log_folder(settings: Settings) -> Iterator[str]:
    """NeMo writes its own log files somewhere: into LOGDIR, or nowhere that lasts."""
    if settings.logdir:
        yield str(settings.logdir)
        return
    with tempfile.TemporaryDirectory(prefix="nemo-", ignore_cleanup_errors=True) as folder:
        cancel = signal.getsignal(signal.SIGTERM)

        def clean(number: int, frame: FrameType | None) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            if callable(cancel):
                cancel(number, frame)

        # A cancelled trial ends at once, and every second trial is: its node must not keep what it wrote.
        signal.signal(signal.SIGTERM, clean)
        yield folder


def describe(settings: Settings, processes: Processes, log: TrialLog, data: PackedData, *, cuda: bool) -> None:
    """What the run is, by MLLOG key, before it starts."""
    layout = settings.layout
    machine = torch.cuda.get_device_name() if cuda else platform.machine()
    log.init(
        {
            constants.SUBMISSION_BENCHMARK: settings.benchmark,
            constants.SUBMISSION_ORG: settings.org,
            constants.SUBMISSION_DIVISION: constants.CLOSED if settings.closed else constants.OPEN,
            constants.SUBMISSION_STATUS: constants.ONPREM,
            constants.SUBMISSION_PLATFORM: settings.platform or f"{processes.world}x{machine}",
            constants.SEED: settings.seed,
            constants.GLOBAL_BATCH_SIZE: layout.batch,
            constants.TRAIN_SAMPLES: len(data.train),
            constants.EVAL_SAMPLES: len(data.validation),
            constants.MAX_SEQUENCE_LENGTH: settings.seq,
            constants.GRADIENT_ACCUMULATION_STEPS: layout.accumulation,
            constants.OPT_BASE_LR: settings.lr,
            constants.OPT_END_LR: settings.min_lr,
            constants.OPT_LR_WARMUP_STEPS: settings.warmup_steps,
            constants.OPT_LR_TRAINING_STEPS: settings.max_steps,
            "opt_adamw_weight_decay": settings.weight_decay,
            constants.OPT_GRADIENT_CLIP_NORM: settings.grad_clip,
            "lora_rank": settings.lora_rank,
            constants.LORA_ALPHA: settings.lora_alpha,
            "lora_dropout": settings.lora_dropout,
            **_disclosed(settings, cuda=cuda),
            "attention": attention_name(),
            "model_parameters": settings.shape.parameters,
            "target_eval_loss": settings.target,
        }
    )


def _disclosed(settings: Settings, *, cuda: bool) -> dict[str, object]:
    """Precision, parallelism, micro batch and config file, as MLPerf's rules want them disclosed."""
    layout, precision = settings.layout, settings.precision
    values = {"TP": layout.tp, "PP": layout.pp, "CP": layout.cp, "MBS": layout.mbs}
    values |= {"FP8": int(precision.fp8), "FP8_DPA": int(precision.dpa)}
    return disclosures(settings.benchmark, values, settings.config_filename, wide="bfloat16" if cuda else "fp32")
