"""A trial that a pack was asked for: its claim, its log file, its start and its end on record."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TextIO

from lora_tune.base.errors import LoraTuneError
from lora_tune.base.files import create_json, write_json
from lora_tune.base.host import steady
from lora_tune.base.paths import ATTEMPT_VARIABLE, SWEEP_VARIABLE
from lora_tune.launchers.job_records import describe
from lora_tune.launchers.pack_folder import PackRequest
from lora_tune_recipes.packed import checkpoint
from lora_tune_recipes.packed.alone import SpeedAlone
from lora_tune_recipes.packed.checkpoint import Checkpoint, Progress
from lora_tune_recipes.packed.group import Rows
from lora_tune_recipes.packed.slot import Slot
from lora_tune_recipes.packed.trial import PackedTrial

STOPPED = 143
"""Exit code of a trial that the sweep stopped: that of a process that SIGTERM ended."""


class Tenant:
    """A claimed trial and its records.

    share: seconds of the node that the trial has had. bytes: what it takes of the memory. packs: whether it gains by
    company. left_at: where it left off when memory was short. company: see Progress.
    """

    def __init__(self, request: PackRequest) -> None:
        self.request, self.name = request, request.name
        self.share, self.bytes, self.packs, self.company = 0.0, 0, True, 0
        self.left_at: Rows | None = None
        self.slot: Slot
        self.trial: PackedTrial
        self._log: TextIO = open(request.log, "a", encoding="utf-8")  # noqa: SIM115, PTH123 - closed at its end
        self._began: float | None = None

    @classmethod
    def claim(cls, request: PackRequest) -> Tenant | None:
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
            self.left_at, self.company = left.rows, left.progress.company
        whose = {ATTEMPT_VARIABLE: self.request.token, SWEEP_VARIABLE: self.request.sweep}
        self.trial = PackedTrial(slot, self._log, device, whose, left)

    def save(self, device: str, rows: Rows) -> None:
        """Write down where it is, for the attempt that goes on from there."""
        self._log.flush()
        trial = self.trial
        left = Progress(step=self.slot.step, clock=trial.clock(), evaluates=trial.evaluates, company=self.company)
        checkpoint.save(self.request, device, rows, left)

    def begin(self, speed: SpeedAlone) -> None:
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
