"""Where a sweep's database is."""

from __future__ import annotations

from lora_tune.base.paths import SweepPaths
from lora_tune.store import Store, sqlite_url


def open_store(paths: SweepPaths, storage: str | None) -> Store:
    """The sweep's database: ``--storage``, or the SQLite file in its folder."""
    return Store(storage or sqlite_url(paths.database))
