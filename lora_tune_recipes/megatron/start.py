"""The start of a trial of any library on Megatron-Core: the log's first lines and the environment."""

from __future__ import annotations

import os
import platform

import torch
from mlperf_logging.mllog import constants

from lora_tune_recipes.megatron.description import description
from lora_tune_recipes.megatron.processes import Processes
from lora_tune_recipes.megatron.settings import CommonSettings
from lora_tune_recipes.trial_log import TrialLog


def open_log(processes: Processes) -> TrialLog:
    """The log of a trial whose initialization begins now; silent on all ranks but the first."""
    log = TrialLog(enabled=processes.rank == 0)
    log.event(constants.CACHE_CLEAR, True)
    log.start(constants.INIT_START)
    log.identity(os.environ)
    return log


def set_environment(settings: CommonSettings, processes: Processes) -> None:
    """Set torch's rendezvous variables and its timeout for a lost rank."""
    os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = str(settings.timeout)
    os.environ.update(processes.variables())


def log_settings(
    log: TrialLog,
    settings: CommonSettings,
    processes: Processes,
    *,
    texts: tuple[int, int],
    attention: str,
    cuda: bool,
) -> None:
    """Describe the run. texts: numbers of training and validation sequences. attention: the implementation's name."""
    machine = torch.cuda.get_device_name() if cuda else platform.machine()
    log.init(
        description(
            settings,
            platform=f"{processes.world}x{machine}",
            texts=texts,
            wide="bfloat16" if cuda else "fp32",
            attention=attention,
        )
    )
