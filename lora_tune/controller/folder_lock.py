"""One driver a folder, whatever databases drivers write to and whatever hosts they run on.

``driver.lock`` says whose the folder is. Its owner touches it every few seconds. Whoever sees it untouched for
LEASE_SECONDS, by a clock of its own, may take it over, so hosts' clocks need not agree, and no lock daemon is needed on
a network file system. An owner that was overtaken sees another token in the file and stops.
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
from dataclasses import dataclass
from pathlib import Path

from lora_tune.base.errors import SetupError, SweepBusyError
from lora_tune.base.files import read_json, text_of, whole_of, write_json
from lora_tune.base.host import boot, host, place, start_ticks, steady
from lora_tune.base.paths import near
from lora_tune.store import LEASE_SECONDS

LOOK_SECONDS = 0.5
"""Between two looks at a lock that somebody else holds."""

UNSEEN_SECONDS = LEASE_SECONDS / 2
"""An owner that did not touch its lock for so long looks at it before it acts again: it may have been overtaken."""


@dataclass(frozen=True, slots=True)
class _SeenLock:
    """A lock as it lies there: whose, and when it was touched, by the file system's clock."""

    token: str
    owner: str
    pid: int
    start: int | None
    boot: str
    host: str
    place: str
    touched: float

    @property
    def gone(self) -> bool:
        """Whether its owner was a process of this host and is no more; a place of its own is another host.

        Locks of earlier releases tell the boot alone.
        """
        if self.host != host() or self.place not in ("", place()):
            return False
        return self.boot != boot() or start_ticks(self.pid) != self.start


class FolderLock:
    """The right to drive what lies in one folder. path: the lock file. about: what is driven, for people."""

    def __init__(self, path: Path, about: str) -> None:
        self._path, self._about = path, about
        self._token = uuid.uuid4().hex
        self._seen_at = -LEASE_SECONDS
        self._guard = threading.Lock()

    def take(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Take the folder, also from an owner that is gone. Raises SweepBusyError while somebody else is at work.

        A living owner shows itself within a few seconds; the lock of one that vanished with its host is taken over
        after LEASE_SECONDS.
        """
        first, since = self._look(), steady()
        while (seen := self._look()) is not None and not seen.gone:
            if first is None or (seen.token, seen.touched) != (first.token, first.touched):
                raise SweepBusyError(self._busy(seen))
            if steady() - since >= LEASE_SECONDS:
                break
            sleep(LOOK_SECONDS)
        with _alone(self._path) as alone:
            now = self._look()
            if now is not None and (seen is None or (now.token, now.touched) != (seen.token, seen.touched)):
                raise SweepBusyError(self._busy(now))
            self._write()
        if not alone:
            sleep(2 * LOOK_SECONDS)  # who wrote at the same moment has done so by now, and the last one has it
        self.touch()

    def touch(self) -> None:
        """Show that the owner lives. Raises SweepBusyError where another driver has taken over."""
        with self._guard:
            seen = self._look()
            if seen is None:  # somebody removed the file; the folder is still ours
                self._write()
            elif seen.token != self._token:
                raise SweepBusyError(f"{self._path.parent} was taken over by {seen.owner}; this driver stops")
            else:
                os.utime(self._path)
            self._seen_at = steady()

    def check(self) -> None:
        """Raise SweepBusyError unless the folder is ours; the file is looked at where it was not for a while.

        Raises SetupError where the folder itself is gone.
        """
        if steady() - self._seen_at <= UNSEEN_SECONDS:
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
        """Give the folder back, if it is still ours."""
        with self._guard, contextlib.suppress(OSError):
            seen = self._look()
            if seen is not None and seen.token == self._token:
                self._path.unlink()

    def _write(self) -> None:
        pid = os.getpid()
        process = {"host": host(), "pid": pid, "start": start_ticks(pid), "boot": boot(), "place": place()}
        write_json(self._path, {"token": self._token, "about": self._about, **process})

    def _look(self) -> _SeenLock | None:
        """The lock, None where there is none; one that is damaged has no owner."""
        try:
            touched = self._path.stat().st_mtime
        except FileNotFoundError:
            return None
        content = read_json(self._path).content
        if content is None or not text_of(content, "token"):
            return None
        pid, name = whole_of(content, "pid") or 0, text_of(content, "host")
        owner = f"{name} pid {pid} ({text_of(content, 'about')})"
        return _SeenLock(
            token=text_of(content, "token"),
            owner=owner,
            pid=pid,
            start=whole_of(content, "start"),
            boot=text_of(content, "boot"),
            host=name,
            place=text_of(content, "place"),
            touched=touched,
        )

    def _busy(self, lock: _SeenLock) -> str:
        return (
            f"{near(self._path.parent)} is in use by {lock.owner}: one folder is driven by one driver at a time; stop "
            "that one first, or use another --output"
        )


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether no other driver can look at the lock and write it meanwhile: some network file systems have no locks."""
    with path.with_name(f"{path.name}.guard").open("a") as guard:
        try:
            fcntl.flock(guard, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            yield False
            return
        yield True
