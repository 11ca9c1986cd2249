"""One trial's place in a pack: its knobs, what it reads next, and how far it is."""

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
    """What a slot trains on and is evaluated on."""

    train: Sequences
    validation: Sequences


class Slot:
    """A trial of ``settings`` on ``texts`` that has made ``step`` optimizer steps.

    passes: how many passes of the step in progress are done.
    """

    def __init__(self, settings: Settings, texts: Texts, step: int = 0) -> None:
        self.settings, self.texts = settings, texts
        self.step, self.passes = step, 0
        self._order = itertools.islice(text.order(len(texts.train), settings.minibs, settings.seed), step, None)
        self._rows = next(self._order)

    def rows(self) -> npt.NDArray[np.int64]:
        """Numbers of the training sequences of the next pass."""
        start = self.passes * self.settings.mbs
        return self._rows[start : start + self.settings.mbs]

    def pass_seed(self) -> int:
        """The seed of what the next pass drops."""
        return pass_seed(self.settings.seed, self.step, self.passes)

    def rate(self) -> float:
        """The learning rate of the step in progress."""
        settings = self.settings
        return learning_rate(
            self.step,
            peak=settings.lr,
            floor=settings.min_lr,
            warmup_steps=settings.warmup_steps,
            max_steps=settings.max_steps,
        )

    def passed(self) -> bool:
        """Count a pass; True when the step in progress is now whole and wants the optimizer."""
        self.passes += 1
        return self.passes == self.settings.accumulation

    def stepped(self) -> None:
        """Count an optimizer step, and go on to the next one's sequences."""
        self.step, self.passes = self.step + 1, 0
        self._rows = next(self._order)

    def again(self) -> None:
        """Begin the step in progress anew."""
        self.passes = 0
