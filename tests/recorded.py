"""The records of a sweep that a test looks at, read as a second program would."""

from __future__ import annotations

from pathlib import Path

from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import StudyRecords


def recorded(database: Path | str, name: str) -> StudyRecords:
    """The sweep ``name`` as it is now in a SQLite file or at a URL; fails the test where there is none."""
    store = Store(sqlite_url(database) if isinstance(database, Path) else database, read_only=True)
    try:
        found = store.load(name)
    finally:
        store.close()
    assert found is not None, f"no sweep {name} in {database}"
    return found
