"""The knobs shared by the recipes on Megatron-Core, with the names of MLPerf's ``config_*.sh`` files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_tune.base.errors import InputError
from lora_tune_recipes.knobs import Knobs
from lora_tune_recipes.megatron import hf
from lora_tune_recipes.megatron.layout import ProcessLayout, check_layout, read_layout
from lora_tune_recipes.megatron.schedule import RULE_INTERVAL, EvalSchedule, schedule
from lora_tune_recipes.megatron.shapes import Shape, read_shape

TARGET = 0.925
"""MLPerf's eval loss for llama2_70b_lora."""
TARGETS = ("linear_qkv", "linear_proj")
"""Megatron-Core's names of the attention's projections, which MLPerf's benchmark adapts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSettings:
    """FP8 with its options, or FP4; without both the run computes in bf16 (float32 on a CPU).

    params: keep the frozen weights in FP8 only. dpa: FP8 attention. act: store the activation function's input in FP8.
    history, algorithm: amax history length, and most_recent or max over it.
    """

    fp8: bool
    params: bool
    dpa: bool
    act: bool
    recipe: str
    history: int
    algorithm: str
    fp4: bool = False

    @property
    def has_history(self) -> bool:
        """Whether scales depend on earlier steps, so that a kernel warm-up would change them."""
        return self.fp8 and self.recipe == "delayed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Activation recomputation, in Megatron-Core's terms.

    granularity: "full", "selective", or "" for none. method and layers apply to "full", modules to "selective".
    """

    granularity: str
    method: str
    layers: int
    modules: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.granularity)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonSettings:
    """One validated trial: settings that the libraries share. Losses are nats per token, learning rates per step."""

    shape: Shape
    layout: ProcessLayout
    precision: PrecisionSettings
    evals: EvalSchedule
    seq: int
    lr: float
    min_lr: float
    max_steps: int
    warmup_steps: int
    weight_decay: float
    grad_clip: float
    lora_rank: int
    lora_alpha: int
    lora_dropout: float
    seed: int
    target: float
    eval_samples: int
    log_every: int
    warmup_train: int
    warmup_validation: int
    datadir: Path
    model: Path | None
    logdir: Path | None
    probe: bool
    timeout: int
    benchmark: str
    org: str
    platform: str
    config_filename: str

    @property
    def closed(self) -> bool:
        """Whether evaluations and fixed values comply with MLPerf's closed division."""
        fixed = (self.lora_rank, self.lora_alpha, self.lora_dropout, self.weight_decay, self.grad_clip, self.target)
        return fixed == (16, 32, 0.1, 1e-4, 0.3, TARGET) and self.evals.by_rule(self.layout.batch)


def read_common(knobs: Knobs, world: int, *, low_precision: bool) -> dict[str, Any]:
    """The fields of CommonSettings from the variables, on ``world`` processes.

    low_precision: default of FP8, FP8 weights and FP8 attention. Raises InputError for the first invalid value, or a
    layout that does not fit.
    """
    model = knobs.folder("MODEL", None)
    shape = _shape(knobs, model)
    seq = knobs.integer("SEQ", 8192, low=2)
    layout = read_layout(knobs, world)
    check_layout(layout, shape, seq)
    max_steps = knobs.integer("MAX_STEPS", 1024, low=1)
    return {
        "shape": shape,
        "layout": layout,
        "precision": _precision(knobs, default=low_precision),
        "evals": _evals(knobs, layout.batch, max_steps),
        "seq": seq,
        "max_steps": max_steps,
        "datadir": _datadir(knobs),
        "model": model,
        "logdir": knobs.folder("LOGDIR", None),
        "seed": knobs.integer("SEED", 1, low=0, high=2**31 - 1),
        "target": knobs.real("TARGET", TARGET),
        "eval_samples": knobs.integer("EVAL_SAMPLES", 0, low=0),
        "log_every": knobs.integer("LOGGING_INTERVAL", 10, low=1),
        "probe": knobs.switch("PROBE", default=False),
        "timeout": knobs.integer("DIST_TIMEOUT", 600, low=10),
        **_learning(knobs, max_steps),
        **_kernel_warm_up(knobs),
        **_names(knobs, shape),
    }


def _datadir(knobs: Knobs) -> Path:
    folder = knobs.folder("DATADIR", None)
    if folder is None:
        raise InputError(f"{knobs.spelling('DATADIR')} is not set: give the folder with train.npy and validation.npy")
    return folder


