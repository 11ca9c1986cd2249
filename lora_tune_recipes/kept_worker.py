"""A warm worker that a sweep keeps beside its trials on this machine: libraries are imported once, not once a trial."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lora_tune_recipes.hand_over import VARIABLE

IDLE_SECONDS = 600
"""After so long without a trial the worker ends by itself: its sweep was killed."""
START_SECONDS = 20.0
"""For the socket to be there, which is before the imports; after that trials import by themselves."""


@contextlib.contextmanager
def kept_worker(folder: Path, module: str, python: str | None = None) -> Iterator[None]:
    """A warm worker of ``module`` for the trials that are started within; a worker that somebody named is left alone.

    folder: of the sweep, whose next driver finds a worker that outlived an earlier one. Trials that go on after this
    block keep their worker until they have ended. Without a worker trials import by themselves.
    """
    if os.environ.get(VARIABLE):
        yield
        return
    path = socket_path(folder)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    owner = path.parent.stat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o022:
        yield  # others could answer there in the worker's place: trials import by themselves
        return
    worker = None if _answers(path) else _started(path, folder, module, python or sys.executable)
    os.environ[VARIABLE] = str(path)
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if worker is not None and worker.poll() is None:
            worker.send_signal(signal.SIGUSR1)  # when its last trial has ended, so has it


def socket_path(folder: Path) -> Path:
    """Where the worker of a sweep listens: short, as the names of sockets have to be, and in a folder of this user."""
    place = Path(tempfile.gettempdir()) / f"lora_tune-{os.getuid()}"
    return place / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}.sock"


def _answers(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        return True
    return False


def _started(path: Path, folder: Path, module: str, python: str) -> subprocess.Popen[bytes]:
    path.unlink(missing_ok=True)
    argv = [python, "-m", "lora_tune_recipes.warm_worker", "--socket", str(path), "--idle", str(IDLE_SECONDS), module]
    with (folder / "worker.log").open("ab") as log:
        worker = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        )  # fmt: skip
    until = time.monotonic() + START_SECONDS
    while worker.poll() is None and not path.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return worker
