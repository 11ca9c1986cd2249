"""What the package's checkers say: they speak through the root logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Collector(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage().strip())


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is said to the root logger meanwhile; its own handlers hear nothing of it, and none is installed."""
    root, collector = logging.getLogger(), _Collector()
    before = root.handlers[:]
    root.handlers[:] = [collector]
    try:
        yield collector.messages
    finally:
        root.handlers[:] = before
