"""A trial in a pack: its claim, its log, its start and its end on record.

The log's clock is that of the trial by itself: each step and each evaluation lasts as long as for a pack of one,
measured once for each shape of batch. So a trial's time to target is what it would be by itself, whoever trained
beside it, and trials of different packs compare. What it really took is in the log as ``packed_seconds``.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import time
from collections.abc import Mapping
from typing import TextIO

from mlperf_logging.mllog import constants

from lora_tune.base.errors import LoraTuneError
from lora_tune.base.files import create_json, write_json
from lora_tune.base.host import steady
from lora_tune.base.paths import ATTEMPT_VARIABLE, SWEEP_VARIABLE
from lora_tune.launchers.job_records import describe
from lora_tune.launchers.pack_folder import PackRequest
from lora_tune_recipes.packed import checkpoint
from lora_tune_recipes.packed.checkpoint import Checkpoint, LogClock, Progress
from lora_tune_recipes.packed.group import Rows
from lora_tune_recipes.packed.slot import Slot
from lora_tune_recipes.packed.speed import TrialSpeed
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
        self._speed: TrialSpeed | LogClock | None = None
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

    def begin(self, speed: TrialSpeed) -> None:
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


STOPPED = 143
"""Exit code of a trial that the sweep stopped: that of a process that SIGTERM ended."""


class ClaimedTrial:
    """A claimed trial and its records.

    share: seconds of the node that the trial has had. bytes: what it takes of the memory. packs: whether it gains by
    company. left_at: where it left off when memory was short.
    """

    def __init__(self, request: PackRequest) -> None:
        self.request, self.name = request, request.name
        self.share, self.bytes, self.packs = 0.0, 0, True
        self.left_at: Rows | None = None
        self.slot: Slot
        self.trial: PackedTrial
        self._log: TextIO = open(request.log, "a", encoding="utf-8")  # noqa: SIM115, PTH123 - closed at its end
        self._began: float | None = None

    @classmethod
    def claim(cls, request: PackRequest) -> ClaimedTrial | None:
        """The trial, claimed for this process; None where another one has it, or its folder or log cannot be used."""
        try:
            create_json(request.attempt.claim, describe(os.getpid(), request.token, request.sweep))
        except FileExistsError:
            return None
        except OSError as error:  # it is run again when this pack has ended
            print(f"{request.name}: no claim, so it is not trained: {error}", flush=True)
            return None
        try:
            return cls(request)
        except OSError as error:
            print(f"{request.name}: no log, so it is not trained: {error}", flush=True)
            with contextlib.suppress(OSError):  # a folder that takes nothing: the trial has no end on record
                write_json(request.attempt.ended, {**_whose(request), "exit_code": 1, "at": time.time()})
            return None

    def open(self, slot: Slot, device: str, left: Checkpoint | None) -> None:
        """Its knobs and data are good: begin its log, or go on where an earlier attempt ``left`` off."""
        self.slot = slot
        if left is not None:
            self.left_at = left.rows
        whose = {ATTEMPT_VARIABLE: self.request.token, SWEEP_VARIABLE: self.request.sweep}
        self.trial = PackedTrial(slot, self._log, device, whose, left)

    def save(self, device: str, rows: Rows) -> None:
        """Write down where it is, for the attempt that goes on from there."""
        self._log.flush()
        trial = self.trial
        left = Progress(step=self.slot.step, clock=trial.clock(), evaluates=trial.evaluates)
        checkpoint.save(self.request, device, rows, left)

    def begin(self, speed: TrialSpeed) -> None:
        """It has a slot, again or for the first time. speed: of the trial alone."""
        self.bytes, self.packs, self.left_at = speed.bytes, speed.packs, None
        if self._began is None:
            self._began = steady()
            write_json(self.request.attempt.started, describe(os.getpid(), self.request.token, self.request.sweep))
            self.trial.begin(speed)

    def end(self, code: int) -> None:
        """Write down that it ended; nothing of it is written after that."""
        self._log.close()
        seconds = None if self._began is None else round(steady() - self._began, 3)
        share = 1.0 if not seconds else min(1.0, self.share / seconds)
        record = {**_whose(self.request), "exit_code": code, "at": time.time(), "node_share": share}
        write_json(self.request.attempt.ended, record | ({} if seconds is None else {"seconds": seconds}))

    def fail(self, error: BaseException) -> bool:
        """End it with what went wrong as the last line of its log; the pack's has it where that cannot be written.

        Returns whether its end is on record.
        """
        name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        # By this word a reader tells what went wrong from a refusal, which no further attempt would change.
        kind = "" if isinstance(error, LoraTuneError) else f"raised {name}: "
        line = f"packed_lora: {kind}{' '.join(str(error).split())}"
        try:
            print(line, file=self._log, flush=True)
            self.end(error.exit_code if isinstance(error, LoraTuneError) else 1)
        except (OSError, ValueError) as unwritten:  # no room, or its folder or stream is gone: it has no end on record
            print(f"{self.name}: {line}; not written down: {unwritten}", flush=True)
            return False
        return True


def _whose(request: PackRequest) -> dict[str, str]:
    return {"token": request.token, "sweep": request.sweep}
