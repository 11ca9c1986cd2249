"""Where a sweep's database is."""

from __future__ import annotations

from lora_tune import store as stores
from lora_tune.base.paths import SweepPaths


def open_store(paths: SweepPaths, storage: str | None) -> stores.Store:
    """The sweep's database: ``--storage``, or the SQLite file in its folder."""
    return stores.Store(storage or stores.sqlite_url(paths.database))
