"""A backup of a sweep's SQLite file that is put back over what was written since."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def set_back(database: Path) -> Iterator[None]:
    """What is written within is undone at the end, as sqlite3's .restore does it: no name and no inode changes."""
    with (
        contextlib.closing(sqlite3.connect(database)) as now,
        contextlib.closing(sqlite3.connect(":memory:")) as backup,
    ):
        now.backup(backup)
        yield
        backup.backup(now)
