"""The edge that follows a growing log file, feeding a :class:`~lora_tune.mllog.LogReader` from a byte offset."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lora_tune.errors import SurroundingsError
from lora_tune.mllog import LogReader

CHUNK_BYTES = 1 << 20
"""Bytes held at a time."""

POLL_BYTES = 64 << 20
"""Bytes that one call of :meth:`LogTail.poll` reads at most, so that one noisy trial cannot stall the others."""


class LogTail:
    """Follows one log file, which may not exist yet, vanish, be truncated or be replaced while it is followed.

    path: the log. make_reader: makes a fresh reader of its format; called at once, and again whenever the file
    starts over: it became shorter than what was read, or another file took its place (another inode). What was
    read before is forgotten then, since a file that starts over is another attempt's log.
    A file that has vanished keeps what was read; nothing is closed over by an open file between two polls.
    """

    def __init__(self, path: Path, make_reader: Callable[[], LogReader]) -> None:
        self.path = path
        self.reader = make_reader()
        self.offset = 0
        """Bytes read so far from the file that lies there now."""
        self.restarts = 0
        """How often the file started over."""
        self._make_reader = make_reader
        self._identity: tuple[int, int] | None = None

    def poll(self) -> bool:
        """Read what is new, ``POLL_BYTES`` at most, into the reader; tell whether anything was.

        A file that is not there is no error: False. Raises SurroundingsError for one that cannot be read.
        """
        try:
            file = os.open(self.path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            return self._read(file)
        except OSError as error:
            raise self._unreadable(error) from error
        finally:
            os.close(file)

    def _unreadable(self, error: OSError) -> SurroundingsError:
        return SurroundingsError(f"{self.path}: cannot read this log ({error.strerror}); it must be a readable file")

    def _read(self, file: int) -> bool:
        status = os.fstat(file)
        identity = status.st_dev, status.st_ino
        if self._identity not in (None, identity) or status.st_size < self.offset:
            self.reader = self._make_reader()
            self.offset = 0
            self.restarts += 1
        self._identity = identity
        begin, end = self.offset, min(status.st_size, self.offset + POLL_BYTES)
        while self.offset < end:
            chunk = os.pread(file, min(CHUNK_BYTES, end - self.offset), self.offset)
            if not chunk:  # truncated while being read: the next poll starts over
                break
            self.reader.feed(chunk)
            self.offset += len(chunk)
        return self.offset > begin
