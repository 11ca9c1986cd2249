"""The bond between a sweep's folder and its records: ``sweep.json`` carries the id that the database has.

A log is believed by the folder that it lies in. So a folder is driven only with the records that belong to it, and
each of the ways in which the two come apart is refused with what to do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_tune import store as stores
from lora_tune.base.errors import ForeignFolderError
from lora_tune.base.files import read_json, text_of, write_json
from lora_tune.base.paths import SweepPaths, near
from lora_tune.controller.folder_lock import FolderLock
from lora_tune.store import Changes, Lease
from lora_tune.store.records import StudyRecords, TrialState

ANOTHER = (
    "for another sweep of this study give its file another name (cp STUDY.toml NEW.toml), or use an empty --output "
    "with a database of its own"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderIdentity:
    """What a folder says of itself. sweep: the id of its sweep. database: its URL without a password."""

    sweep: str
    study: str
    database: str


def read_identity(paths: SweepPaths) -> FolderIdentity | None:
    """What the folder says of itself; None where it says nothing, or nothing that can be read."""
    content = read_json(paths.identity).content
    if content is None or not text_of(content, "sweep"):
        return None
    return FolderIdentity(
        sweep=text_of(content, "sweep"), study=text_of(content, "study"), database=text_of(content, "database")
    )


def refuse_foreign(paths: SweepPaths, sweep: StudyRecords | None, database: str) -> None:
    """Raise ForeignFolderError where the folder and the records do not belong together.

    sweep: what the database knows of the study, None where it knows nothing. database: its URL without a password.
    """
    identity = read_identity(paths)
    if identity is not None and (sweep is None or identity.sweep != sweep.id):
        raise ForeignFolderError(_of_other_records(near(paths.root), identity, database))
    placed = Path(sweep.folder) if sweep is not None and sweep.folder else paths.root
    if placed != paths.root:
        assert sweep is not None
        _refuse_other_place(paths, placed, sweep, database, same=identity is not None)
    elif identity is None and (held := _trials_in(paths)) and (sweep is None or not sweep.trials):
        where = near(paths.root)
        raise ForeignFolderError(
            f"{where} holds {held} trials of which {database} knows nothing. Name their database with --storage, or "
            f"move the folder away (mv {where} {where}.old), or use another --output"
        )


def _of_other_records(where: str, identity: FolderIdentity, database: str) -> str:
    return (
        f"{where} belongs to sweep {identity.sweep[:8]} of study {identity.study}, whose records are in "
        f"{identity.database}; {database} does not hold them. To go on with it, put that database back, or name it "
        f"with --storage. To begin anew, move the folder away (mv {where} {where}.old) or use another --output; its "
        f"logs can teach the new sweep (python -m lora_tune.ingest --study {identity.study} LOGS)"
    )


def _refuse_other_place(paths: SweepPaths, placed: Path, sweep: StudyRecords, database: str, *, same: bool) -> None:
    """Raise ForeignFolderError unless the sweep's folder was moved to ``paths`` from ``placed``, and nothing runs.

    same: the folder says that it is the sweep's.
    """
    where = near(paths.root)
    if not same:
        raise ForeignFolderError(
            f"the records of {sweep.name} in {database} belong to {placed}, not to {where}. Go on there (--output "
            f"{placed}), or move that folder here first (mv {placed} {where}); {ANOTHER}"
        )
    if placed.exists() and paths.root.samefile(placed):
        return
    original = read_identity(SweepPaths(placed))
    if original is not None and original.sweep == sweep.id:
        raise ForeignFolderError(
            f"{where} is a copy of {placed}, the folder of sweep {sweep.name}. Go on there (--output {placed}), or "
            f"remove one of the two; {ANOTHER}"
        )
    running = sum(t.state is TrialState.RUNNING for t in sweep.trials.values())
    if running:
        raise ForeignFolderError(
            f"{where} was {placed} when {running} trials were started that are not over, and their jobs write there. "
            f"Move it back (mv {where} {placed}), let them end or cancel them, and then move it"
        )


def _trials_in(paths: SweepPaths) -> int:
    """How many trials have folders here."""
    return sum(1 for _ in paths.trials.glob("*/attempt-*")) if paths.trials.is_dir() else 0


class FencedStore:
    """A driver's records, written only while the folder is the driver's own."""

    def __init__(self, inner: stores.BufferedStore, lock: FolderLock) -> None:
        self._inner, self._lock = inner, lock

    def load(self, name: str, known: StudyRecords | None = None) -> StudyRecords | None:
        """As the store's."""
        return self._inner.load(name, known)

    def save(self, lease: Lease, changes: Changes, now: float) -> None:
        """As the store's. Raises SweepBusyError also when another driver has taken the folder over."""
        self._lock.check()
        self._inner.save(lease, changes, now)

    def rescue(self, path: Path, sweep: StudyRecords, now: float) -> None:
        """As the store's. Raises SweepBusyError as :meth:`save`."""
        self._lock.check()
        self._inner.rescue(path, sweep, now)


@contextlib.contextmanager
def owned(
    paths: SweepPaths, sweep: StudyRecords, database: str, sleep: Callable[[float], None] = time.sleep
) -> Iterator[FolderLock]:
    """The folder, for this driver alone, and marked as that of ``sweep``. sleep: waits while looking at a lock.

    Raises SweepBusyError while another driver works in it, ForeignFolderError where it belongs to another sweep.
    """
    paths.root.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(paths.lock, f"study {sweep.name}, records in {database}")
    lock.take(sleep)
    try:
        refuse_foreign(paths, sweep, database)
        identity = {"sweep": sweep.id, "study": sweep.name, "database": database}
        if read_json(paths.identity).content != identity:
            write_json(paths.identity, identity)
        yield lock
    finally:
        lock.release()
