"""The description of a run by MLLOG key, logged before it starts."""

from __future__ import annotations

from mlperf_logging.mllog import constants

from lora_tune.mlperf.gate import disclosures
from lora_tune_recipes.megatron.settings import CommonSettings


def description(
    settings: CommonSettings, *, platform: str, texts: tuple[int, int], wide: str, attention: str
) -> dict[str, object]:
    """The logged values, in order.

    platform: number and kind of devices. texts: numbers of training and validation sequences. wide: precision of
    whatever has no lower one. attention: name of the implementation.
    """
    layout = settings.layout
    train, validation = texts
    return {
        constants.SUBMISSION_BENCHMARK: settings.benchmark,
        constants.SUBMISSION_ORG: settings.org,
        constants.SUBMISSION_DIVISION: constants.CLOSED if settings.closed else constants.OPEN,
        constants.SUBMISSION_STATUS: constants.ONPREM,
        constants.SUBMISSION_PLATFORM: settings.platform or platform,
        constants.SEED: settings.seed,
        constants.GLOBAL_BATCH_SIZE: layout.batch,
        constants.TRAIN_SAMPLES: train,
        constants.EVAL_SAMPLES: validation,
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
        **_disclosed(settings, wide),
        "attention": attention,
        "model_parameters": settings.shape.parameters,
        "target_eval_loss": settings.target,
    }


def _disclosed(settings: CommonSettings, wide: str) -> dict[str, object]:
    """Precision, parallelism, micro batch and config file, which MLPerf's rules require to be disclosed."""
    layout, precision = settings.layout, settings.precision
    values = {"TP": layout.tp, "PP": layout.pp, "CP": layout.cp, "MBS": layout.mbs}
    values |= {"FP8": int(precision.fp8), "FP8_DPA": int(precision.dpa), "FP4": int(precision.fp4)}
    return disclosures(settings.benchmark, values, settings.config_filename, wide=wide)
