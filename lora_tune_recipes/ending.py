"""Ends a trial's process at once, with the right exit code even if nothing can be written."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from lora_tune.base.errors import LoraTuneError


def end_with(run: Callable[[], int]) -> NoReturn:
    """Call ``run`` and end this process with the exit code that it returns, or 1 if it raises.

    No destructor runs: those of a failed rank would wait for collectives that never complete.
    """
    code = 1
    try:
        code = run()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # such as a full disk; the exit code is enough
                stream.flush()
        os._exit(code)


def say_why(program: str, error: Exception, rank: str = "") -> int:
    """Print why a program fails, as the last line of standard error; returns its exit code.

    rank: of this process if there may be several. Only the first prints an error of input or machine, which is the
    same on all.
    """
    if isinstance(error, LoraTuneError):
        if rank in ("", "0"):
            print(f"{program}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    traceback.print_exception(error)
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    where = f"rank {rank}: " if rank else ""
    print(f"{program}: {where}{kind}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return 1
