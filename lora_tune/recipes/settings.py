"""The knobs of a PEFT trial, from environment variables as MLPerf's ``config_*.sh`` files set them.

A value that cannot be used is an ``InputError`` whose one line names the variable, what came and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from lora_tune.errors import InputError

TINY = Path(__file__).parent / "tiny"
"""The shipped task: base weights and texts."""
TINY_TARGET = 1.58
"""The eval loss that the shipped task aims at."""

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One trial, checked. Each field is the environment variable of the same name in capitals."""

    lr: float
    """Peak learning rate of AdamW."""
    min_lr: float
    """Learning rate at the end of the cosine."""
    max_steps: int
    """Optimizer steps; also the length of the cosine."""
    warmup_steps: int
    """Steps of linear learning-rate warm-up."""
    val_check_interval: int
    """Optimizer steps between evaluations."""
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
    seed: int
    """Seed of the adapter's initial weights, of the order of the data and of dropout."""
    target: float | None
    """Eval loss at which the run stops with success; None trains all the steps."""
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    weight_decay: float
    grad_clip: float
    """Largest norm of the gradient; 0 does not clip."""
    seq: int
    """Tokens in a training sequence."""
    eval_samples: int
    """Sequences of the validation data that an evaluation reads, from the start; 0 reads all."""
    model: Path
    """Checkpoint folder: ``config.json`` with safetensors."""
    datadir: Path
    """Folder with ``train`` and ``validation`` as .npy, .jsonl, .txt or .txt.gz."""
    dtype: Literal["auto", "float32", "bfloat16"]
    attn: Literal["sdpa", "eager", "flash_attention_2"]
    warmup: bool
    """Warm the kernels up before the clock starts."""
    threads: int
    """CPU threads of this process; one makes CPU runs repeat exactly."""

    @property
    def accumulation(self) -> int:
        """Forward passes per optimizer step."""
        return self.minibs // self.mbs


def read(environment: Mapping[str, str]) -> Settings:
    """The settings that ``environment`` asks for; unset or empty variables take their defaults.

    Raises InputError for the first value that is not allowed.
    """
    knobs = _Knobs(environment)
    max_steps = knobs.integer("MAX_STEPS", 200, low=1)
    minibs = knobs.integer("MINIBS", 4, low=1)
    lr = knobs.real("LR", 5e-3, above=0.0, high=10.0)
    model = knobs.folder("MODEL", TINY)
    datadir = knobs.folder("DATADIR", TINY)
    shipped = model == TINY and datadir == TINY
    interval = knobs.integer("VAL_CHECK_INTERVAL", 0, low=0, high=max_steps, limit="MAX_STEPS")
    mbs = knobs.integer("MBS", minibs, low=1, high=minibs, limit="MINIBS")
    if minibs % mbs:
        raise knobs.refusal("MBS", f"a divisor of MINIBS={minibs}")
    return Settings(
        lr=lr,
        min_lr=knobs.real("MIN_LR", 0.0, low=0.0, high=lr, limit="LR"),
        max_steps=max_steps,
        warmup_steps=knobs.integer("WARMUP_STEPS", 0, low=0, high=max_steps - 1, limit="MAX_STEPS - 1"),
        val_check_interval=interval or default_interval(max_steps),
        minibs=minibs,
        mbs=mbs,
        tp=knobs.integer("TP", 1, low=1),
        cp=knobs.integer("CP", 1, low=1),
        fsdp=knobs.switch("FSDP", default=False),
        seed=knobs.integer("SEED", 1, low=0, high=2**31 - 1),
        target=knobs.optional_real("TARGET", TINY_TARGET if shipped else None, above=0.0),
        lora_rank=knobs.integer("LORA_RANK", 16, low=1),
        lora_alpha=knobs.real("LORA_ALPHA", 32.0, above=0.0),
        lora_dropout=knobs.real("LORA_DROPOUT", 0.1, low=0.0, below=1.0),
        weight_decay=knobs.real("WEIGHT_DECAY", 1e-4, low=0.0),
        grad_clip=knobs.real("GRAD_CLIP", 0.3, low=0.0),
        seq=knobs.integer("SEQ", 128, low=2),
        eval_samples=knobs.integer("EVAL_SAMPLES", 32 if shipped else 0, low=0),
        model=model,
        datadir=datadir,
        dtype=knobs.choice("DTYPE", ("auto", "float32", "bfloat16")),  # type: ignore[arg-type]
        attn=knobs.choice("ATTN", ("sdpa", "eager", "flash_attention_2")),  # type: ignore[arg-type]
        warmup=knobs.switch("WARMUP", default=True),
        threads=knobs.integer("THREADS", 1, low=1),
    )


def default_interval(max_steps: int) -> int:
    """Steps between evaluations where none is asked for: twenty evaluations a run."""
    return math.ceil(max_steps / 20)


class _Knobs:
    """Reads typed values out of an environment; every refusal is phrased here."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def refusal(self, name: str, allowed: str) -> InputError:
        return InputError(f"{name}={self._environment.get(name, '')!r}: allowed is {allowed}")

    def _text(self, name: str) -> str:
        return self._environment.get(name, "").strip()

    def _number(self, name: str, kind: Callable[[str], Number], noun: str) -> Number:
        try:
            value = kind(self._text(name))
        except ValueError:
            raise self.refusal(name, noun) from None
        if not math.isfinite(value):
            raise self.refusal(name, noun)
        return value

    def integer(self, name: str, default: int, *, low: int, high: int | None = None, limit: str = "") -> int:
        if not self._text(name):
            return default if high is None else min(default, high)
        allowed = f"a whole number of at least {low}"
        if high is not None:
            allowed += f" and at most {limit + '=' if limit else ''}{high}"
        value = self._number(name, int, allowed)
        if value < low or (high is not None and value > high):
            raise self.refusal(name, allowed)
        return value

    def real(
        self,
        name: str,
        default: float,
        *,
        low: float | None = None,
        above: float | None = None,
        high: float | None = None,
        below: float | None = None,
        limit: str = "",
    ) -> float:
        if not self._text(name):
            return default
        bounds = {"at least": low, "above": above, "at most": high, "below": below}
        named = {
            word: f"{limit}={bound:g}" if limit and word == "at most" else f"{bound:g}"
            for word, bound in bounds.items()
            if bound is not None
        }
        allowed = "a number " + " and ".join(f"{word} {bound}" for word, bound in named.items())
        value = self._number(name, float, allowed)
        if (
            (low is not None and value < low)
            or (above is not None and value <= above)
            or (high is not None and value > high)
            or (below is not None and value >= below)
        ):
            raise self.refusal(name, allowed)
        return value

    def optional_real(self, name: str, default: float | None, *, above: float) -> float | None:
        return self.real(name, 0.0, above=above) if self._text(name) else default

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self._text(name) or allowed[0]
        if value not in allowed:
            raise self.refusal(name, "one of " + ", ".join(allowed))
        return value

    def switch(self, name: str, *, default: bool) -> bool:
        words = {"": default, "1": True, "true": True, "0": False, "false": False}
        value = words.get(self._text(name).lower())
        if value is None:
            raise self.refusal(name, "1, 0, True or False")
        return value

    def folder(self, name: str, default: Path) -> Path:
        if not self._text(name):
            return default
        path = Path(self._text(name))
        if not path.is_dir():
            raise self.refusal(name, "an existing folder")
        return path
