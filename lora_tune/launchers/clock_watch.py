"""Whether somebody sets or slews the wall clock while a job runs: the job's time stamps come from it."""

from __future__ import annotations

import threading
import time

from lora_tune.base.host import steady

LOOK_SECONDS = 0.25
STEP_SECONDS = 0.1
FASTEST_SLEW = 0.1
"""Of a second, a second; chrony slews by a twelfth at most. A change between two looks that is larger is a step."""

DRIFT_SECONDS = 1.0
DRIFT_SHARE = 0.01
"""What a clock drifts in a whole job is noted where it is more than this, and than this share of the job's seconds."""

STEADY_READING = 0.01
"""Seconds; clocks read further apart than this were not read at one time."""


class ClockWatch:
    """Notes in ``steps`` by how many seconds the wall clock was set, in a thread, between entering and leaving.

    The last one is what it drifted meanwhile beside its steps, where that is much.
    """

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="clock watch", daemon=True)
        self._began = self._last = _read()

    def __enter__(self) -> ClockWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()
        (began, ahead), (now, ahead_now) = self._began, self._last
        drift = ahead_now - ahead - sum(self.steps)
        if abs(drift) > max(DRIFT_SECONDS, DRIFT_SHARE * (now - began)):
            self.steps.append(round(drift, 3))

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        (before, ahead), self._last = self._last, _read()
        now, ahead_now = self._last
        if abs(ahead_now - ahead) >= STEP_SECONDS + FASTEST_SLEW * (now - before):
            self.steps.append(round(ahead_now - ahead, 3))


def _read() -> tuple[float, float]:
    """Seconds by a clock that nobody sets or slews, sleep of the machine included; how far the wall clock is ahead.

    A time service that slews the wall clock slews the monotonic one with it, and leaves the raw one alone.
    """
    while True:
        before, wall = steady(), time.time()
        slewed = time.monotonic() - time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
        if (spent := steady() - before) < STEADY_READING:
            now = before + spent / 2 - slewed
            return now, wall - now
