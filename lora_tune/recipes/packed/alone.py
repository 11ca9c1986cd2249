"""How fast a trial would be alone, and how much memory it takes: a short run of one slot, once for each shape."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from lora_tune.recipes.packed.base import PackedBase
from lora_tune.recipes.packed.pack import EVAL_TOKENS, Pack
from lora_tune.recipes.packed.slot import Slot, Texts
from lora_tune.recipes.settings import Settings

WARM_UP, STEPS = 2, 5
SECONDS = 2.0
"""After this long no further step is timed, once one is."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a trial alone: seconds of an optimizer step and of an evaluation; most bytes that it takes on the device."""

    step_seconds: float
    eval_seconds: float
    bytes: int


class Speeds:
    """Measures each shape of trial once. The pack that calls it waits meanwhile."""

    def __init__(self, base: PackedBase) -> None:
        self._base = base
        self._known: dict[tuple[object, ...], Speed] = {}

    def of(self, slot: Slot) -> Speed:
        """The speed of the trial in ``slot``. Raises torch.OutOfMemoryError where it does not even fit alone."""
        settings = slot.settings
        shape = (settings.seq, settings.mbs, settings.minibs, settings.lora_rank, settings.lora_targets)
        key = (*shape, settings.lora_dropout > 0, len(slot.texts.validation))
        if key not in self._known:
            self._known[key] = self._measure(settings, slot.texts)
        return self._known[key]

    def _measure(self, settings: Settings, texts: Texts) -> Speed:
        cuda = self._base.device.type == "cuda"
        before = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        evaluated = max(settings.mbs, EVAL_TOKENS // settings.seq if cuda else 1)
        pack, slot = Pack(self._base), Slot(settings, Texts(texts.train, texts.validation.spread(evaluated)))
        pack.join(slot)
        times: list[float] = []
        while len(times) < WARM_UP + STEPS and (len(times) <= WARM_UP or sum(times) < SECONDS):
            began = time.perf_counter()
            for _ in range(settings.accumulation):
                pack.round()
            self._wait()
            times.append(time.perf_counter() - began)
        pack.evaluate([slot])
        began = time.perf_counter()
        pack.evaluate([slot])
        eval_seconds = (time.perf_counter() - began) * len(texts.validation) / len(slot.texts.validation)
        peak = torch.cuda.max_memory_allocated() - before if cuda else 0
        return Speed(statistics.median(times[WARM_UP:]), eval_seconds, peak)

    def _wait(self) -> None:
        if self._base.device.type == "cuda":
            torch.cuda.synchronize()
