"""What becomes of a driver's memory when its database is not the one any more that it wrote to."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from lora_tune import store as stores
from lora_tune.base.errors import DatabaseChangedError, SetupError
from lora_tune.base.files import sync_folder
from lora_tune.store import Records
from lora_tune.store.port import Request
from lora_tune.store.records import StudyRecords


def still_there(store: stores.Store, sweep: StudyRecords, requests: Sequence[Request], path: Path, now: float) -> None:
    """The last look of a driver that is about to end: what it wrote is in the sweep's database.

    requests: what people asked of the sweep. Raises SetupError where the database was deleted, exchanged or set
    back meanwhile, after keeping the sweep at ``path``.
    """
    try:
        store.refuse_set_back(sweep.name)
    except DatabaseChangedError as error:
        rescue = Rescue(path, store)
        rescue.keep(str(error), sweep, requests, now)
        raise SetupError(rescue.advice) from error


class Rescue:
    """Keeps a sweep in a fresh SQLite database at ``path`` from the moment on when its own cannot be trusted.

    lost: what happened to the sweep's own database, "" while nothing did.
    """

    def __init__(self, path: Path, store: Records) -> None:
        self._path, self._store = path, store
        self.lost = ""

    def keep(self, lost: str, sweep: StudyRecords, requests: Sequence[Request], now: float) -> None:
        """Write the whole sweep, in place of what was kept before. Raises StoreError or OSError; what was kept stays.

        lost: what happened to its database, a sentence. requests: what people asked, with the answers.
        """
        self.lost = lost
        partial = self._path.with_name(f"{self._path.name}.partial")
        self._store.rescue(partial, sweep, now)
        with contextlib.closing(stores.Store(stores.sqlite_url(partial))) as fresh:
            stores.Requests(fresh, sweep.name).copy_in(requests)
        partial.replace(self._path)
        sync_folder(self._path.parent)

    def forget(self) -> None:
        """The sweep's own database is back, and holds what it did."""
        if self.lost:
            self._path.unlink(missing_ok=True)
        self.lost = ""

    @property
    def advice(self) -> str:
        """What happened and what a person can do, a sentence."""
        return (
            f"{self.lost}; nothing is written there any more, running jobs are watched to their end, and all records "
            f"are in {self._path}. To go on: stop this command, put the database back or copy {self._path.name} into "
            "its place (or name it with --storage), and run the same command again; a team's database takes them back "
            "with --merge-rescued"
        )
