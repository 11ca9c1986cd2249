"""Speed and memory use of a trial alone, and the gain of training two side by side.

Measured once for each shape of trial, in a short run of one slot and one of two.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from lora_tune_recipes.packed.base import PackedBase
from lora_tune_recipes.packed.job import LEAST_GAIN
from lora_tune_recipes.packed.pack import EVAL_TOKENS, Pack
from lora_tune_recipes.packed.slot import Slot, Texts
from lora_tune_recipes.settings import Settings

WARM_UP, STEPS = 2, 5
EVALUATIONS = 2
"""Evaluations before the timed one; the second records the graph."""
SECONDS = 2.0
"""After this time no further step is measured, if one was."""
UNMEASURED = 2.0
"""Gain of two if it is not measured: the second is assumed to cost nothing."""


@dataclass(frozen=True, slots=True)
class TrialSpeed:
    """A trial alone: seconds per optimizer step and per evaluation; peak bytes on the device.

    pair_gain: ratio of steps per second of two such trials side by side to those of one.
    """

    step_seconds: float
    eval_seconds: float
    bytes: int
    pair_gain: float = UNMEASURED

    @property
    def packs(self) -> bool:
        """Whether such trials gain from sharing a pack."""
        return self.pair_gain >= LEAST_GAIN


class Speeds:
    """Measures each shape of trial once; the calling pack waits meanwhile."""

    def __init__(self, base: PackedBase) -> None:
        self._base = base
        self._known: dict[tuple[object, ...], TrialSpeed] = {}
        # A single thread's processor time is its wall time on an idle core, and excludes other processes.
        single = base.device.type == "cpu" and base.settings.threads == 1
        self._clock = time.process_time if single else time.perf_counter

    def of(self, slot: Slot) -> TrialSpeed:
        """The speed of the trial in ``slot``. Raises torch.OutOfMemoryError if it does not fit even alone."""
        settings = slot.settings
        # Trials of one shape do the same work, whatever their ranks before padding.
        shape, drops = Pack(self._base).shape(settings), settings.adapters.dropout > 0
        key = shape, settings.minibs, drops, len(slot.texts.validation)
        if key not in self._known:
            self._known[key] = self._measure(settings, slot.texts)
        return self._known[key]

    def _measure(self, settings: Settings, texts: Texts) -> TrialSpeed:
        cuda = self._base.device.type == "cuda"
        before = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        evaluated = max(settings.mbs, EVAL_TOKENS // settings.seq if cuda else 1)
        some = Texts(texts.train, texts.validation.spread(evaluated))
        pack, slot = Pack(self._base, patience=0.0), Slot(settings, some)
        pack.join(slot)
        step_seconds = self._step_seconds(pack, settings.accumulation)
        for _ in range(EVALUATIONS):
            pack.evaluate([slot])
        began = self._clock()
        pack.evaluate([slot])
        eval_seconds = (self._clock() - began) * len(texts.validation) / len(some.validation)
        peak = torch.cuda.max_memory_allocated() - before if cuda else 0
        gain = self._pair_gain(pack, Slot(settings, some), step_seconds)
        speed = TrialSpeed(step_seconds, eval_seconds, peak, gain)
        if not speed.packs:
            shape = f"{settings.minibs} x {settings.seq} tokens, rank {settings.adapters.rank}"
            print(f"trials of {shape} gain nothing side by side ({gain:.2f} x one): each trains alone", flush=True)
        return speed

    def _pair_gain(self, pack: Pack, second: Slot, step_seconds: float) -> float:
        pack.join(second)
        try:
            return 2 * step_seconds / self._step_seconds(pack, second.settings.accumulation)
        except torch.OutOfMemoryError:
            return 1.0

    def _step_seconds(self, pack: Pack, accumulation: int) -> float:
        """The median time of an optimizer step of all slots of the pack."""
        times: list[float] = []
        while len(times) < WARM_UP + STEPS and (len(times) <= WARM_UP or sum(times) < SECONDS):
            began = self._clock()
            for _ in range(accumulation):
                pack.round()
            self._wait()
            times.append(self._clock() - began)
        return statistics.median(times[WARM_UP:])

    def _wait(self) -> None:
        if self._base.device.type == "cuda":
            torch.cuda.synchronize()
