"""When the bytes of a log without time stamps arrived, kept on disk: a driver that starts anew reads the same times.

Such a log is timed by when its lines are read. Read again later they would all have one time, and a trial that took
minutes would have taken none.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path

GUESSES = 1000
"""Pieces, at line ends, into which bytes are cut that arrived while nobody looked."""


class Arrivals:
    """The times of one log's bytes, from its first.

    log: the file, ``kept``: where its times are kept, one ``END MILLISECONDS`` a line: what lies before byte END and
    behind the END before it arrived then. begun: epoch seconds when the job started, for an attempt of an earlier
    driver, else None. What came while no driver was there is spread evenly over that time, byte by byte: an estimate,
    whose length is ``guessed_seconds``.
    """

    def __init__(self, log: Path, kept: Path, begun: float | None, clock: Callable[[], float] = time.time) -> None:
        self._kept, self._clock = kept, clock
        self._offset = 0
        self._at = 0.0
        self._known = _read(kept)
        self._gap_end, self._gap_from, self._gap_rate = 0, 0.0, 0.0
        self.guessed_seconds = 0.0
        if begun is not None:
            self._spread(log, begun)

    def _spread(self, log: Path, begun: float) -> None:
        """Find out what came while nobody looked, and when that was."""
        try:
            status = log.stat()
        except OSError:  # nothing came yet
            return
        seen, at = self._known[-1] if self._known else (0, begun)
        if seen > status.st_size:  # another file than the one whose times are known
            self._known, seen, at = [], 0, begun
            with contextlib.suppress(OSError):
                self._kept.unlink()
        if status.st_size > seen:
            self.guessed_seconds = max(0.0, min(self._clock(), status.st_mtime) - at)
            self._gap_rate = self.guessed_seconds / (status.st_size - seen)
            self._gap_end, self._gap_from = status.st_size, at - seen * self._gap_rate

    def now(self) -> float:
        """Epoch seconds at which the piece that :meth:`pieces` gave last arrived."""
        return self._at

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        """The log's next bytes, cut where they arrived at different times; :meth:`now` tells of each."""
        begin, self._offset = self._offset, self._offset + len(chunk)
        at = begin
        for end, then in self._known[bisect_right(self._known, begin, key=lambda row: row[0]) :]:
            if at == self._offset:
                return
            self._at = then
            until = min(end, self._offset)
            yield chunk[at - begin : until - begin]
            at = until
        if at < min(self._gap_end, self._offset):
            for end in self._cuts(chunk, begin, at):
                self._arrived(end, self._gap_from + end * self._gap_rate)
                yield chunk[at - begin : end - begin]
                at = end
        if at < self._offset:
            self._arrived(self._offset, self._clock())
            yield chunk[at - begin :]

    def _cuts(self, chunk: bytes, begin: int, at: int) -> Iterator[int]:
        """Ends of the pieces of what nobody saw come, at line ends."""
        until = min(self._gap_end, self._offset)
        while at < until:
            line_end = chunk.find(b"\n", min(at + self._gap_end // GUESSES, until) - begin, until - begin)
            at = until if line_end < 0 else begin + line_end + 1
            yield at

    def _arrived(self, end: int, at: float) -> None:
        self._at = int(at * 1000) / 1000  # as it is read again
        self._known.append((end, self._at))
        # A full disk costs the times of a later restart, and nothing now.
        with contextlib.suppress(OSError), self._kept.open("a", encoding="ascii") as file:
            file.write(f"{end} {self._at * 1000:.0f}\n")


def _read(kept: Path) -> list[tuple[int, float]]:
    """(END, epoch seconds) as kept, in rising order; a line that was cut ends what is known."""
    found: list[tuple[int, float]] = []
    try:
        text = kept.read_text(encoding="ascii", errors="replace")
    except OSError:
        return found
    for line in text.splitlines(keepends=True):
        end, _, ms = line.partition(" ")
        whole = line.endswith("\n") and end.isdecimal() and ms.strip().isdecimal()
        if not whole or (found and int(end) <= found[-1][0]):
            break
        found.append((int(end), int(ms) / 1000))
    return found
