"""Saves a sweep: changes wait here during a database outage, and a lost database is replaced by a new one."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lora_tune import store as stores
from lora_tune.base.errors import DatabaseChangedError, SetupError, StoreError
from lora_tune.base.files import sync_folder
from lora_tune.base.paths import SweepPaths
from lora_tune.logs.failures import redact
from lora_tune.store import Changes, Lease
from lora_tune.store.port import Records, Request
from lora_tune.store.records import StudyRecords

# What happens to a driver's records if its database was replaced or reset.


def check_store(store: stores.Store, sweep: StudyRecords, requests: Sequence[Request], path: Path, now: float) -> None:
    """Final check of a driver: its records are in the sweep's database.

    requests: users' requests to the sweep. Raises SetupError if the database was deleted, replaced or reset, after
    saving the sweep at ``path``.
    """
    try:
        store.refuse_set_back(sweep.name)
    except DatabaseChangedError as error:
        rescue = Rescue(path, store)
        rescue.keep(str(error), sweep, requests, now)
        raise SetupError(rescue.advice) from error


class Rescue:
    """Saves a sweep to a new SQLite database at ``path`` once its own can no longer be trusted.

    database_error: what happened to the sweep's own database, "" while it is fine.
    """

    def __init__(self, path: Path, store: Records) -> None:
        self._path, self._store = path, store
        self.database_error = ""

    def keep(self, database_error: str, sweep: StudyRecords, requests: Sequence[Request], now: float) -> None:
        """Write the whole sweep, replacing the previous copy. Raises StoreError or OSError, keeping that copy.

        database_error: what happened to its database, a sentence. requests: users' requests, with the answers.
        """
        self.database_error = database_error
        partial = self._path.with_name(f"{self._path.name}.partial")
        self._store.rescue(partial, sweep, now)
        with contextlib.closing(stores.Store(stores.sqlite_url(partial))) as fresh:
            stores.Requests(fresh, sweep.name).copy_in(requests)
        partial.replace(self._path)
        sync_folder(self._path.parent)

    def forget(self) -> None:
        """Delete the copy, because the sweep's own database is back and complete."""
        if self.database_error:
            self._path.unlink(missing_ok=True)
        self.database_error = ""

    @property
    def advice(self) -> str:
        """What happened and what a user can do, as a sentence."""
        return (
            f"{self.database_error}; nothing is written there any more, running jobs are watched to their end, and all "
            f"records are in {self._path}. To go on: stop this command, put the database back or copy "
            f"{self._path.name} into its place (or name it with --storage), and run the same command again; a team's "
            "database takes them back with --merge-rescued"
        )


# ``driver.log``: the driver's actions and reasons, one JSON object per line.


KEPT_LINES = 1000
"""Most lines kept in memory while the disk is full; the oldest are dropped, and their number is logged."""


class EventFile:
    """Appends to a file, with secrets hidden. A full disk does not stop the writer: lines wait for space."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[str] = deque()
        self._dropped = 0
        path.open("a", encoding="utf-8").close()  # fail at once if the folder is not writable

    def write(self, now: float, event: str, **facts: Any) -> None:
        """Write one line: the time in epoch seconds, the event's name, and its facts."""
        clean = {key: redact(value) if isinstance(value, str) else value for key, value in facts.items()}
        self._waiting.append(_line({"at": round(now, 3), "event": event, **clean}))
        if len(self._waiting) > KEPT_LINES:
            self._waiting.popleft()
            self._dropped += 1
        database_error = (
            [_line({"at": round(now, 3), "event": "lines lost", "count": self._dropped})] if self._dropped else []
        )
        if _append(self._path, "".join([*database_error, *self._waiting])):
            self._waiting.clear()
            self._dropped = 0


def _append(path: Path, text: str) -> bool:
    """Append all of ``text``, or nothing: False if the disk is full, which the driver reports elsewhere."""
    before = -1
    try:
        with path.open("ab") as file:
            before = file.tell()
            file.write(text.encode("utf-8", errors="backslashreplace"))
    except OSError:
        with suppress(OSError):
            if before >= 0:
                os.truncate(path, before)
        return False
    return True


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"


# Output of the driver, to its log and to the screen.


class EventLog:
    """Writes to log and screen. path: the log. show: called with each text. now: epoch seconds."""

    def __init__(self, path: Path, show: Callable[[str], None], now: Callable[[], float]) -> None:
        self._journal, self._show, self._now = EventFile(path), show, now
        self._troubles: dict[str, str] = {}

    def log(self, event: str, **facts: Any) -> None:
        """Write to the log only."""
        self._journal.write(self._now(), event, **facts)

    def note(self, text: str, event: str, *, shown: str = "", **facts: Any) -> None:
        """Report an event. shown: a shorter text for the screen."""
        self.log(event, **facts, text=text)
        self._show(shown or text)

    def warn_once(self, about: str, text: str, *, kind: str = "") -> None:
        """Report lasting trouble only when it begins or changes, not every tick. "": it is over.

        kind: identifies the trouble if its text keeps changing; by default the text itself.
        """
        known = text and (kind or text)
        if text and known != self._troubles.get(about):
            self.note(text, "trouble")
        self._troubles[about] = known


class SweepRecords:
    """One sweep in the database, written under a lease.

    away: the database was unavailable at the last query, at ``queried_at`` (epoch seconds). sweep: the present records,
    a live view. requests: users' requests, as far as the driver has read them.
    """

    def __init__(
        self,
        store: Records,
        lease: Lease,
        sweep: StudyRecords,
        paths: SweepPaths,
        events: EventLog,
        now: Callable[[], float],
        requests: Callable[[], Sequence[Request]],
    ) -> None:
        self._store, self._lease, self._sweep, self._events, self._now = store, lease, sweep, events, now
        self._requests = requests
        self._rescue = Rescue(paths.rescued, store)
        self.unsaved = Changes()
        self.away = False
        self.queried_at = -math.inf

    @property
    def database_error(self) -> str:
        """What to do if the database has lost the sweep; "" if it has not."""
        return self._rescue.advice if self._rescue.database_error else ""

    def save(self, changes: Changes) -> bool:
        """Save changes; returns whether all are saved. Raises SweepBusyError if the lease is lost."""
        self.unsaved = self.unsaved + changes
        try:
            self._store.save(self._lease, self.unsaved, self._now())
        except DatabaseChangedError as error:
            if changes or not self._rescue.database_error:
                self._keep_elsewhere(error)
            self.away = True
            return False
        except StoreError as error:
            sentence = f"{error}; continuing, {len(self.unsaved.trials)} trial changes wait to be written"
            self._events.warn_once("database", sentence)
            self.away = True
            return False
        finally:
            self.queried_at = self._now()
        self._events.warn_once("database", "")
        self._rescue.forget()
        self.unsaved, self.away = Changes(), False
        return True

    def _keep_elsewhere(self, error: DatabaseChangedError) -> None:
        """Save everything to a new database, because the sweep's own was deleted, replaced or reset."""
        try:
            self._rescue.keep(str(error), self._sweep, self._requests(), self._now())
        except (StoreError, OSError) as second:
            self._events.warn_once("database", f"{error}; {second}: what is known is in memory only")
            return
        self._events.warn_once("database", self._rescue.advice)
