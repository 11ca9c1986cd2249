"""Writing a sweep down: what the database has not taken waits here, and what it lost goes into a fresh one."""

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

# What becomes of a driver's memory when its database is not the one any more that it wrote to.


def check_store(store: stores.Store, sweep: StudyRecords, requests: Sequence[Request], path: Path, now: float) -> None:
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
        self.database_error = ""

    def keep(self, database_error: str, sweep: StudyRecords, requests: Sequence[Request], now: float) -> None:
        """Write the whole sweep, in place of what was kept before. Raises StoreError or OSError; what was kept stays.

        lost: what happened to its database, a sentence. requests: what people asked, with the answers.
        """
        self.database_error = database_error
        partial = self._path.with_name(f"{self._path.name}.partial")
        self._store.rescue(partial, sweep, now)
        with contextlib.closing(stores.Store(stores.sqlite_url(partial))) as fresh:
            stores.Requests(fresh, sweep.name).copy_in(requests)
        partial.replace(self._path)
        sync_folder(self._path.parent)

    def forget(self) -> None:
        """The sweep's own database is back, and holds what it did."""
        if self.database_error:
            self._path.unlink(missing_ok=True)
        self.database_error = ""

    @property
    def advice(self) -> str:
        """What happened and what a person can do, a sentence."""
        return (
            f"{self.database_error}; nothing is written there any more, running jobs are watched to their end, and all "
            f"records are in {self._path}. To go on: stop this command, put the database back or copy "
            f"{self._path.name} into its place (or name it with --storage), and run the same command again; a team's "
            "database takes them back with --merge-rescued"
        )


# ``driver.log``: what the driver did and why, one JSON object a line.


KEPT_LINES = 1000
"""Lines that wait in memory while the disk takes none; the oldest go first, and their number is written down."""


class EventFile:
    """Appends to a file; secrets in texts are hidden. A full disk does not stop who writes: lines wait for room."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[str] = deque()
        self._dropped = 0
        path.open("a", encoding="utf-8").close()  # a folder that cannot be written is said at once

    def write(self, now: float, event: str, **facts: Any) -> None:
        """One line: the time in epoch seconds, the event's name, and its facts."""
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
    """Append all of ``text``, or nothing: False where the disk takes none, which the driver says by itself."""
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


# What the driver says: to its log, and to whoever watches.


class EventLog:
    """Both at one time. path: the log. show: told each text. now: epoch seconds."""

    def __init__(self, path: Path, show: Callable[[str], None], now: Callable[[], float]) -> None:
        self._journal, self._show, self._now = EventFile(path), show, now
        self._troubles: dict[str, str] = {}

    def log(self, event: str, **facts: Any) -> None:
        """To the log only."""
        self._journal.write(self._now(), event, **facts)

    def note(self, text: str, event: str, *, shown: str = "", **facts: Any) -> None:
        """An event, in words. shown: what is said to who watches, where that is not the whole text."""
        self.log(event, **facts, text=text)
        self._show(shown or text)

    def warn_once(self, about: str, text: str, *, kind: str = "") -> None:
        """Trouble that may last is said when it begins or changes, not every tick. "": it is over.

        kind: what makes it another trouble, where its words grow with what is seen; the text itself by default.
        """
        known = text and (kind or text)
        if text and known != self._troubles.get(about):
            self.note(text, "trouble")
        self._troubles[about] = known


class SweepRecords:
    """One sweep in the database, written under a lease.

    away: the database took nothing when it was last asked, at ``asked_at`` (epoch seconds). sweep: the records as they
    are, a live view. requests: what people asked, as far as the driver has read it.
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
        """What to do where the database has lost the sweep; "" while it has not."""
        return self._rescue.advice if self._rescue.database_error else ""

    def save(self, changes: Changes) -> bool:
        """Whether everything is on record. Raises SweepBusyError when the lease is lost."""
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
        """All that is known goes into a fresh database: the sweep's own was deleted, replaced or set back."""
        try:
            self._rescue.keep(str(error), self._sweep, self._requests(), self._now())
        except (StoreError, OSError) as second:
            self._events.warn_once("database", f"{error}; {second}: what is known is in memory only")
            return
        self._events.warn_once("database", self._rescue.advice)
