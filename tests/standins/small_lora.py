"""A real but very small LoRA training, in NumPy: what the stand-ins of other people's recipes train.

A frozen model predicts the next byte of English text from byte frequencies alone; a low-rank adapter learns what the
two bytes before it say. AdamW, linear warm-up, dropout on the adapter's input, cross entropy in nats. It takes a
second, and its curves are those of a training: they depend on learning rate, batch, rank, schedule and seed.
"""

from __future__ import annotations

import functools
import gzip
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

TEXTS = Path(__file__).resolve().parents[2] / "lora_tune_recipes" / "tiny"
SEQUENCE = 32
"""Bytes that a sample holds."""

SYMBOLS = 64
"""The most frequent bytes; all others are one more symbol, the last."""

EVAL_SAMPLES = 256

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """batch: samples an optimizer step. schedule: cosine, linear or constant. targets: which context bytes the
    adapter sees, 1 or 2."""

    lr: float
    steps: int
    batch: int = 8
    warmup: int = 0
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    schedule: str = "cosine"
    targets: int = 2
    seed: int = 1


@functools.cache
def symbols(split: str) -> npt.NDArray[np.int64]:
    """A text as symbols; the order of frequency is that of the training text."""
    raw = np.frombuffer(gzip.decompress((TEXTS / f"{split}.txt.gz").read_bytes()), np.uint8)
    order = np.argsort(-np.bincount(_bytes_of_training(), minlength=256), kind="stable")
    rank = np.empty(256, np.int64)
    rank[order] = np.arange(256)
    return np.minimum(rank[raw], SYMBOLS - 1)


@functools.cache
def _bytes_of_training() -> npt.NDArray[np.uint8]:
    return np.frombuffer(gzip.decompress((TEXTS / "train.txt.gz").read_bytes()), np.uint8)


def rate(settings: Settings, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    left = 1 - (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    shapes = {"cosine": 0.5 * (1 + math.cos(math.pi * (1 - left))), "linear": left, "constant": 1.0}
    return settings.lr * shapes[settings.schedule]


class Training:
    """One run. ``steps()`` yields (optimizer steps done, train loss); ``eval_loss()`` may be asked in between."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._rng = np.random.default_rng(settings.seed)
        train = symbols("train")
        self._base = np.log(np.bincount(train, minlength=SYMBOLS) / len(train))
        self._down = self._rng.normal(0, SYMBOLS**-0.5, (2 * SYMBOLS, settings.rank))
        self._up = np.zeros((settings.rank, SYMBOLS))
        self._scale = settings.alpha / settings.rank

    def steps(self) -> Iterator[tuple[int, float]]:
        settings, train = self._settings, symbols("train")
        moments = [np.zeros_like(w) for w in (self._down, self._down, self._up, self._up)]
        for step in range(settings.steps):
            begins = self._rng.integers(2, len(train) - SEQUENCE, settings.batch)
            places = (begins[:, None] + np.arange(SEQUENCE)).ravel()
            loss, down, up = self._gradients(train, places)
            for weights, gradient, m, v in ((self._down, down, *moments[:2]), (self._up, up, *moments[2:])):
                m += 0.1 * (gradient - m)
                v += 0.05 * (gradient**2 - v)
                t = step + 1
                weights -= rate(settings, step) * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
            yield step + 1, loss

    def eval_loss(self) -> float:
        text = symbols("validation")
        begins = np.linspace(2, len(text) - SEQUENCE - 1, EVAL_SAMPLES).astype(np.int64)
        places = (begins[:, None] + np.arange(SEQUENCE)).ravel()
        hidden = self._hidden(text, places)
        return float(
            -_log_softmax(self._base + self._scale * hidden @ self._up)[range(len(places)), text[places]].mean()
        )

    def _hidden(self, text: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> Array:
        hidden = self._down[text[places - 1]]
        return hidden + self._down[SYMBOLS + text[places - 2]] if self._settings.targets > 1 else hidden

    def _gradients(self, text: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> tuple[float, Array, Array]:
        hidden = self._hidden(text, places)
        kept = (self._rng.random(hidden.shape) >= self._settings.dropout) / (1 - self._settings.dropout)
        hidden = hidden * kept
        log_p = _log_softmax(self._base + self._scale * hidden @ self._up)
        rows = np.arange(len(places))
        wrong = np.exp(log_p)
        wrong[rows, text[places]] -= 1
        wrong *= self._scale / len(places)
        back = wrong @ self._up.T * kept
        down = np.zeros_like(self._down)
        np.add.at(down, text[places - 1], back)
        if self._settings.targets > 1:
            np.add.at(down, SYMBOLS + text[places - 2], back)
        return float(-log_p[rows, text[places]].mean()), down, hidden.T @ wrong


def _log_softmax(logits: Array) -> Array:
    top = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(top - np.log(np.exp(top).sum(axis=1, keepdims=True)))