def _learning(knobs: Knobs, max_steps: int) -> dict[str, Any]:
    """Optimizer and adapter settings."""
    lr = knobs.real("LR", 4e-4, exclusive=True)
    return {
        "lr": lr,
        "min_lr": knobs.real("MIN_LR", 0.0, high=lr),
        "warmup_steps": knobs.integer("WARMUP_STEPS", 0, low=0, high=max_steps - 1),
        "weight_decay": knobs.real("WEIGHT_DECAY", 1e-4),
        "grad_clip": knobs.real("GRADIENT_CLIP_VAL", 0.3),
        "lora_rank": knobs.integer("LORA_RANK", 16, low=1),
        "lora_alpha": knobs.integer("LORA_ALPHA", 32, low=1),
        "lora_dropout": knobs.real("LORA_DROPOUT", 0.1, high=0.99),
    }


def _kernel_warm_up(knobs: Knobs) -> dict[str, Any]:
    """Steps before the clock starts."""
    warm = knobs.switch("WARMUP", default=True)
    return {
        "warmup_train": knobs.integer("WARMUP_TRAIN_STEPS", 5, low=0) if warm else 0,
        "warmup_validation": knobs.integer("WARMUP_VALIDATION_STEPS", 5, low=0) if warm else 0,
    }


def _names(knobs: Knobs, shape: Shape) -> dict[str, Any]:
    """Names of the run, its submitter and its machine in the log."""
    return {
        # Another model's log must not claim the benchmark, because MLPerf's checkers would believe it.
        "benchmark": knobs.text("BENCHMARK", "llama2_70b_lora" if shape.is_benchmark else "llama_lora"),
        "org": knobs.text("SUBMISSION_ORG", "lora_tune"),
        "platform": knobs.text("SUBMISSION_PLATFORM"),
        "config_filename": knobs.text("CONFIG_FILENAME", "none"),
    }


def read_recompute(knobs: Knobs) -> Recompute:
    """The recomputation in the variables; zero layers mean none."""
    layers = knobs.integer("RECOMPUTE_NUM_LAYERS", 1, low=0)
    granularity = knobs.choice("RECOMPUTE_GRANULARITY", ("", "full", "selective"))
    return Recompute(
        granularity="" if granularity == "full" and layers == 0 else granularity,
        method=knobs.choice("RECOMPUTE_METHOD", ("uniform", "block")),
        layers=layers,
        modules=tuple(filter(None, knobs.text("RECOMPUTE_MODULES").split(","))),
    )


def _shape(knobs: Knobs, model: Path | None) -> Shape:
    """The model's shape from its variables, or from a Hugging Face folder, which variables must not contradict."""
    if model is None or not hf.is_hf(model):
        return read_shape(knobs)
    stated = hf.shape_of(model)
    if knobs.given("LLAMA") and (named := read_shape(knobs)) != replace(stated, norm_eps=named.norm_eps):
        raise InputError(
            f"LLAMA={knobs.text('LLAMA')}: {named}, but MODEL={str(model)!r} is {stated}; leave LLAMA unset"
        )
    return stated


def _precision(knobs: Knobs, *, default: bool) -> PrecisionSettings:
    fp8 = knobs.switch("FP8", default=default)
    return PrecisionSettings(
        fp8=fp8,
        params=fp8 and knobs.switch("FP8_PARAMS", default=default),
        dpa=fp8 and knobs.switch("FP8_DPA", default=default),
        act=fp8 and knobs.switch("FP8_ACT", default=False),
        recipe=knobs.choice("FP8_RECIPE", ("delayed", "tensorwise", "blockwise", "mxfp8")),
        history=knobs.integer("FP8_AMAX_HISTORY", 4, low=1),
        algorithm=knobs.choice("FP8_AMAX_ALGO", ("max", "most_recent")),
    )


def _evals(knobs: Knobs, batch: int, max_steps: int) -> EvalSchedule:
    samples = knobs.integer("VAL_CHECK_INTERVAL", RULE_INTERVAL, low=1)
    skipped = None
    for name in ("SKIP_EVALS", "SKIP_EVAL"):
        if knobs.given(name):
            skipped = knobs.integer(name, 0, low=0)
    if skipped is None and (samples != RULE_INTERVAL or knobs.switch("PROBE", default=False)):
        skipped = 0
    evals = schedule(batch, samples, skipped)
    if evals.first > max_steps:
        raise InputError(
            f"MAX_STEPS={max_steps}: allowed are at least {evals.first} steps; the first evaluation comes after"
            f" {evals.first * batch} samples at a global batch of {batch}"
        )
    return evals
