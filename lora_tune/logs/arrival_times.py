"""When the bytes of a log without time stamps arrived, kept on disk: a driver that starts anew reads the same times.

Such a log is timed by when its lines are read. Read again later they would all have one time, and a trial that took
minutes would have taken none.
"""

from __future__ import annotations

import contextlib
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from lora_tune.base.small_files import open_regular
from lora_tune.logs import unseen
from lora_tune.logs.run import LogReader

LOOK_SECONDS = 2.0
"""A log that nobody looked at for so long is timed by an estimate, and marked."""

SPREAD_SECONDS = 0.2
"""What came in a longer time between two looks is spread over it: a short run may begin and end between them."""


class Arrival(NamedTuple):
    """What lies before byte ``end``, and behind the end before it, arrived at ``at``, epoch seconds."""

    end: int
    at: float
    estimated: bool = False


class _Read(NamedTuple):
    """What one look brought: when it was, how long nobody had looked before, its first and its last line's times."""

    looked_at: float
    unseen: float
    first: float
    last: float


class Arrivals:
    """The times of one log's bytes, from its first.

    log: the file, ``kept``: where its times are kept, one ``END MILLISECONDS`` a line: what lies before byte END and
    behind the END before it arrived then. begun: epoch seconds when the job started, for an attempt of an earlier
    driver, else None. make_reader: gives a reader of the log's format. What came while nobody looked is spread over
    that time, up to the file's last write, by the progress that its lines state (:mod:`lora_tune.logs.unseen`). Where
    no driver looked for ``LOOK_SECONDS``, or one that stood still, that is an estimate, marked by an ``e`` behind its
    line, whose length is ``guessed_seconds``.
    """

    def __init__(
        self,
        log: Path,
        kept: Path,
        begun: float | None,
        clock: Callable[[], float],
        make_reader: Callable[[], LogReader],
    ) -> None:
        self._log, self._kept, self._clock, self._make_reader = log, kept, clock, make_reader
        self._offset = 0
        self._at = 0.0
        self._known = _read(kept)
        self._unseen = 0.0  # seconds in which nobody looked before the last look, or before the first byte was read
        self._last_read: _Read | None = None
        self.guessed_seconds = 0.0
        self._begun = self._looked_at = clock() if begun is None else begun
        if begun is not None:
            self._take_over()

    def _take_over(self) -> None:
        """Find out what came since an earlier driver looked last."""
        seen = self._known[-1].end if self._known else 0
        try:
            size = self._log.stat().st_size
        except OSError:  # nothing came yet
            return
        if seen > size:  # another file than the one whose times are known
            self._known, seen = [], 0
            with contextlib.suppress(OSError):
                self._kept.unlink()
        left_at = self._known[-1].at if self._known else self._begun
        self._looked_at = self._clock()
        self._unseen = self._looked_at - left_at
        self._spread(left_at, marked=True)

    def look(self, started: float | None = None) -> None:
        """The log is about to be read: what is new in it came since the last call.

        started: epoch seconds at which its job did, None while that is not known; nothing came before.
        """
        before, self._looked_at = self._looked_at, self._clock()
        passed = self._looked_at - before
        self._unseen = max(passed, self._unseen if self._offset == 0 else 0.0)
        if passed > SPREAD_SECONDS:
            since = before if started is None or self._offset else min(max(before, started), self._looked_at)
            self._spread(since, marked=passed > LOOK_SECONDS)
        else:
            self._all_arrived()

    def _all_arrived(self) -> None:
        """What lies in the log came by now, whenever it is read."""
        seen = self._known[-1].end if self._known else 0
        with contextlib.suppress(OSError):
            if (size := self._log.stat().st_size) > seen:
                self._arrived((size, self._looked_at))

    def _spread(self, at: float, *, marked: bool) -> None:
        """What lies behind the last known byte came from ``at`` to the file's last write; ``marked``: an estimate."""
        try:
            status = self._log.stat()
        except OSError:
            return
        seen = self._known[-1].end if self._known else 0
        if status.st_size > seen:
            guessed = max(0.0, min(self._clock(), status.st_mtime) - at)
            self.guessed_seconds += guessed if marked else 0.0
            pieces = unseen.pieces(self._log, seen, status.st_size, self._make_reader)
            self._arrived(*((end, at + share * guessed) for end, share in pieces), estimated=marked)

    def now(self) -> float:
        """Epoch seconds at which the piece that :meth:`pieces` gave last arrived."""
        return self._at

    def estimated(self, begin: float, end: float) -> float:
        """How many of the seconds from ``begin`` to ``end``, both epoch seconds, are estimated."""
        seconds, before = 0.0, self._begun
        for row in self._known:
            if row.estimated:
                seconds += max(0.0, min(end, row.at) - max(begin, before))
            before = row.at
        return seconds

    def at_once(self, begin: float, end: float) -> float | None:
        """How long nobody had looked when all from ``begin`` to ``end``, epoch seconds, came with the last of the log.

        None where it was read at several looks, or by an earlier driver, or where more of the log came later.
        """
        last = self._last_read
        return last.unseen if last is not None and last.first <= begin and end <= last.last else None

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        """The log's next bytes, cut where they arrived at different times; :meth:`now` tells of each."""
        begin, self._offset = self._offset, self._offset + len(chunk)
        at = begin
        for row in self._known[bisect_right(self._known, begin, key=lambda row: row.end) :]:
            if at == self._offset:
                return
            self._at = row.at
            until = min(row.end, self._offset)
            yield chunk[at - begin : until - begin]
            at = until
        if at < self._offset:
            self._arrived((self._offset, self._clock()))
            yield chunk[at - begin :]

    def _arrived(self, *ends: tuple[int, float], estimated: bool = False) -> None:
        """Keep at which time, epoch seconds, the bytes up to each of the ends arrived, in rising order."""
        new = [Arrival(end, int(at * 1000) / 1000, estimated) for end, at in ends]  # as it is read again
        self._at = new[-1].at
        if self._last_read is not None and self._last_read.looked_at == self._looked_at:
            self._last_read = self._last_read._replace(last=self._at)
        else:
            self._last_read = _Read(self._looked_at, self._unseen, new[0].at, self._at)
        self._known += new
        # A full disk costs the times of a later restart, and nothing now.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with contextlib.suppress(OSError), os.fdopen(open_regular(self._kept, flags), "a", encoding="ascii") as file:
            file.writelines(f"{row.end} {row.at * 1000:.0f}{' e' if estimated else ''}\n" for row in new)


def _read(kept: Path) -> list[Arrival]:
    """What is kept, in rising order; a line that was cut ends what is known."""
    arrivals: list[Arrival] = []
    try:
        with os.fdopen(open_regular(kept, os.O_RDONLY | os.O_NOFOLLOW), encoding="ascii", errors="replace") as file:
            text = file.read()
    except OSError:
        return arrivals
    for line in text.splitlines(keepends=True):
        row = _KEPT.fullmatch(line)
        if row is None or (arrivals and int(row[1]) <= arrivals[-1].end):
            break
        arrivals.append(Arrival(int(row[1]), int(row[2]) / 1000, bool(row[3])))
    return arrivals


_KEPT = re.compile(r"([0-9]{1,18}) ([0-9]{1,15})( e)?\n")
