"""A trial in a slot, as its log tells it.

The log's clock is that of the trial alone: each step and each evaluation lasts as long as it does for a pack of one,
measured once for each shape of batch. So a trial's time to target is what it would be by itself, whoever trained
beside it, and trials of different packs compare. What it really took is in the log as ``packed_seconds``.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping
from typing import TextIO

from mlperf_logging.mllog import constants

from lora_tune_recipes.packed.alone import SpeedAlone
from lora_tune_recipes.packed.checkpoint import Checkpoint, LogClock
from lora_tune_recipes.packed.slot import Slot
from lora_tune_recipes.ranks import precision
from lora_tune_recipes.trial_log import TRAIN_LOSS_EVERY, TrialLog, description

CLOCK = "alone"
"""Value of the log's key ``clock``."""


class PackedTrial:
    """Writes the log of the trial in ``slot`` to ``stream``.

    device: the name of the device. whose: the variables that name attempt and sweep. left: where an earlier attempt
    was interrupted; its log goes on in this one.

    over: the trial has come to its own end. evaluates: an evaluation has begun.
    """

    def __init__(
        self, slot: Slot, stream: TextIO, device: str, whose: Mapping[str, str], left: Checkpoint | None = None
    ) -> None:
        self.slot, self.over, self.evaluates = slot, False, False
        self._began, self._alone, self._spent = time.time(), 0.0, 0.0
        self._entered = time.monotonic()
        self._log = TrialLog(enabled=True, stream=stream, now=self._now)
        self._speed: SpeedAlone | LogClock | None = None
        if left is not None:
            self._resume(left, stream, whose)
            return
        self._log.start(constants.INIT_START)
        self._log.identity(whose)
        texts, settings = slot.texts, slot.settings
        facts = description(
            settings,
            platform=f"1x{device or platform.machine()}",
            batch=settings.minibs,
            wide=precision(settings),
            texts=(len(texts.train), len(texts.validation)),
        )
        self._log.init({**facts, "clock": CLOCK})

    def _resume(self, left: Checkpoint, stream: TextIO, whose: Mapping[str, str]) -> None:
        """Go on where the log of the earlier attempt ends, and by its clock."""
        clock, self.evaluates = left.progress.clock, left.progress.evaluates
        self._began, self._alone, self._spent, self._speed = clock.began, clock.alone, clock.spent, clock
        self._log.identity(whose)
        stream.write(left.log)
        stream.flush()
        self._log.block = clock.block

    def clock(self) -> LogClock:
        """The time of the log now, for a checkpoint."""
        assert self._speed is not None, "only a trial that has begun is saved"
        return LogClock(
            began=self._began,
            alone=self._alone,
            spent=self._spent + time.monotonic() - self._entered,
            block=self._log.block,
            step_seconds=self._speed.step_seconds,
            eval_seconds=self._speed.eval_seconds,
        )

    def _now(self) -> float:
        return self._began + self._alone

    @property
    def _samples(self) -> int:
        return self.slot.step * self.slot.settings.minibs

    def begin(self, speed: SpeedAlone) -> None:
        """The training begins now, or goes on; ``speed`` is that of the trial alone."""
        waited, self._entered = time.monotonic() - self._entered, time.monotonic()
        if self._speed is not None:
            return
        self._speed = speed
        self._began += waited  # not the wall clock again, which somebody may have set meanwhile
        self._log.event("pack_gain", round(speed.pair_gain, 3))
        self._log.end(constants.INIT_STOP)
        self._log.start(constants.RUN_START)
        self._log.block_start(0)

    @property
    def wants_loss(self) -> bool:
        """Whether the training loss of the step just made is to be logged."""
        return self.slot.step % TRAIN_LOSS_EVERY == 0

    @property
    def _due_for_evaluation(self) -> bool:
        """Whether an evaluation follows the step just made."""
        settings = self.slot.settings
        step = self.slot.step
        return not self.over and (step % settings.interval(settings.minibs) == 0 or step >= settings.max_steps)

    def stepped(self, rate: float, loss: float | None) -> None:
        """After a step at this learning rate; ``loss`` where it was wanted."""
        assert self._speed is not None, "a trial begins before it steps"
        self._alone += self._speed.step_seconds
        if loss is not None:
            self._log.train_loss(loss, self._samples, rate)
            if not math.isfinite(loss):
                self._log.block_stop(self._samples, self.slot.settings.minibs)
                self._end(reached=False)
        if self._due_for_evaluation:
            self._log.block_stop(self._samples, self.slot.settings.minibs)
            settings = self.slot.settings
            if settings.probe and self.slot.step > settings.interval(settings.minibs):
                self._end(reached=False)
            else:
                self.evaluates = True
                self._log.start(constants.EVAL_START, samples_count=self._samples)

    def evaluated(self, loss: float) -> None:
        """After the evaluation that was wanted."""
        assert self._speed is not None, "a trial begins before it is evaluated"
        self.evaluates = False
        self._alone += self._speed.eval_seconds
        settings = self.slot.settings
        self._log.eval_loss(loss, self._samples)
        self._log.end(constants.EVAL_STOP, samples_count=self._samples)
        reached = settings.target is not None and loss <= settings.target
        if reached or not math.isfinite(loss) or self.slot.step >= settings.max_steps:
            self._end(reached=reached)
        else:
            self._log.block_start(self._samples)

    def _end(self, *, reached: bool) -> None:
        self.over = True
        self._log.event("packed_seconds", round(self._spent + time.monotonic() - self._entered, 3))
        self._log.run_stop(self._samples, success=reached)
