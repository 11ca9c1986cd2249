"""The edge that follows a growing log file, feeding a :class:`~lora_tune.logs.run.LogReader` from a byte offset."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from lora_tune.base.errors import SetupError
from lora_tune.logs.run import LogReader

CHUNK_BYTES = 1 << 20
"""Bytes held at a time."""

POLL_BYTES = 16 << 20
"""Bytes that one call of :meth:`LogTail.poll` reads at most, so that one noisy trial cannot stall the others."""

SEAM_BYTES = 64
"""Bytes before the offset that must be the same at the next poll: a file may be truncated and grow again in between."""


class LogTail:
    """Follows one log file, which may not exist yet, vanish, be truncated or be replaced while it is followed.

    path: the log. make_reader: makes a fresh reader of its format; called at once, and again whenever the file
    starts over: it became shorter than what was read, its last bytes read are others now, or another file took its
    place. What was read before is forgotten then, since a file that starts over is another attempt's log.
    A file that has vanished leaves what was read. No file stays open between two polls.
    """

    def __init__(self, path: Path, make_reader: Callable[[], LogReader]) -> None:
        self.path = path
        self.reader = make_reader()
        self.offset = 0
        """Bytes read so far from the file that lies there now."""
        self.size = 0
        """Its length when it was read last."""
        self.restarts = 0
        """How often the file started over."""
        self._make_reader = make_reader
        self._identity: tuple[int, int] | None = None
        self._seam = b""  # the last bytes read

    def poll(self, limit: int = POLL_BYTES) -> int:
        """Read what is new, ``limit`` and ``POLL_BYTES`` at most, into the reader; tell how many bytes that were.

        A file that is not there is no error: 0. Raises SetupError for one that cannot be read.
        """
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place must not stop the driver
            try:
                return self._read(file, min(limit, POLL_BYTES))
            finally:
                os.close(file)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                return 0
            raise SetupError(
                f"{self.path}: cannot read this log ({error.strerror}); it must be a file that this user may read"
            ) from error

    @property
    def deleted(self) -> bool:
        """Whether no file is there; asked of a job that is over, which had one, whoever read it then."""
        return not self.path.exists()

    def _read(self, file: int, limit: int) -> int:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise SetupError(f"{self.path}: this log is not a regular file; remove it, so that the trial can write one")
        if self._starts_over(file, status):
            self.reader = self._make_reader()
            self.offset = 0
            self.restarts += 1
            self._seam = b""
        self._identity, self.size = (status.st_dev, status.st_ino), status.st_size
        begin, end = self.offset, min(status.st_size, self.offset + limit)
        while self.offset < end:
            chunk = os.pread(file, min(CHUNK_BYTES, end - self.offset), self.offset)
            if not chunk:  # truncated while being read: the next poll starts over
                break
            self.reader.feed(chunk)
            self.offset += len(chunk)
            self._seam = (self._seam + chunk[-SEAM_BYTES:])[-SEAM_BYTES:]
        return self.offset - begin

    def _starts_over(self, file: int, status: os.stat_result) -> bool:
        if self._identity not in (None, (status.st_dev, status.st_ino)):
            return True
        if status.st_size == self.offset:  # nothing new: the common case costs no read
            return False
        return os.pread(file, len(self._seam), self.offset - len(self._seam)) != self._seam
