"""Waiting for a condition, bounded: no test sleeps for a time."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_for(condition: Callable[[], Found], seconds: float = 20.0, what: str = "") -> Found:
    """Call ``condition`` until it is true and return what it gave; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        time.sleep(0.02)


def wait_until_hung_up(client: socket.socket, piece: bytes) -> None:
    """Send ``piece`` again and again until the server takes no more."""

    def refused() -> bool:
        try:
            client.sendall(piece)
        except OSError:
            return True
        return False

    wait_for(refused, what="the server hangs up")
