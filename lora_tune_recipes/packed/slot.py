"""One trial's slot in a pack: its settings, its data and its progress."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lora_tune_recipes import text
from lora_tune_recipes.packed.dropout import pass_seed
from lora_tune_recipes.schedule import learning_rate
from lora_tune_recipes.settings import Settings
from lora_tune_recipes.text import Sequences


class Texts(NamedTuple):
    """Training and validation data of a slot."""

    train: Sequences
    validation: Sequences


class Slot:
    """A trial of ``settings`` on ``texts`` that has made ``step`` optimizer steps.

    passes: completed passes of the current step.
    """

    def __init__(self, settings: Settings, texts: Texts, step: int = 0) -> None:
        self.settings, self.texts = settings, texts
        self.step, self.passes = step, 0
        self._order = itertools.islice(text.order(len(texts.train), settings.minibs, settings.seed), step, None)
        self._rows = next(self._order)

    def rows(self) -> npt.NDArray[np.int64]:
        """Indices of the training sequences of the next pass."""
        start = self.passes * self.settings.mbs
        return self._rows[start : start + self.settings.mbs]

    def pass_seed(self) -> int:
        """The dropout seed of the next pass."""
        return pass_seed(self.settings.seed, self.step, self.passes)

    def rate(self) -> float:
        """The learning rate of the current step."""
        settings = self.settings
        return learning_rate(
            self.step,
            peak=settings.lr,
            floor=settings.min_lr,
            warmup_steps=settings.warmup_steps,
            max_steps=settings.max_steps,
        )

    def passed(self) -> bool:
        """Count a pass; True if the current step is now due for the optimizer."""
        self.passes += 1
        return self.passes == self.settings.accumulation

    def stepped(self) -> None:
        """Count an optimizer step, and advance to the next one's sequences."""
        self.step, self.passes = self.step + 1, 0
        self._rows = next(self._order)

    def again(self) -> None:
        """Restart the current step."""
        self.passes = 0
