"""Arrival times of log lines without time stamps, for periods in which the log was not read, from stated progress.

Training advances evenly; printing does not: a header, a table or a summary arrives at once, however long it is.
"""

from __future__ import annotations

import contextlib
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from lora_tune.base.files import open_regular
from lora_tune.logs.lines import LineReader
from lora_tune.logs.run import LogReader

PIECES, FEWEST = 1000, 50
"""Maximum pieces of a whole log, and minimum of each unread stretch; the times of all pieces are kept."""

CHUNK_BYTES = 1 << 20

SCANNED_BYTES, WINDOWS = 1 << 19, 32
"""Bytes read of a stretch, and number of windows for a longer one, so that huge output does not stall the driver."""

_LINES = re.compile(rb"[^\r\n]*[\r\n]|[^\r\n]+")


class LogPiece(NamedTuple):
    """The bytes up to ``end`` arrived when ``share`` (0 to 1) of the period had passed."""

    end: int
    share: float


def log_pieces(log: Path, begin: int, end: int, make_reader: Callable[[], LogReader]) -> list[LogPiece]:
    """Divide a stretch of a log into pieces with estimated arrival times.

    Lines before the first stated progress get the start of the period, those after the last its end, so that no run
    seems shorter than it was. Without stated progress in the middle of a log, times are proportional to bytes. Of a
    stretch longer than ``SCANNED_BYTES`` only windows are read; between them times are proportional to bytes.

    Parameters
    ----------
    log : Path
    begin, end : int
        Bytes; ``end`` is greater than ``begin``. Up to ``SCANNED_BYTES`` between them are read once more.
    make_reader : callable
        Returns a new :class:`~lora_tune.logs.lines.LineReader` of the log's format.

    Returns
    -------
    list of LogPiece
        In ascending order of bytes and shares; the last one ends at ``end``, with share 1.
    """
    reader, at, cuts = make_reader(), begin, list[int]()
    most = max(FEWEST, PIECES * (end - begin) // end)
    assert isinstance(reader, LineReader)
    reader.clock = lambda: at  # a point's time is the byte at which its line begins
    points: list[tuple[int, float]] = []
    # A user's reader may raise anything; the log's main reader raises the same, and its follower reports it.
    with contextlib.suppress(Exception):
        for at, line in _lines(log, begin, end):
            reader.feed(line)
            if at >= begin + (len(cuts) + 1) * (end - begin) / most:
                cuts.append(at)
        points = _points(reader)
    if points:
        by_progress = _by_progress(points[:: -(-len(points) // most)], begin, end)
        return by_progress if len(_windows(begin, end)) == 1 else _filled(by_progress, begin, most)
    if begin:
        return [LogPiece(cut, (cut - begin) / (end - begin)) for cut in (*cuts, end)]
    # The start of a log without progress so far: its run may have begun at once.
    return [*([LogPiece(at, 0.0)] if at else []), LogPiece(end, 1.0)]


def _windows(begin: int, end: int) -> list[tuple[int, int]]:
    """The byte ranges to read of a stretch: all of it, or evenly spaced windows including its first and last byte."""
    if end - begin <= SCANNED_BYTES:
        return [(begin, end)]
    length = SCANNED_BYTES // WINDOWS
    firsts = (begin + (end - begin - length) * number // (WINDOWS - 1) for number in range(WINDOWS))
    return [(first, first + length) for first in firsts]


def _lines(log: Path, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines (also progress bar updates) that begin in the stretch's windows, with their positions.

    Lines cut by a window are skipped, as a part may state another number than the whole. Nothing is yielded for a log
    that cannot be read.
    """
    try:
        with os.fdopen(open_regular(log), "rb") as file:
            for first, last in _windows(begin, end):
                at = max(0, first - 1)
                file.seek(at)
                while at < last and (chunk := file.read(min(CHUNK_BYTES, last - at))):
                    for line in _LINES.findall(chunk):
                        whole = line[-1:] in b"\r\n" or at + len(line) < last or last == end
                        if at >= first and whole:
                            yield at, line
                        at += len(line)
    except OSError:
        return  # the log's tail fails in the same way and reports it


def _points(reader: LineReader) -> list[tuple[int, float]]:
    """(byte, samples) of the lines that state more progress than any line before."""
    run, points = reader.run(), list[tuple[int, float]]()
    if run.run_start_ms is None or reader.states_seconds:
        return points
    first = run.run_start_ms // 1000
    stated = [(first + round(seconds), samples) for samples, _, seconds in (*run.evals, *run.train)]
    for byte, samples in sorted(stated):
        if not points or (samples > points[-1][1] and byte > points[-1][0]):
            points.append((byte, samples))
    return points


def _by_progress(points: list[tuple[int, float]], begin: int, end: int) -> list[LogPiece]:
    """Pieces from progress; training before the first point is assumed to be the median distance of two points."""
    (first, least), (_, most) = points[0], points[-1]
    usual = median(b - a for (_, a), (_, b) in pairwise(points)) if len(points) > 1 else most
    base = max(0.0, least - usual)
    shares = [(samples - base) / (most - base) if most > base else 1.0 for _, samples in points]
    ends = [*(byte for byte, _ in points[1:]), end]
    header = [LogPiece(first, 0.0)] if first > begin else []
    return [*header, *map(LogPiece, ends, shares)]


def _filled(log_pieces: list[LogPiece], begin: int, most: int) -> list[LogPiece]:
    """Add pieces between distant ones, with times proportional to bytes, for parts that were not read."""
    filled, step = list[LogPiece](), max(1, (log_pieces[-1].end - begin) // most)
    for piece, after in zip(log_pieces, (*log_pieces[1:], log_pieces[-1]), strict=True):
        first = filled[-1].end if filled else begin
        for end in range(first + step, piece.end, step):
            passed = (end - step - first) / (piece.end - first)
            filled.append(LogPiece(end, piece.share + passed * (after.share - piece.share)))
        filled.append(piece._replace(share=filled[-1].share) if filled and filled[-1].share > piece.share else piece)
    return filled


# Arrival times of a log without time stamps, stored on disk so that a restarted driver reads the same times.
#
# Such a log is timed by when its lines are read. Read again later, all lines would have the same time, and a trial of
# minutes would seem to have taken none.


LOOK_SECONDS = 2.0
"""Times in a log that was not read for longer than this are marked as estimates."""

SPREAD_SECONDS = 0.2
"""Lines that arrive in a longer interval between two reads are spread over it: a short run may lie within."""


class Arrival(NamedTuple):
    """The bytes from the previous ``end`` up to byte ``end`` arrived at ``at``, epoch seconds."""

    end: int
    at: float
    estimated: bool = False


class _Read(NamedTuple):
    """One read: its time, seconds since the previous read, and the times of its first and last line."""

    looked_at: float
    unseen: float
    first: float
    last: float


class Arrivals:
    """Arrival times of one log's bytes, from the first one.

    log: the file. kept: file of its times, one line ``END MILLISECONDS`` per piece: the bytes between the previous END
    and END arrived then. begun: epoch seconds of the job's start for an attempt of an earlier driver, else None.
    make_reader: returns a reader of the log's format. Bytes that arrived between two reads are spread over that time,
    up to the file's last write, by the progress that their lines state (:func:`log_pieces`). If the log was not read
    for ``LOOK_SECONDS`` (no driver, or a stalled one), the times are estimates: their lines end in ``e``, and
    ``guessed_seconds`` is their total.
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
        self._unseen = 0.0  # seconds without a read before the last one, or before the first byte
        self._last_read: _Read | None = None
        self.guessed_seconds = 0.0
        self._begun = self._looked_at = clock() if begun is None else begun
        if begun is not None:
            self._take_over()

    def _take_over(self) -> None:
        """Assign times to bytes that arrived after an earlier driver's last read."""
        offset = self._known[-1].end if self._known else 0
        try:
            size = self._log.stat().st_size
        except OSError:  # nothing has arrived yet
            return
        if offset > size:  # the known times are those of another file
            self._known, offset = [], 0
            with contextlib.suppress(OSError):
                self._kept.unlink()
        left_at = self._known[-1].at if self._known else self._begun
        self._looked_at = self._clock()
        self._unseen = self._looked_at - left_at
        self._spread(left_at, marked=True)

    def look(self, started: float | None = None) -> None:
        """Call before reading the log: new bytes arrived since the last call.

        started: epoch seconds of the job's start, None if unknown; nothing arrived before.
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
        """All bytes in the log have arrived by now, whenever they are read."""
        offset = self._known[-1].end if self._known else 0
        with contextlib.suppress(OSError):
            if (size := self._log.stat().st_size) > offset:
                self._arrived((size, self._looked_at))

    def _spread(self, at: float, *, marked: bool) -> None:
        """Spread the bytes after the last known one from ``at`` to the file's last write. marked: as an estimate."""
        try:
            status = self._log.stat()
        except OSError:
            return
        offset = self._known[-1].end if self._known else 0
        if status.st_size > offset:
            guessed = max(0.0, min(self._clock(), status.st_mtime) - at)
            self.guessed_seconds += guessed if marked else 0.0
            pieces = log_pieces(self._log, offset, status.st_size, self._make_reader)
            self._arrived(*((end, at + share * guessed) for end, share in pieces), estimated=marked)

    def now(self) -> float:
        """Epoch seconds at which the last piece of :meth:`pieces` arrived."""
        return self._at

    def estimated(self, begin: float, end: float) -> float:
        """How many seconds between ``begin`` and ``end``, both epoch seconds, are estimated."""
        seconds, before = 0.0, self._begun
        for row in self._known:
            if row.estimated:
                seconds += max(0.0, min(end, row.at) - max(begin, before))
            before = row.at
        return seconds

    def at_once(self, begin: float, end: float) -> float | None:
        """Seconds unread before the last read, if that returned all from ``begin`` to ``end``, epoch seconds.

        None if it took several reads, an earlier driver read it, or more of the log arrived later.
        """
        last = self._last_read
        return last.unseen if last is not None and last.first <= begin and end <= last.last else None

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        """Divide the log's next bytes by arrival time; :meth:`now` returns the time of each piece."""
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
        """Record the arrival times, epoch seconds, of the bytes up to each of the ends, in ascending order."""
        new = [Arrival(end, int(at * 1000) / 1000, estimated) for end, at in ends]  # rounded as in the file
        self._at = new[-1].at
        if self._last_read is not None and self._last_read.looked_at == self._looked_at:
            self._last_read = self._last_read._replace(last=self._at)
        else:
            self._last_read = _Read(self._looked_at, self._unseen, new[0].at, self._at)
        self._known += new
        # A full disk only loses the times for a later restart.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with contextlib.suppress(OSError), os.fdopen(open_regular(self._kept, flags), "a", encoding="ascii") as file:
            file.writelines(f"{row.end} {row.at * 1000:.0f}{' e' if estimated else ''}\n" for row in new)


def _read(kept: Path) -> list[Arrival]:
    """The stored times in ascending order, up to the first damaged line."""
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
