"""Whether the SQLite file under a path is still the one that was opened.

An open connection goes on reading and writing a file that somebody has deleted or replaced: nothing fails, and
everything that is written is gone with the process. So each use of a connection looks at the path first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa

from lora_tune.base.errors import DatabaseChangedError

Identity = tuple[int, int]
"""Device and inode."""

_LOG = "identity of the write-ahead log"


class FileGuard:
    """Lets an engine use the file at ``path`` as long as it is the one that the engine's first connection opened.

    The same for its write-ahead log, as long as a connection is open: SQLite itself removes it with the last one.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._log = path, path.with_name(f"{path.name}-wal")
        self._known: Identity | None = None

    def watch(self, engine: sa.Engine) -> None:
        """From now on the engine's connections raise DatabaseChangedError instead of using another file."""
        # Before a connection is made, too: SQLite would make an empty file in place of one that is gone.
        sa.event.listen(engine, "do_connect", lambda *_: self._check_file())
        sa.event.listen(engine, "connect", self._opened)
        sa.event.listen(engine, "checkin", self._used)
        sa.event.listen(engine, "checkout", self._before_use)

    def _opened(self, connection: Any, record: Any) -> None:
        self._known = self._known or _identity(self._path)
        self._used(connection, record)

    def _used(self, _connection: Any, record: Any) -> None:
        record.info[_LOG] = record.info.get(_LOG) or _identity(self._log)

    def _before_use(self, _connection: Any, record: Any, _proxy: Any) -> None:
        self._check_file()
        _check(self._log, record.info.get(_LOG))

    def _check_file(self) -> None:
        _check(self._path, self._known)


def _check(path: Path, known: Identity | None) -> None:
    if known is not None and (identity := _identity(path)) != known:
        what = "was deleted" if identity is None else "was replaced by another file"
        raise DatabaseChangedError(f"{path} {what} while a driver was using it")


def _identity(path: Path) -> Identity | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
