"""The recipe's side of the warm worker (``warm_worker``); imports only the standard library, to start at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_tune.base.errors import SetupError

VARIABLE = "LORA_TUNE_WORKER"
"""Variable with the path of the worker's socket."""
HEADER = struct.Struct("!I")
FILES = 2
"""Open files sent with a request: stdout and stderr."""


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """A trial to run: ``module.main()`` under ``environment`` in the folder ``cwd``."""

    module: str
    environment: dict[str, str]
    cwd: str


def submit_to_worker(module: str) -> int | None:
    """Run ``module.main()`` in the worker of the environment and return its exit code; None without a worker.

    A worker that does not answer is reported on standard error, and None lets the caller run the trial itself.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        sys.stdout.flush()
        environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
        send(connection, TrialRequest(module, environment, str(Path.cwd())), [1, 2])
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


def send(connection: socket.socket, request: TrialRequest, files: Sequence[int]) -> None:
    """Send a request and these open files. Raises OSError if there is no receiver."""
    body = {"module": request.module, "environment": request.environment, "cwd": request.cwd}
    text = json.dumps(body).encode()
    socket.send_fds(connection, [HEADER.pack(len(text))], files)
    connection.sendall(text)


def receive(connection: socket.socket) -> tuple[TrialRequest, list[int]]:
    """A request and the open files sent with it. Raises OSError or ValueError for anything else."""
    header, files, _, _ = socket.recv_fds(connection, HEADER.size, FILES)
    try:
        if len(header) < HEADER.size:
            raise ValueError("no request")
        body = json.loads(connection.recv(HEADER.unpack(header)[0], socket.MSG_WAITALL))
        return TrialRequest(body["module"], body["environment"], body["cwd"]), files
    except (OSError, ValueError, LookupError, TypeError) as error:
        for file in files:
            os.close(file)
        raise ValueError(f"{type(error).__name__}: {error}") from error
