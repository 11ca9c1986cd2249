"""Trial programs for the tests of the warm worker: what ``main`` does is in the variable ``DO``."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
import time
from pathlib import Path

seen: list[str] = []
gpus_while_imported = os.environ.get("CUDA_VISIBLE_DEVICES")


def main() -> int:
    what, _, argument = os.environ["DO"].partition(" ")
    seen.append(what)
    if what == "print":
        print(argument, Path.cwd(), len(seen), os.getppid(), flush=True)
        return 0
    if what == "gpus":
        print(repr(gpus_while_imported), repr(os.environ.get("CUDA_VISIBLE_DEVICES")), flush=True)
    if what == "log":  # as an MLLOG line asks for its file
        looked_up: list[object] = []
        find = os.path.realpath
        os.path.realpath = lambda *asked, **how: looked_up.append(asked) or find(*asked, **how)  # type: ignore[assignment]
        inspect.getframeinfo(inspect.currentframe())  # type: ignore[arg-type]
        print(len(looked_up), len(sys.modules), flush=True)
    if what == "collect":
        print(gc.get_freeze_count(), len(gc.get_objects()), flush=True)
    if what == "exit":
        return int(argument)
    if what == "raise":
        raise RuntimeError(argument)
    if what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "until":  # one line at the start, and one when the named file appears
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        print("started", time.monotonic(), os.getpid(), flush=True)
        while not Path(argument).exists():
            time.sleep(0.01)
        print("ended", time.monotonic(), flush=True)
    return 0
