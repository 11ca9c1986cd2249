"""A trial in a pack: its claim, its log, and the records of its start and end.

The log's clock is simulated: each step and evaluation takes the time measured for a pack of one, once per batch shape.
So time to target does not depend on the other trials of the pack, and trials of different packs are comparable. The
real duration is in the log as ``packed_seconds``.
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

    device: name of the device. whose: the variables with the attempt's and the sweep's id. left: the checkpoint of an
    interrupted attempt, whose log is continued.

    over: the trial has finished. evaluates: an evaluation has begun.
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
        """Continue the earlier attempt's log and clock."""
        clock, self.evaluates = left.progress.clock, left.progress.evaluates
        self._began, self._alone, self._spent, self._speed = clock.began, clock.alone, clock.spent, clock
        self._log.identity(whose)
        stream.write(left.log)
        stream.flush()
        self._log.block = clock.block

    def clock(self) -> LogClock:
        """The state of the log's clock, for a checkpoint."""
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
        """Start or resume training; ``speed`` is that of the trial alone."""
        waited, self._entered = time.monotonic() - self._entered, time.monotonic()
        if self._speed is not None:
            return
        self._speed = speed
        self._began += waited  # not the wall clock, which may have been set meanwhile
        self._log.event("pack_gain", round(speed.pair_gain, 3))
        self._log.end(constants.INIT_STOP)
        self._log.start(constants.RUN_START)
        self._log.block_start(0)

    @property
    def wants_loss(self) -> bool:
        """Whether to log the training loss of the last step."""
        return self.slot.step % TRAIN_LOSS_EVERY == 0

    @property
    def _due_for_evaluation(self) -> bool:
        """Whether an evaluation follows the last step."""
        settings = self.slot.settings
        step = self.slot.step
        return not self.over and (step % settings.interval(settings.minibs) == 0 or step >= settings.max_steps)

    def stepped(self, rate: float, loss: float | None) -> None:
        """Log a step at this learning rate; ``loss`` is None unless ``wants_loss``."""
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
        """Log the result of the evaluation that has begun."""
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
"""Exit code of a trial that the sweep stopped, that of a process killed by SIGTERM."""


class ClaimedTrial:
    """A claimed trial and its records.

    share: seconds of the node charged to the trial. bytes: its memory use. packs: whether it is faster in a pack.
    left_at: its state when it was removed for lack of memory.
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
        """Claim the trial for this process; None if another has it, or its folder or log is not writable."""
        try:
            create_json(request.attempt.claim, describe(os.getpid(), request.token, request.sweep))
        except FileExistsError:
            return None
        except OSError as error:  # it is retried after this pack has ended
            print(f"{request.name}: no claim, so it is not trained: {error}", flush=True)
            return None
        try:
            return cls(request)
        except OSError as error:
            print(f"{request.name}: no log, so it is not trained: {error}", flush=True)
            with contextlib.suppress(OSError):  # if the folder is not writable either, the trial has no end record
                write_json(request.attempt.ended, {**_whose(request), "exit_code": 1, "at": time.time()})
            return None

    def open(self, slot: Slot, device: str, left: Checkpoint | None) -> None:
        """Begin its log after its settings and data are checked, or continue the checkpoint ``left``."""
        self.slot = slot
        if left is not None:
            self.left_at = left.rows
        whose = {ATTEMPT_VARIABLE: self.request.token, SWEEP_VARIABLE: self.request.sweep}
        self.trial = PackedTrial(slot, self._log, device, whose, left)

    def save(self, device: str, rows: Rows) -> None:
        """Save a checkpoint for the next attempt."""
        self._log.flush()
        trial = self.trial
        left = Progress(step=self.slot.step, clock=trial.clock(), evaluates=trial.evaluates)
        checkpoint.save(self.request, device, rows, left)

    def begin(self, speed: TrialSpeed) -> None:
        """Record that it entered the pack, for the first time or again. speed: of the trial alone."""
        self.bytes, self.packs, self.left_at = speed.bytes, speed.packs, None
        if self._began is None:
            self._began = steady()
            write_json(self.request.attempt.started, describe(os.getpid(), self.request.token, self.request.sweep))
            self.trial.begin(speed)

    def end(self, code: int) -> None:
        """Write its end record, after which nothing else is written."""
        self._log.close()
        seconds = None if self._began is None else round(steady() - self._began, 3)
        share = 1.0 if not seconds else min(1.0, self.share / seconds)
        record = {**_whose(self.request), "exit_code": code, "at": time.time(), "node_share": share}
        write_json(self.request.attempt.ended, record | ({} if seconds is None else {"seconds": seconds}))

    def fail(self, error: BaseException) -> bool:
        """End it with the error as the last line of its log, or of the pack's log if that fails.

        Returns whether its end record was written.
        """
        name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        # "raised" distinguishes a crash from a refused setting, for which a retry is useless.
        kind = "" if isinstance(error, LoraTuneError) else f"raised {name}: "
        line = f"packed_lora: {kind}{' '.join(str(error).split())}"
        try:
            print(line, file=self._log, flush=True)
            self.end(error.exit_code if isinstance(error, LoraTuneError) else 1)
        except (OSError, ValueError) as unwritten:  # full disk, or folder or stream gone: it has no end record
            print(f"{self.name}: {line}; not written down: {unwritten}", flush=True)
            return False
        return True


def _whose(request: PackRequest) -> dict[str, str]:
    return {"token": request.token, "sweep": request.sweep}
