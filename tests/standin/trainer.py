"""What the stand-ins of NVIDIA's trainers share: conf, Megatron's refusals, the eval schedule, and every MLLOG key.

The keys, their order and their metadata are those of public logs of the round that STANDIN_ROUND names (v4.1, v5.0,
v5.1); ``tests/mlperf/test_standin_logs.py`` holds them against such logs.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

SPEED = 651.0
"""Samples a second of eight GPUs with TP=4: 300 times a DGX H100's, so that the time stamps of a short run are true."""

C4 = 1574207408
"""Training samples of the text that Llama 3.1 and GPT-OSS are pre-trained on."""
TRAIN_SAMPLES = {"llama2_70b_lora": 3901, "llama31_405b": C4, "llama31_8b": C4, "gpt_oss_20b": C4, "flux1": 1099776}
"""Of the real data sets, as public logs state them. That of LoRA bounds val_check_interval."""
EVAL_SAMPLES = {"llama2_70b_lora": 173, "llama31_405b": 5760, "llama31_8b": 1024, "gpt_oss_20b": 1024, "flux1": 29696}
HEADS = {"llama2_70b_lora": 64, "llama31_405b": 128, "llama31_8b": 32, "gpt_oss_20b": 64, "flux1": 24}
GROUPS = 8
"""Key-value heads of the language models."""


def form() -> str:
    """The round whose trainer this is."""
    return os.environ.get("STANDIN_ROUND", "v4.1")


def conf(folder: Path) -> dict[str, str]:
    """Variable -> its effective value, by ``${oc.env:NAME,default}`` in ``conf/*.yaml``; an empty text is no value."""
    (file,) = (folder / "conf").glob("*.yaml")
    named = re.findall(r"\$\{oc\.env:(\w+),([^}]*)\}", file.read_text())
    return {name: os.environ.get(name) or default for name, default in named}


def count(values: dict[str, str], *names: str, otherwise: int = 1) -> int:
    """The first of these variables that the conf names, as a number; null and an absent one are ``otherwise``."""
    text = next((values[name] for name in names if name in values), "")
    return otherwise if text in ("", "null", "None") else int({"True": "1", "False": "0"}.get(text, text))


