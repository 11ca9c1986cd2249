"""A trial's output: MLLOG lines on standard output, in the order and with the keys of MLPerf's LoRA benchmark."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from mlperf_logging import mllog
from mlperf_logging.mllog import constants

from lora_tune.base.paths import ATTEMPT_KEY, ATTEMPT_VARIABLE, SWEEP_KEY, SWEEP_VARIABLE
from lora_tune.mlperf.gate import disclosures
from lora_tune_recipes.settings import Settings

TRAIN_LOSS_EVERY = 10
"""Optimizer steps between two ``train_loss`` lines, as in NVIDIA's logs."""


class TrialLog:
    """The log of one run; silent on every rank but the first.

    Sample counts are global and cumulative. A block is the training between two evaluations; its throughput is
    in samples a second and its step time in seconds. block: samples and clock at the start of the one in progress.
    """

    def __init__(self, *, enabled: bool, stream: TextIO | None = None, now: Callable[[], float] | None = None) -> None:
        """stream: where lines are written, standard output if None. now: clock of their time stamps, epoch seconds."""
        # Trims the paths in the metadata; mllog reads it as a regular expression.
        root = re.escape(str(Path(__file__).parents[2]))
        if stream is None:
            mllog.config(root_dir=root, default_stack_offset=2)
            self._mllogger = mllog.get_mllogger()
        else:
            logger = logging.Logger("trial")
            logger.addHandler(logging.StreamHandler(stream))
            self._mllogger = mllog.mllog.MLLogger(logger, default_stack_offset=2, root_dir=root)
        self._mllogger.logger.disabled = not enabled
        for handler in self._mllogger.logger.handlers:
            handler.handleError = _lost
        self._now = now
        self.block: tuple[int, float] = (0, 0.0)

    def event(self, key: str, value: object, **metadata: object) -> None:
        self._mllogger.event(key, value, metadata=metadata, time_ms=self._stamp())

    def start(self, key: str, **metadata: object) -> None:
        self._mllogger.start(key, metadata=metadata, time_ms=self._stamp())

    def end(self, key: str, **metadata: object) -> None:
        self._mllogger.end(key, metadata=metadata, time_ms=self._stamp())

    def _stamp(self) -> int | None:
        return None if self._now is None else round(1000 * self._now())

    def _seconds(self) -> float:
        return time.perf_counter() if self._now is None else self._now()

    def identity(self, environment: Mapping[str, str]) -> None:
        """Log the ids of the sweep and the attempt in the environment; nothing outside of a sweep."""
        for key, variable in ((SWEEP_KEY, SWEEP_VARIABLE), (ATTEMPT_KEY, ATTEMPT_VARIABLE)):
            if value := environment.get(variable):
                self.event(key, value)

    def init(self, values: Mapping[str, object]) -> None:
        """Describe the run, one event for each value."""
        for key, value in values.items():
            self.event(key, value)

    def block_start(self, samples: int) -> None:
        self.block = (samples, self._seconds())
        self.start(constants.BLOCK_START, samples_count=samples)

    def block_stop(self, samples: int, batch: int) -> None:
        """End the block at ``samples`` and, if it trained, report its speed at a global batch of ``batch``."""
        began, clock = self.block
        if samples > began:
            throughput = (samples - began) / (self._seconds() - clock)
            value = {"throughput": throughput, "train_step_time": batch / throughput}
            self.event("tracked_stats", value, step=samples)
        self.end(constants.BLOCK_STOP, samples_count=samples)

    def train_loss(self, loss: float, samples: int, lr: float) -> None:
        self.event("train_loss", loss, samples_count=samples, lr=lr)

    def eval_loss(self, loss: float, samples: int) -> None:
        self.event(constants.EVAL_ACCURACY, loss, samples_count=samples)

    def run_stop(self, samples: int, *, success: bool) -> None:
        status = constants.SUCCESS if success else constants.ABORTED
        self.end(constants.RUN_STOP, status=status, samples_count=samples)


def description(
    settings: Settings, *, platform: str, batch: int, wide: str, texts: tuple[int, int]
) -> dict[str, object]:
    """The log's values before the run starts, by MLLOG key.

    platform: number and kind of devices. batch: the global batch size. wide: accelerate's name of the precision.
    texts: numbers of training and of validation sequences.
    """
    train, validation = texts
    return {
        constants.SUBMISSION_BENCHMARK: settings.benchmark,
        constants.SUBMISSION_ORG: settings.submission_org,
        constants.SUBMISSION_DIVISION: constants.OPEN,
        constants.SUBMISSION_STATUS: constants.RESEARCH,
        constants.SUBMISSION_PLATFORM: settings.submission_platform or platform,
        constants.SEED: settings.seed,
        constants.GLOBAL_BATCH_SIZE: batch,
        constants.TRAIN_SAMPLES: train,
        constants.EVAL_SAMPLES: validation,
        constants.MAX_SEQUENCE_LENGTH: settings.seq,
        constants.GRADIENT_ACCUMULATION_STEPS: settings.accumulation,
        constants.OPT_NAME: constants.ADAMW,
        constants.OPT_BASE_LR: settings.lr,
        constants.OPT_END_LR: settings.min_lr,
        constants.OPT_LR_WARMUP_STEPS: settings.warmup_steps,
        constants.OPT_LR_TRAINING_STEPS: settings.max_steps,
        "opt_adamw_weight_decay": settings.weight_decay,
        constants.OPT_GRADIENT_CLIP_NORM: settings.grad_clip,
        "lora_rank": settings.adapters.rank,
        constants.LORA_ALPHA: settings.adapters.alpha,
        "lora_dropout": settings.adapters.dropout,
        "lora_targets": ",".join(settings.adapters.targets),
        "target_eval_loss": settings.target,
        **disclosures(
            settings.benchmark,
            {"TP": settings.tp, "CP": settings.cp, "MBS": settings.mbs},
            settings.config_filename,
            wide="bfloat16" if wide == "bf16" else "fp32",
        ),
    }


def _lost(_record: object) -> None:
    """Raise if a line cannot be written: logging would continue, but a run without its log is useless."""
    raise  # noqa: PLE0704 - called while the error is handled
