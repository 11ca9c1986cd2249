"""How a trial's process ends: at once, with an exit code that is true even where nothing can be written any more."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn


def end_with(run: Callable[[], int]) -> NoReturn:
    """Call ``run`` and end this process with the exit code that it returns, or 1 where it raises.

    No destructor runs: those of a failed rank would wait for collectives that never come.
    """
    code = 1
    try:
        code = run()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the disk is full: the exit code says so
                stream.flush()
        os._exit(code)