@dataclass(frozen=True)
class Degrees:
    """NVIDIA's arithmetic: GBS from the degrees, floored as its configuration floors it, or as it is stated whole."""

    gpus: int
    tp: int
    pp: int
    cp: int
    vp: int
    sp: int
    minibs: int
    gbs: int

    @classmethod
    def of(cls, values: dict[str, str]) -> Degrees:
        """The degrees that the conf states."""
        gpus = count(values, "DGXNNODES") * count(values, "DGXNGPU")
        tp, pp = count(values, "TP", "TENSOR_MODEL_PARALLEL"), count(values, "PP", "PIPELINE_MODEL_PARALLEL")
        cp, minibs = count(values, "CP", "CONTEXT_PARALLEL"), count(values, "MINIBS")
        gbs = count(values, "GLOBAL_BATCH_SIZE", otherwise=0) or (minibs * (gpus // (tp * pp))) // cp
        vp, sp = count(values, "VP", "INTERLEAVED_PIPELINE"), count(values, "SP", otherwise=0)
        return cls(gpus, tp, pp, cp, vp, sp, minibs, gbs)

    def refuse(self, benchmark: str) -> None:
        """Raise what Megatron raises for degrees that it does not take."""
        heads, parallel = HEADS[benchmark], f"tensor_model_parallel_size ({self.tp})."
        if self.vp > 1 and self.pp == 1:
            raise RuntimeError("pipeline-model-parallel size should be greater than 1 with interleaved schedule")
        if heads % self.tp:
            raise ValueError(f"num_attention_heads ({heads}) must be a multiple of {parallel}")
        if GROUPS % self.tp:
            raise ValueError(f"num_query_groups ({GROUPS}) must be a multiple of {parallel}")
        if self.sp and self.tp == 1 and form() == "v4.1":  # NeMo 1 sees to it before Megatron does
            print("Sequence parallel should only be used with tensor parallel size > 1. Setting it to False")
        elif self.sp and self.tp == 1:
            raise ValueError("Can not use sequence paralllelism without tensor parallelism")
        if self.gpus % (self.tp * self.pp * self.cp):
            ranks = f"tensor_model_parallel_size={self.tp} x pipeline_model_parallel_size={self.pp}"
            raise RuntimeError(
                f"world_size ({self.gpus}) is not divisible by {ranks} x context_parallel_size={self.cp}"
            )


def eval_steps(benchmark: str, *, every: int, skipped: int, last: int, gbs: int) -> list[int]:
    """Optimizer steps after which the training evaluates. every: samples. last: its last step.

    Lightning counts the first interval in batches of an epoch and refuses one that is longer.
    """
    batches = TRAIN_SAMPLES[benchmark] * math.ceil(last * gbs / TRAIN_SAMPLES[benchmark]) // gbs
    between = -(-every // gbs)  # in whole steps: 1,548 samples at a batch of 9, as public logs have it
    first = (skipped + 1) * between
    if first > batches:
        raise ValueError(
            f"val_check_interval ({first}) must be less than or equal to the number of the training batches "
            f"({batches})."
        )
    return list(range(first, last + 1, between))


def emit(key: str, value: object = None, kind: str = "POINT_IN_TIME", at: float | None = None, **meta: object) -> None:
    """One MLLOG line; ``at`` is in seconds since the epoch."""
    stamp = time.time() if at is None else at
    line = {"namespace": "", "time_ms": int(stamp * 1000), "event_type": kind, "key": key, "value": value}
    metadata = {"file": "custom_callbacks.py", "lineno": 1, **meta}
    print(f":::MLLOG {json.dumps({**line, 'metadata': metadata})}", flush=True)


@dataclass
class Log:
    """The lines of one run, in the form of a round."""

    benchmark: str
    gbs: int
    round: str = field(default_factory=lambda: form())

    @property
    def pretrains(self) -> bool:
        return self.benchmark != "llama2_70b_lora"

    def header(self, values: dict[str, str], target: float, **more: object) -> None:
        """From cache_clear to what is announced before init_stop. more: what a stand-in says besides."""
        emit("cache_clear", True)
        emit("init_start", kind="INTERVAL_START")
        rate = float(values.get("LR") or values["LEARNING_RATE"])
        announced = {
            "submission_benchmark": self.benchmark,
            "submission_org": "stand-in",
            "submission_division": "closed",
            "submission_status": "onprem",
            "submission_platform": "1xstand-in",
            **({"target_accuracy": target} if self.round == "v5.1" else {}),
            "seed": count(values, "SEED"),
            "global_batch_size": self.gbs,
            "train_samples": TRAIN_SAMPLES[self.benchmark],
            "eval_samples": EVAL_SAMPLES[self.benchmark],
            "gradient_accumulation_steps": count(values, "MINIBS") // count(values, "MBS", "MICRO_BATCH_SIZE"),
            "opt_base_learning_rate": rate,
            **(self._pretraining(values, rate) if self.pretrains else self._lora(values)),
            **more,
        }
        for key, value in announced.items():
            emit(key, value)
        if self.round != "v4.1":
            own = () if self.pretrains else ("before_model_init", "after_model_init")
            for name in (*own, "warmup_time", "init_finished"):
                emit("tracked_stats", {name: 0.1}, step=0)

    def _lora(self, values: dict[str, str]) -> dict[str, object]:
        return {
            "opt_adamw_weight_decay": 1e-4,
            "opt_gradient_clip_norm": 0.3,
            "opt_learning_rate_warmup_factor": float(values.get("WARMUP_RATIO") or 0.0),
            "opt_learning_rate_training_steps": count(values, "MAX_STEPS"),
            "lora_rank": 16,
            "lora_alpha": 32,
        }

    def _pretraining(self, values: dict[str, str], rate: float) -> dict[str, object]:
        steps = {"max_steps": count(values, "MAX_STEPS")} if self.round == "v5.1" else {}
        return {
            "max_sequence_length": 8192, "init_checkpoint_step": 0, "opt_name": "adamw", "opt_adamw_beta_1": 0.9,
            "opt_adamw_beta_2": 0.95, "opt_adamw_epsilon": 1e-5, "opt_adamw_weight_decay": 0.1,
            "opt_gradient_clip_norm": 1.0, "opt_end_learning_rate": rate / 100, "opt_learning_rate_warmup_steps": 8000,
            "opt_learning_rate_decay_steps": 1192000,
            "opt_learning_rate_decay_schedule": "cosine with linear warmup", **steps,
        }  # fmt: skip

    def begin(self, at: float | None = None) -> None:
        """The run begins."""
        emit("run_start", kind="INTERVAL_START", at=at)

    def block_start(self, step: int, block: int, at: float | None = None) -> None:
        """A block of ``block`` steps begins behind ``step``: v5.1 states its length, the others where it begins."""
        if self.round == "v5.1":
            emit("block_start", kind="INTERVAL_START", at=at, samples_count=block * self.gbs, step=step)
        else:
            emit("block_start", kind="INTERVAL_START", at=at, samples_count=step * self.gbs)

    def train_loss(self, step: int, loss: float, step_seconds: float, at: float | None = None) -> None:
        """A training loss."""
        samples = step * self.gbs
        if self.pretrains:
            stats = {"train_step_time": step_seconds, "reduced_train_loss": loss}
            emit("tracked_stats", stats, at=at, step=samples)
        elif self.round == "v5.1":
            emit("tracked_stats", {"train_loss": loss}, at=at, samples_count=samples, lr=1e-4, step=step)
        else:
            emit("train_loss", loss, at=at, samples_count=samples, lr=1e-4)

    def block_stop(self, step: int, block: int, speed: float, at: float | None = None) -> None:
        """A block of ``block`` steps ends behind ``step``. speed: samples a second."""
        samples, own = step * self.gbs, block * self.gbs
        if self.round == "v4.1":
            emit("tracked_stats", {"throughput": speed}, at=at, step=samples)
            emit("block_stop", kind="INTERVAL_END", at=at, samples_count=samples)
        elif self.round == "v5.0":
            stats = {"throughput": speed, "train_step_time": self.gbs / speed, "max_memory_usage": 78.5}
            emit("tracked_stats", stats, at=at, step=samples - own)
            emit("block_stop", kind="INTERVAL_END", at=at, samples_count=samples - own)
        else:
            emit("tracked_stats", {"train_step_time": self.gbs / speed}, at=at, samples_count=own)
            emit("block_stop", kind="INTERVAL_END", at=at, samples_count=own, step=step)

    def eval(self, step: int, loss: float, begun: float | None = None, ended: float | None = None) -> None:
        """An eval behind ``step``; begun, ended: its stamps, where the clock is not the machine's."""
        samples, counted = step * self.gbs, {"step": step} if self.round == "v5.1" else {}
        emit("eval_start", kind="INTERVAL_START", at=begun, samples_count=samples, **counted)
        if self.pretrains:
            emit("tracked_stats", {"validation_step_time": 0.01}, at=ended, step=samples)
        emit("eval_accuracy", loss, at=ended, samples_count=samples)
        if self.round != "v4.1":
            name, value = ("validation_throughput", 12.0) if self.round == "v5.0" else ("validation_time", 1.9)
            emit("tracked_stats", {name: value}, at=ended, step=step if counted else samples)
        emit("eval_stop", kind="INTERVAL_END", at=ended, samples_count=samples, **counted)

    def stop(self, step: int, loss: float, status: str, at: float | None = None) -> None:
        """The run ends; v4.1 repeats the last loss."""
        counted = {"step": step} if self.round == "v5.1" else {}
        value = loss if self.round == "v4.1" else None
        emit("run_stop", value, "INTERVAL_END", at=at, samples_count=step * self.gbs, status=status, **counted)
