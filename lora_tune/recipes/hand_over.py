"""The recipe's side of the warm worker (``warm_worker``): only the standard library, so that a trial starts at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from pathlib import Path

from lora_tune.base.errors import SetupError

VARIABLE = "LORA_TUNE_WORKER"
"""Names the worker's socket in the environment of a recipe."""
HEADER = struct.Struct("!I")


def hand_over(module: str) -> int | None:
    """Run ``module.main()`` in the worker that the environment names and return its exit code; None without a worker.

    A worker that does not answer is named on standard error, and None lets the caller run the trial itself.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        _send_request(connection, module)
    except OSError as error:
        print(f"{VARIABLE}={path!r}: no worker answers ({error}); this trial imports by itself", file=sys.stderr)
        return None
    with connection:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda n, _: connection.sendall(bytes([n])))
        answer = connection.recv(HEADER.size, socket.MSG_WAITALL)
    if len(answer) < HEADER.size:
        print(f"{VARIABLE}={path!r}: the worker died; its trials died with it", file=sys.stderr)
        return SetupError.exit_code
    return int(HEADER.unpack(answer)[0])


def _send_request(connection: socket.socket, module: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
    body = json.dumps({"module": module, "environment": environment, "cwd": str(Path.cwd())}).encode()
    sys.stdout.flush()
    socket.send_fds(connection, [HEADER.pack(len(body))], [1, 2])
    connection.sendall(body)
