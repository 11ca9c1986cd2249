"""What the sweeps of both kinds share: drivers until one ends the sweep, and a disk that is full for a moment."""

from __future__ import annotations

import errno
import random
import subprocess
import time
from pathlib import Path
from typing import Protocol


class Driven(Protocol):
    """A sweep with a driver that can be started again."""

    @property
    def driver(self) -> subprocess.Popen[bytes]: ...

    @property
    def said(self) -> str: ...

    def start(self) -> subprocess.Popen[bytes]: ...


def finish_all(room: Driven, seconds: float) -> None:
    """Drivers, one after another, until one ends the sweep. AssertionError after that time."""
    end = time.monotonic() + seconds
    while True:
        try:
            code = room.driver.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended in {seconds:g} s\n{room.said[-3000:]}") from None
        if code in (0, 4):
            return
        assert code not in (1, 2), f"a driver gave up: exit {code}\n{room.said[-3000:]}"
        assert time.monotonic() < end, f"drivers do not end the sweep: exit {code}\n{room.said[-3000:]}"
        time.sleep(1)
        room.start()


def fill_for_a_moment(filler: Path, chance: random.Random) -> str:
    """The file system of ``filler`` is full, for up to two seconds."""
    written = 0
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                written += file.write(b"\0" * 65536)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    time.sleep(chance.uniform(0.2, 2))
    filler.unlink()
    return f"{written} bytes"
