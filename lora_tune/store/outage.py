"""Changes that the database could not save, kept on disk until it can; and the save count of a sweep's folder."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_tune.base.errors import StoreError
from lora_tune.base.files import read_json, text_of, whole_of, write_json
from lora_tune.logs.run import Eval
from lora_tune.store import records
from lora_tune.store.database import Store
from lora_tune.store.engine import safe_url
from lora_tune.store.port import Lease
from lora_tune.store.records import Changes, StudyRecords


class BufferedStore:
    """A store for one driver that writes unsaved changes to ``path``.

    The file has one JSON object per line and is deleted once everything is in the database. :meth:`save` still raises
    StoreError, so that the driver knows that other drivers cannot see its intentions, and submits nothing.
    """

    def __init__(self, inner: Store, path: Path) -> None:
        self._inner, self._path = inner, path
        self._noted: dict[tuple[Any, ...], Any] = {}  # content of the file, by record
        self._torn = True  # the file's last line may be incomplete
        self._saved_at = time.monotonic()

    def renew(self, lease: Lease, now: float) -> None:
        """Renew the lease without writing. Raises SweepBusyError if it is lost, StoreError."""
        self._inner.save(lease, Changes(), now)

    def idle_seconds(self) -> float:
        """Seconds since the last :meth:`save`."""
        return time.monotonic() - self._saved_at

    def load(self, name: str, known: StudyRecords | None = None) -> StudyRecords | None:
        """See Store.load."""
        return self._inner.load(name, known)

    def save(self, lease: Lease, changes: Changes, now: float) -> None:
        """See Store.save; on StoreError, ``changes`` are on disk before the error is raised."""
        self._saved_at = time.monotonic()
        try:
            self._inner.save(lease, changes, now)
        except StoreError as error:
            try:
                self._note(lease, changes)
            except OSError as second:
                raise StoreError(
                    f"{error}; {self._path} cannot be written either ({second.strerror}): until one of them can, "
                    "what is new is in memory and in the jobs' logs"
                ) from error
            raise
        if self._noted:
            self._path.unlink(missing_ok=True)
            self._noted = {}

    def rescue(self, path: Path, sweep: StudyRecords, now: float) -> None:
        """See Store.rescue."""
        self._inner.rescue(path, sweep, now)

    def recover(self, lease: Lease, now: float) -> str:
        """Save what an earlier driver left in the file; returns a sentence about it, "" if there was nothing.

        If another driver has written since, the file is obsolete and is renamed.
        """
        if not self._path.exists():
            return ""
        token, changes, damaged = read(self._path)
        if token < self._inner.wrote(lease.sweep):
            aside = self._path.with_name(f"{self._path.name}.{token}")
            self._path.replace(aside)
            return f"another driver has written since {aside} was made; it is set aside"
        self._inner.save(lease, changes, now)
        self._path.unlink()
        cut = f", {damaged} damaged lines left out" if damaged else ""
        return f"saved what an earlier driver could not: {len(changes.trials)} trial changes{cut}"

    def _note(self, lease: Lease, changes: Changes) -> None:
        latest = dict(_keyed(changes))
        new = {key: record for key, record in latest.items() if self._noted.get(key) != record}
        if not new:
            return
        lines = [json.dumps({"token": lease.token, key[0]: _plain(record)}) for key, record in new.items()]
        # Terminate a line that a full disk truncated, so that it spoils no other.
        text = ("\n" if self._torn and self._path.exists() else "") + "\n".join(lines) + "\n"
        self._torn = True
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self._torn = False
        self._noted |= new


def read(path: Path) -> tuple[int, Changes, int]:
    """Token of the file's last driver, its changes, and the number of unreadable lines."""
    token, damaged = 0, 0
    changes: list[Changes] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line:
            continue
        try:
            content = json.loads(line)
            by = int(content.pop("token"))
            ((kind, record),) = content.items()
            changes.append(_checked(_changes(kind, record)))
            token = by
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            damaged += 1
    trials = tuple(t for c in changes for t in c.trials)
    attempts = tuple(a for c in changes for a in c.attempts)
    return token, Changes(trials, attempts, tuple(e for c in changes for e in c.evals)), damaged


def _keyed(changes: Changes) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every record by kind and key; in a dictionary the last version of a record wins."""
    for trial in changes.trials:
        yield ("trial", trial.number), trial
    for attempt in changes.attempts:
        yield ("attempt", attempt.trial, attempt.number), attempt
    for point in changes.evals:
        yield ("eval", *point[:3]), point


def _plain(record: Any) -> Any:
    if isinstance(record, tuple):
        return [*record[:3], *record[3]]
    return records.to_json(record)


def _checked(changes: Changes) -> Changes:
    """The changes, if their keys are valid. Raises ValueError."""
    keys = [part for a in changes.attempts for part in (a.trial, a.number)] + [t.number for t in changes.trials]
    keys += [part for point in changes.evals for part in point[:3]]
    if not all(isinstance(key, int) and not isinstance(key, bool) and 0 <= key < 2**31 for key in keys):
        raise ValueError("a record without a number")
    return changes


def _changes(kind: str, record: Any) -> Changes:
    if kind == "trial":
        return Changes(trials=(records.trial_from(record),))
    if kind == "attempt":
        return Changes(attempts=(records.attempt_from(record),))
    trial, attempt, position, *point = record
    return Changes(evals=((trial, attempt, position, Eval(*point)),))


# The save count of a sweep, kept also in its folder, to detect a restored older database.


class SaveCount:
    """The save count of the sweep ``name``, in ``store`` and in the file ``path``.

    The database is synced before the file is written, so a power failure never leaves the file ahead of it.
    """

    def __init__(self, store: Store, name: str, path: Path) -> None:
        self._store, self._name, self._path = store, name, path
        self._sweep = ""

    def refuse_older(self) -> None:
        """Raise StoreError if the database has fewer saves than the folder records."""
        self._sweep, saves = self._store.saves(self._name)
        if (stored := self._stored_saves()) <= saves:
            return
        raise StoreError(
            f"the database {safe_url(self._store.url)} is older than this folder: it was written to {saves} times for "
            f"{self._name}, and {self._path} says {stored}. It was restored from a backup or rolled back, and does not "
            "know what ran since. Put the newer database back, or rescued.db where a driver has left one; or, to go on "
            f"from the older one and run what it does not know again, remove {self._path}"
        )

    def note(self) -> None:
        """Record this process's save count in the folder."""
        saves = self._store.counted(self._name)
        if saves > self._stored_saves():
            with contextlib.suppress(OSError):  # a full disk keeps the earlier count
                write_json(self._path, {"sweep": self._sweep, "saves": saves})

    def _stored_saves(self) -> int:
        """The count in the file; 0 if it has none for this sweep."""
        noted = read_json(self._path).content or {}
        return (whole_of(noted, "saves") or 0) if text_of(noted, "sweep") == self._sweep else 0
