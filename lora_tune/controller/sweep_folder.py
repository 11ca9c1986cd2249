"""Ties a sweep's folder to its records: ``sweep.json`` holds the id in the database.

Logs are attributed to trials by their folder. So a folder is used only with its own records, and each way in which the
two can mismatch raises an error with a remedy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lora_tune import store as stores
from lora_tune.base.errors import ForeignFolderError, SetupError, SweepBusyError
from lora_tune.base.files import process_of, read_json, text_of, write_json
from lora_tune.base.host import Process, steady
from lora_tune.base.paths import SweepPaths, display_path
from lora_tune.store import LEASE_SECONDS, Changes, Lease
from lora_tune.store.records import StudyRecords, TrialState

# One driver per folder, across databases and hosts.
#
# ``driver.lock`` names the folder's owner, which touches it every few seconds. Another driver that sees it untouched
# for LEASE_SECONDS, by its own clock, may take it over. So hosts' clocks need not agree, and no lock daemon is needed
# on a network file system. The former owner then finds another token in the file and stops.

LOOK_SECONDS = 0.5
"""Interval between checks of a lock that another driver holds."""

UNSEEN_SECONDS = LEASE_SECONDS / 2
"""An owner that has not touched its lock for so long checks it before it acts, as it may have been taken over."""


@dataclass(frozen=True, slots=True)
class _LockState:
    """Content of a lock file: its owner, and when it was touched, by the file system's clock."""

    token: str
    owner: str
    process: Process
    touched: float


class FolderLock:
    """Exclusive use of one folder by a driver. path: the lock file. about: its description in messages."""

    def __init__(self, path: Path, about: str) -> None:
        self._path, self._about = path, about
        self._token = uuid.uuid4().hex
        self._checked_at = -LEASE_SECONDS
        self._guard = threading.Lock()

    def take(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Acquire the lock, also from a dead owner. Raises SweepBusyError while another driver is active.

        An active owner shows within a few seconds; the lock of one whose host vanished is taken over after
        LEASE_SECONDS.
        """
        first, since = self._look(), steady()
        while (current := self._look()) is not None and not current.process.gone:
            if first is None or (current.token, current.touched) != (first.token, first.touched):
                raise SweepBusyError(self._busy(current))
            if steady() - since >= LEASE_SECONDS:
                break
            sleep(LOOK_SECONDS)
        with _exclusive(self._path) as exclusive:
            now = self._look()
            if now is not None and (current is None or (now.token, now.touched) != (current.token, current.touched)):
                raise SweepBusyError(self._busy(now))
            self._write()
        if not exclusive:
            sleep(2 * LOOK_SECONDS)  # a concurrent writer has finished by now, and the last one owns the lock
        self.touch()

    def touch(self) -> None:
        """Show that the owner is alive. Raises SweepBusyError if another driver has taken over."""
        with self._guard:
            current = self._look()
            if current is None:  # the file was removed; the folder is still ours
                self._write()
            elif current.token != self._token:
                raise SweepBusyError(f"{self._path.parent} was taken over by {current.owner}; this driver stops")
            else:
                os.utime(self._path)
            self._checked_at = steady()

    def check(self) -> None:
        """Raise SweepBusyError unless the folder is ours; reads the file only after a while.

        Raises SetupError if the folder no longer exists.
        """
        if steady() - self._checked_at <= UNSEEN_SECONDS:
            return
        try:
            self.touch()
        except FileNotFoundError as error:
            raise SetupError(
                f"{self._path.parent} was removed while its sweep ran, with the logs of its trials; this driver stops. "
                "End what still runs of its jobs; then put the folder back and rerun the same command to go on, or "
                "rerun it without the folder to begin anew"
            ) from error

    def release(self) -> None:
        """Release the lock, if it is still ours."""
        with self._guard, contextlib.suppress(OSError):
            current = self._look()
            if current is not None and current.token == self._token:
                self._path.unlink()

    def _write(self) -> None:
        process = asdict(Process.of(os.getpid()))
        write_json(self._path, {"token": self._token, "about": self._about, **process})

    def _look(self) -> _LockState | None:
        """The lock, None if there is none; a damaged one has no owner."""
        try:
            touched = self._path.stat().st_mtime
        except FileNotFoundError:
            return None
        content = read_json(self._path).content
        if content is None or not text_of(content, "token"):
            return None
        process = process_of(content)
        owner = f"{process.host} pid {process.pid} ({text_of(content, 'about')})"
        return _LockState(token=text_of(content, "token"), owner=owner, process=process, touched=touched)

    def _busy(self, lock: _LockState) -> str:
        return (
            f"{display_path(self._path.parent)} is in use by {lock.owner}: one folder is driven by one driver at a "
            "time; stop that one first, or use another --output"
        )


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Whether other drivers are locked out while this one reads and writes the lock; False if flock is unsupported."""
    with path.with_name(f"{path.name}.guard").open("a") as guard:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            yield False
            return
        yield True


ANOTHER = (
    "for another sweep of this study give its file another name (cp STUDY.toml NEW.toml), or use an empty --output "
    "with a database of its own"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderIdentity:
    """A folder's ``sweep.json``. sweep: the id of its sweep. database: its URL without a password."""

    sweep: str
    study: str
    database: str


def read_identity(paths: SweepPaths) -> FolderIdentity | None:
    """The folder's identity; None if it is missing or unreadable."""
    content = read_json(paths.identity).content
    if content is None or not text_of(content, "sweep"):
        return None
    return FolderIdentity(
        sweep=text_of(content, "sweep"), study=text_of(content, "study"), database=text_of(content, "database")
    )


def refuse_foreign(paths: SweepPaths, sweep: StudyRecords | None, database: str) -> None:
    """Raise ForeignFolderError if the folder and the records do not belong together.

    sweep: the study's records in the database, None if there are none. database: its URL without a password.
    """
    identity = read_identity(paths)
    if identity is not None and (sweep is None or identity.sweep != sweep.id):
        raise ForeignFolderError(_of_other_records(display_path(paths.root), identity, database))
    placed = Path(sweep.folder) if sweep is not None and sweep.folder else paths.root
    if placed != paths.root:
        assert sweep is not None
        _refuse_other_place(paths, placed, sweep, database, same=identity is not None)
    elif identity is None and (held := _trials_in(paths)) and (sweep is None or not sweep.trials):
        where = display_path(paths.root)
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
    """Raise ForeignFolderError unless the sweep's folder was moved from ``placed`` to ``paths``, and nothing runs.

    same: the folder's identity is the sweep's.
    """
    where = display_path(paths.root)
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
    """The number of attempts with folders here."""
    return sum(1 for _ in paths.trials.glob("*/attempt-*")) if paths.trials.is_dir() else 0


class FencedStore:
    """A driver's records, written only while it owns the folder."""

    def __init__(self, inner: stores.BufferedStore, lock: FolderLock) -> None:
        self._inner, self._lock = inner, lock

    def load(self, name: str, known: StudyRecords | None = None) -> StudyRecords | None:
        """As the store's."""
        return self._inner.load(name, known)

    def save(self, lease: Lease, changes: Changes, now: float) -> None:
        """As the store's. Raises SweepBusyError also if another driver has taken over the folder."""
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
    """Lock the folder for this driver, and mark it as that of ``sweep``. sleep: waits between checks of a lock.

    Raises SweepBusyError while another driver uses it, ForeignFolderError if it belongs to another sweep.
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
