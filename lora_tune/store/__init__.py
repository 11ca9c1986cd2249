"""Database tables of sweeps beside Optuna's: SQLite on a local disk, or PostgreSQL for a team.

Names are imported on first use: SQLAlchemy is slow to import, and many commands open no database.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_tune.base.paths import SweepPaths
    from lora_tune.store.database import Store
    from lora_tune.store.engine import full_url, has_password, safe_url, server_version, sqlite_url, tune_sqlite
    from lora_tune.store.outage import BufferedStore, SaveCount
    from lora_tune.store.port import LEASE_SECONDS, Held, Lease, Records, Registered
    from lora_tune.store.records import Changes
    from lora_tune.store.requests import Remarks, Requests
    from lora_tune.store.schema import SCHEMA_VERSION

__all__ = [
    "LEASE_SECONDS",
    "SCHEMA_VERSION",
    "BufferedStore",
    "Changes",
    "Held",
    "Lease",
    "Records",
    "Registered",
    "Remarks",
    "Requests",
    "SaveCount",
    "Store",
    "full_url",
    "has_password",
    "open_store",
    "safe_url",
    "server_version",
    "sqlite_url",
    "tune_sqlite",
]

_LAZY = {
    "BufferedStore": "outage",
    "Changes": "records",
    "Remarks": "requests",
    "Requests": "requests",
    "SCHEMA_VERSION": "schema",
    "SaveCount": "outage",
    "Store": "database",
    **dict.fromkeys(("LEASE_SECONDS", "Held", "Lease", "Records", "Registered"), "port"),
    **dict.fromkeys(("full_url", "has_password", "safe_url", "server_version", "sqlite_url", "tune_sqlite"), "engine"),
}
"""Name -> its module in this package."""


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def open_store(paths: SweepPaths, storage: str | None) -> Store:
    """The sweep's database: ``--storage``, or the SQLite file in its folder."""
    from lora_tune.store.database import Store
    from lora_tune.store.engine import sqlite_url

    return Store(storage or sqlite_url(paths.database))
