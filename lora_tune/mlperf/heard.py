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
    """What is said to the root logger meanwhile; its own handlers hear nothing of it, and none is installed.

    Heard too where the caller has switched logging off: the words are part of a verdict.
    """
    root, collector = logging.getLogger(), _Collector()
    before, level, disabled = root.handlers[:], root.level, logging.root.manager.disable
    root.handlers[:] = [collector]
    root.setLevel(logging.WARNING)
    logging.disable(logging.NOTSET)
    try:
        yield collector.messages
    finally:
        logging.disable(disabled)
        root.setLevel(level)
        root.handlers[:] = before
