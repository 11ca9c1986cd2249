"""The knobs of a PEFT trial, from environment variables as MLPerf's ``config_*.sh`` files set them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_tune_recipes import fsdp_settings
from lora_tune_recipes.fsdp_settings import Sharding
from lora_tune_recipes.knobs import Knobs

TINY = Path(__file__).parent / "tiny"
"""Base weights and texts of the shipped task."""
TINY_TARGET = 1.68
"""Target eval loss of the shipped task; ``python -m benchmarks.tiny_task`` derives it."""
TINY_EVAL_EVERY, TINY_EVAL_SAMPLES = 40, 32
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
TARGET_WORDS = {"attention": ATTENTION, "mlp": MLP, "all": ATTENTION + MLP}
"""Short names that LORA_TARGETS accepts in place of a list of modules: names of the Llama family."""
EVAL_EVERY = 384
"""Samples between evaluations by MLPerf's rule for LoRA."""
MOST_SEQUENCES = 2**20
"""Limit of sequences per optimizer step: more is a typing error, and shuffling them alone would take a pack minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """The adapters of a trial: LORA_RANK, LORA_ALPHA, LORA_DROPOUT, LORA_TARGETS and related variables."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    """Modules that get adapters, by the last part of their names."""
    rank_pattern: tuple[tuple[str, int], ...]
    """Modules with another rank: (last part of the name, rank)."""
    alpha_pattern: tuple[tuple[str, int], ...]
    """Modules with another alpha."""
    modules_to_save: tuple[str, ...]
    """Modules that are trained whole, without adapters, by the last part of their names."""
    dora: bool
    """Also train the magnitude of each adapted weight's columns (DoRA)."""
    rslora: bool
    """Scale the adapters by alpha over the root of the rank (rsLoRA) instead of over the rank."""

    def rank_of(self, module: str) -> int:
        """The adapter rank of the module of this full name."""
        return dict(self.rank_pattern).get(module.rpartition(".")[2], self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of the adapter's product: alpha over the rank, or over its root (rsLoRA)."""
        rank = self.rank_of(module)
        alpha = dict(self.alpha_pattern).get(module.rpartition(".")[2], self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One validated trial.

    Each field but ``adapters`` and ``sharding`` is the environment variable of the same name in capitals;
    ``recompute`` is RECOMPUTE_GRANULARITY.
    """

    lr: float
    """Peak learning rate of AdamW."""
    min_lr: float
    """Learning rate at the end of the cosine."""
    max_steps: int
    """Optimizer steps; also the length of the cosine."""
    warmup_steps: int
    """Steps of linear learning-rate warm-up."""
    val_check_interval: int
    """Training samples between evaluations, as in MLPerf's files; 0: the default. The last step evaluates, too."""
    minibs: int
    """Sequences per data-parallel rank and optimizer step."""
    mbs: int
    """Sequences per forward pass; divides ``minibs``."""
    tp: int
    """Tensor-parallel degree."""
    cp: int
    """Context-parallel degree."""
    fsdp: bool
    """Shard the model over the data-parallel ranks (FSDP2) instead of copying it to each."""
    sharding: Sharding
    seed: int
    """Seed of the adapter's initial weights, the data order and dropout."""
    target: float | None
    """Eval loss at which the run stops with success; None trains all steps."""
    adapters: AdapterSettings
    save_adapter: Path | None
    """Folder for the adapter at the end, in peft's format; None does not save it."""
    lora_plus_ratio: float
    """Learning rate of the B matrices over that of the A matrices (LoRA+); 1 is plain LoRA."""
    adam_beta1: float
    adam_beta2: float
    weight_decay: float
    grad_clip: float
    """Largest gradient norm; 0 does not clip."""
    seq: int
    """Tokens in a training sequence."""
    eval_samples: int
    """Validation sequences per evaluation, evenly spaced; 0: all."""
    model: Path
    """Checkpoint folder: ``config.json`` with safetensors."""
    datadir: Path
    """Folder with ``train`` and ``validation`` as .npy, .jsonl, .txt or .txt.gz."""
    dtype: str
    """Precision of the base and of the arithmetic: ``float32``, ``bfloat16``, or ``auto``: bfloat16 on a GPU."""
    load_in_4bit: str
    """QLoRA: the base's linear layers in 4 bits, ``nf4`` or ``fp4``, by bitsandbytes; empty: in ``dtype``."""
    packing: bool
    """Pack several samples, which do not attend to each other, into each row of training data; .jsonl only."""
    attn: str
    """Attention implementation of transformers: ``sdpa``, ``eager`` or ``flash_attention_2``."""
    recompute: bool
    """Recompute activations within layers in the backward pass: less memory, more time."""
    cuda_graph: str
    """Replay each step as one CUDA graph: ``auto`` if it can be recorded, ``1`` (an error if not), ``0``."""
    torch_compile: bool
    """Compile the model's layers, one program for all of a kind, before the clock starts."""
    warmup: bool
    """Warm the kernels up before the clock starts."""
    probe: bool
    """Stop after the second block: one evaluation and one warm block, enough to measure a layout's speed."""
    threads: int
    """CPU threads of this process; with one, CPU runs are reproducible."""
    benchmark: str
    """The benchmark name in the log; MLPerf's checkers accept llama2_70b_lora without a check."""
    submission_org: str
    """The submitter in the log."""
    submission_platform: str
    """The machine in the log; empty: its own name."""
    config_filename: str
    """The config file that set these variables, in the log."""

    @property
    def accumulation(self) -> int:
        """Forward passes per optimizer step."""
        return self.minibs // self.mbs

    def interval(self, batch: int) -> int:
        """Optimizer steps between evaluations at a global batch of ``batch``."""
        return math.ceil(self.val_check_interval / batch)


def read(environment: Mapping[str, str]) -> Settings:
    """The settings in ``environment``; unset or empty variables take their defaults.

    Raises InputError for the first invalid value.
    """
    knobs = Knobs(environment)
    _refuse_foreign(knobs)
    return Settings(**_task(knobs), **_learning(knobs), **_machine(knobs), **_names(knobs))


def _task(knobs: Knobs) -> dict[str, Any]:
    """Model, data, evaluation schedule and target."""
    model = knobs.folder("MODEL", TINY) or TINY
    datadir = knobs.folder("DATADIR", TINY) or TINY
    shipped = model == TINY and datadir == TINY
    target = knobs.real("TARGET", 0.0, exclusive=True) if knobs.given("TARGET") else TINY_TARGET if shipped else None
    eval_every = knobs.integer("VAL_CHECK_INTERVAL", 0, low=0) or (TINY_EVAL_EVERY if shipped else EVAL_EVERY)
    return {
        "model": model,
        "datadir": datadir,
        "target": target,
        "val_check_interval": eval_every,
        "eval_samples": knobs.integer("EVAL_SAMPLES", TINY_EVAL_SAMPLES if shipped else 0, low=0),
        "seq": knobs.integer("SEQ", 128, low=2),
        "packing": knobs.switch("PACKING", default=False),
        "probe": knobs.switch("PROBE", default=False),
        "save_adapter": Path(knobs.text("SAVE_ADAPTER")) if knobs.given("SAVE_ADAPTER") else None,
    }


def _learning(knobs: Knobs) -> dict[str, Any]:
    """Optimizer and adapter settings."""
    return {
        **_rates(knobs),
        **_steps(knobs),
        "seed": knobs.integer("SEED", 1, low=0, high=2**31 - 1),
        "adapters": _adapters(knobs),
        "lora_plus_ratio": knobs.real("LORA_PLUS_RATIO", 1.0, exclusive=True),
        "adam_beta1": knobs.real("ADAM_BETA1", 0.9, high=0.9999),
        "adam_beta2": knobs.real("ADAM_BETA2", 0.999, high=0.9999999),
        "weight_decay": knobs.real("WEIGHT_DECAY", 1e-4),
        "grad_clip": knobs.real("GRAD_CLIP", 0.3),
    }


def _machine(knobs: Knobs) -> dict[str, Any]:
    """Parallelism, precision and kernels."""
    minibs, mbs = _batch(knobs)
    _refuse_packing(knobs, mbs)
    return {
        "minibs": minibs,
        "mbs": mbs,
        "tp": knobs.integer("TP", 1, low=1),
        "cp": knobs.integer("CP", 1, low=1),
        "fsdp": knobs.switch("FSDP", default=False),
        "sharding": fsdp_settings.read(knobs),
        "dtype": knobs.choice("DTYPE", ("auto", "float32", "bfloat16")),
        "load_in_4bit": knobs.choice("LOAD_IN_4BIT", ("", "nf4", "fp4")),
        "attn": knobs.choice("ATTN", ("sdpa", "eager", "flash_attention_2")),
        "recompute": knobs.choice("RECOMPUTE_GRANULARITY", ("", "full")) == "full",
        "cuda_graph": knobs.choice("CUDA_GRAPH", ("auto", "1", "0")),
        "torch_compile": knobs.switch("TORCH_COMPILE", default=False),
        "warmup": knobs.switch("WARMUP", default=True),
        "threads": knobs.integer("THREADS", 1, low=1),
    }


def _names(knobs: Knobs) -> dict[str, Any]:
    """Names of the run, its submitter and its machine in the log."""
    return {
        "benchmark": knobs.text("BENCHMARK", "peft_lora"),
        "submission_org": knobs.text("SUBMISSION_ORG", "lora_tune"),
        "submission_platform": knobs.text("SUBMISSION_PLATFORM"),
        "config_filename": knobs.text("CONFIG_FILENAME", "none"),
    }


def _steps(knobs: Knobs) -> dict[str, int]:
    """Steps of the training and of its warm-up."""
    steps, warm_up = knobs.integer("MAX_STEPS", 200, low=1), knobs.integer("WARMUP_STEPS", 0, low=0)
    if warm_up >= steps:
        raise knobs.refusal("WARMUP_STEPS", f"a whole number below MAX_STEPS={steps}")
    return {"max_steps": steps, "warmup_steps": warm_up}


def _batch(knobs: Knobs) -> tuple[int, int]:
    """Sequences per step and per forward pass."""
    minibs = knobs.integer("MINIBS", 4, low=1, high=MOST_SEQUENCES)
    mbs = knobs.integer("MBS", minibs, low=1)
    if minibs % mbs:
        raise knobs.refusal("MBS", f"a divisor of MINIBS={minibs}")
    return minibs, mbs


def _refuse_packing(knobs: Knobs, mbs: int) -> None:
    """Refuse packing if MBS > 1 with FlashAttention: transformers finds sample boundaries only in one-row passes."""
    packs, flash = knobs.switch("PACKING", default=False), knobs.text("ATTN") == "flash_attention_2"
    if packs and flash and mbs > 1:
        raise knobs.refusal("PACKING", "0 where ATTN=flash_attention_2 and MBS is above 1")


def _rates(knobs: Knobs) -> dict[str, float]:
    """Learning rates at the peak and at the end."""
    lr, min_lr = knobs.real("LR", 5e-3, low=0.0, exclusive=True, high=10.0), knobs.real("MIN_LR", 0.0)
    if min_lr > lr:
        raise knobs.refusal("MIN_LR", f"a number of at most LR={lr:g}")
    return {"lr": lr, "min_lr": min_lr}


def _adapters(knobs: Knobs) -> AdapterSettings:
    return AdapterSettings(
        rank=knobs.integer("LORA_RANK", 16, low=1),
        alpha=knobs.real("LORA_ALPHA", 32.0, exclusive=True),
        dropout=knobs.real("LORA_DROPOUT", 0.1, high=0.99),
        targets=_targets(knobs),
        rank_pattern=_pattern(knobs, "RANK_PATTERN"),
        alpha_pattern=_pattern(knobs, "ALPHA_PATTERN"),
        modules_to_save=_modules(knobs),
        dora=knobs.switch("DORA", default=False),
        rslora=knobs.switch("RSLORA", default=False),
    )


def _targets(knobs: Knobs) -> tuple[str, ...]:
    """The modules of LORA_TARGETS: a key of TARGET_WORDS, or names separated by commas."""
    text = knobs.text("LORA_TARGETS", "attention")
    names = TARGET_WORDS.get(text) or tuple(name.strip() for name in text.split(","))
    if len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        raise knobs.refusal("LORA_TARGETS", f"one of {', '.join(TARGET_WORDS)}, or module names with commas between")
    return names


def _modules(knobs: Knobs) -> tuple[str, ...]:
    """The modules of MODULES_TO_SAVE, separated by commas."""
    names = tuple(name.strip() for name in knobs.text("MODULES_TO_SAVE").split(",") if name.strip())
    if len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        raise knobs.refusal("MODULES_TO_SAVE", "last parts of module names with commas between, such as lm_head")
    return names


def _pattern(knobs: Knobs, variable: str) -> tuple[tuple[str, int], ...]:
    """``q_proj=32,down_proj=8`` as pairs."""
    text = knobs.text(variable)
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    if not all(name.strip().isidentifier() and number.strip().isdecimal() and int(number) for name, _, number in pairs):
        raise knobs.refusal(variable, "module names with whole numbers above 0, such as q_proj=32,down_proj=8")
    return tuple((name.strip(), int(number)) for name, _, number in pairs)


def _refuse_foreign(knobs: Knobs) -> None:
    """Refuse knobs of other recipes that this one lacks: a knob without effect must not be tuned."""
    for name in ("PP", "VP"):
        if knobs.integer(name, 1, low=1) > 1:
            raise knobs.refusal(name, "1: this recipe has no pipeline parallelism; use TP, CP or FSDP")
    if knobs.switch("SP", default=False):
        raise knobs.refusal("SP", "0: this recipe has no sequence parallelism")
