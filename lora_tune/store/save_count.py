"""How often a sweep's database was written to, noted in the sweep's folder, by which an older database is known."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lora_tune.base.errors import StoreError
from lora_tune.base.small_files import read_json, text_of, whole_of, write_json
from lora_tune.store.database import Store
from lora_tune.store.engine import safe_url


class SaveCount:
    """The count of saves of the sweep ``name``, in ``store`` and in the file ``path`` of its folder.

    The database is synced before the file is written, so a power cut never leaves the file ahead of it.
    """

    def __init__(self, store: Store, name: str, path: Path) -> None:
        self._store, self._name, self._path = store, name, path
        self._sweep = ""

    def refuse_older(self) -> None:
        """Raise StoreError where the database knows less than a driver of this folder has written into it."""
        self._sweep, saves = self._store.saves(self._name)
        if (seen := self._seen()) <= saves:
            return
        raise StoreError(
            f"the database {safe_url(self._store.url)} is older than this folder: it was written to {saves} times for "
            f"{self._name}, and {self._path} says {seen}. It was restored from a backup or rolled back, and does not "
            "know what ran since. Put the newer database back, or rescued.db where a driver has left one; or, to go on "
            f"from the older one and run what it does not know again, remove {self._path}"
        )

    def note(self) -> None:
        """Write down how often this process has written to the database, whatever has become of it since."""
        saves = self._store.counted(self._name)
        if saves > self._seen():
            with contextlib.suppress(OSError):  # a full disk: what was noted before stays
                write_json(self._path, {"sweep": self._sweep, "saves": saves})

    def _seen(self) -> int:
        """What the file says of this sweep; 0 where it says nothing."""
        noted = read_json(self._path).content or {}
        return (whole_of(noted, "saves") or 0) if text_of(noted, "sweep") == self._sweep else 0
