"""Whether somebody sets the wall clock while a job runs: the job's time stamps come from it."""

from __future__ import annotations

import threading
import time

from lora_tune.base.process import steady

LOOK_SECONDS = 0.25
STEP_SECONDS = 0.1
"""A change of at least so much between two looks is a step; what a time service slews is a thousandth of it."""

STEADY_READING = 0.01
"""Seconds; two clocks read further apart than this were not read at one time."""


class ClockWatch:
    """Notes in ``steps`` by how many seconds the wall clock was set, in a thread, between entering and leaving."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="clock watch", daemon=True)
        self._offset = _offset()

    def __enter__(self) -> ClockWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        offset = _offset()
        if abs(offset - self._offset) >= STEP_SECONDS:
            self.steps.append(round(offset - self._offset, 3))
        self._offset = offset


def _offset() -> float:
    """How far the wall clock is ahead of the one that nobody sets, in seconds."""
    while True:
        before, wall = steady(), time.time()
        if (spent := steady() - before) < STEADY_READING:
            return wall - before - spent / 2
