"""A sweep's warm worker on this machine, so that libraries are imported once instead of once per trial."""

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

from lora_tune_recipes.worker_request import VARIABLE

IDLE_SECONDS = 600
"""Idle time after which the worker ends, in case its sweep was killed."""
START_SECONDS = 20.0
"""Time for the socket to appear, which precedes the imports; after that trials import by themselves."""


@contextlib.contextmanager
def kept_worker(folder: Path, module: str, python: str | None = None) -> Iterator[None]:
    """Run a warm worker of ``module`` for the trials started within; an already configured worker is used as it is.

    folder: of the sweep; its next driver reuses a worker that outlived the last one. Trials that outlive this block
    keep their worker until they end. Without a worker trials import by themselves.
    """
    if os.environ.get(VARIABLE):
        yield
        return
    path = socket_path(folder)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    owner = path.parent.stat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o022:
        yield  # other users could impersonate the worker there, so trials import by themselves
        return
    worker = None if _answers(path) else _started(path, folder, module, python or sys.executable)
    os.environ[VARIABLE] = str(path)
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if worker is not None and worker.poll() is None:
            worker.send_signal(signal.SIGUSR1)  # it ends with its last trial


def socket_path(folder: Path) -> Path:
    """Path of the socket of a sweep's worker: short, because socket paths are limited, and in this user's folder."""
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
