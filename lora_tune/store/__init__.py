"""Our tables beside Optuna's, in one database: SQLite on a local disk, or PostgreSQL for a team."""

from __future__ import annotations

from lora_tune.store.buffer import BufferedStore
from lora_tune.store.database import Store
from lora_tune.store.engine import full_url, has_password, safe_url, server_version, sqlite_url, tune_sqlite
from lora_tune.store.port import Held, Lease, Records, Registered
from lora_tune.store.rows import Changes
from lora_tune.store.save_count import SaveCount
from lora_tune.store.schema import LEASE_SECONDS, SCHEMA_VERSION

__all__ = [
    "LEASE_SECONDS",
    "SCHEMA_VERSION",
    "BufferedStore",
    "Changes",
    "Held",
    "Lease",
    "Records",
    "Registered",
    "SaveCount",
    "Store",
    "full_url",
    "has_password",
    "safe_url",
    "server_version",
    "sqlite_url",
    "tune_sqlite",
]
