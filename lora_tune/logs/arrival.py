"""What a log without time stamps says of when its lines came, where nobody was looking: by the progress they state.

Training goes on evenly; printing does not. A header, a table or a summary comes at once, however long it is.
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
"""Into how many a whole log is cut at most, and each unseen stretch of it anyway: all pieces' times are kept."""

CHUNK_BYTES = 1 << 20

SCANNED_BYTES, WINDOWS = 1 << 19, 32
"""Bytes of a stretch that are looked at, and, of a longer one, in how many windows: a flood must not stop a driver."""

_LINES = re.compile(rb"[^\r\n]*[\r\n]|[^\r\n]+")


class LogPiece(NamedTuple):
    """Bytes up to ``end`` came when ``share`` (0 to 1) of the stretch had passed."""

    end: int
    share: float


def log_pieces(log: Path, begin: int, end: int, make_reader: Callable[[], LogReader]) -> list[LogPiece]:
    """The stretch of a log between two bytes, cut where its lines came at different times.

    Lines before the first that states progress came with the beginning, those behind the last with the end, so that no
    run seems shorter than it was. Where no line states any in the middle of a log, its bytes count. Of a stretch that
    is longer than ``SCANNED_BYTES`` only windows are looked at, and between two of them its bytes count.

    Parameters
    ----------
    log : Path
    begin, end : int
        Bytes; ``end`` is behind ``begin``. The file is read once more in between, as far as ``SCANNED_BYTES``.
    make_reader : callable
        Gives a fresh :class:`~lora_tune.logs.lines.LineReader` of the log's format.

    Returns
    -------
    list of LogPiece
        In rising order of bytes and of shares; the last one ends at ``end``, with share 1.
    """
    reader, at, cuts = make_reader(), begin, list[int]()
    most = max(FEWEST, PIECES * (end - begin) // end)
    assert isinstance(reader, LineReader)
    reader.clock = lambda: at  # a point's time is the byte at which its line begins
    points: list[tuple[int, float]] = []
    # A reader of somebody else's may raise anything; the log's own reader does so, too, and its follower says it.
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
    # The beginning of a log, up to no progress yet: its run may have begun at once.
    return [*([LogPiece(at, 0.0)] if at else []), LogPiece(end, 1.0)]


def _windows(begin: int, end: int) -> list[tuple[int, int]]:
    """What is looked at of a stretch: all of it, or windows from its first byte to its last."""
    if end - begin <= SCANNED_BYTES:
        return [(begin, end)]
    length = SCANNED_BYTES // WINDOWS
    firsts = (begin + (end - begin - length) * number // (WINDOWS - 1) for number in range(WINDOWS))
    return [(first, first + length) for first in firsts]


def _lines(log: Path, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in the stretch's windows, those of a progress bar too, and where.

    None of a log that cannot be read. What is left of a line that began before a window, or goes on behind it, may
    state another number than the whole.
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
        return  # as its tail finds at once, and says


def _points(reader: LineReader) -> list[tuple[int, float]]:
    """(byte, samples) of the lines that state more progress than any before them."""
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
    """Before the first point lies as much training as usually between two."""
    (first, least), (_, most) = points[0], points[-1]
    usual = median(b - a for (_, a), (_, b) in pairwise(points)) if len(points) > 1 else most
    base = max(0.0, least - usual)
    shares = [(samples - base) / (most - base) if most > base else 1.0 for _, samples in points]
    ends = [*(byte for byte, _ in points[1:]), end]
    header = [LogPiece(first, 0.0)] if first > begin else []
    return [*header, *map(LogPiece, ends, shares)]


def _filled(log_pieces: list[LogPiece], begin: int, most: int) -> list[LogPiece]:
    """The same, with pieces between those that lie far apart: what nobody looked at came as its bytes did."""
    filled, step = list[LogPiece](), max(1, (log_pieces[-1].end - begin) // most)
    for piece, after in zip(log_pieces, (*log_pieces[1:], log_pieces[-1]), strict=True):
        first = filled[-1].end if filled else begin
        for end in range(first + step, piece.end, step):
            passed = (end - step - first) / (piece.end - first)
            filled.append(LogPiece(end, piece.share + passed * (after.share - piece.share)))
        filled.append(piece._replace(share=filled[-1].share) if filled and filled[-1].share > piece.share else piece)
    return filled


# When the bytes of a log without time stamps arrived, kept on disk: a driver that starts anew reads the same times.
#
# Such a log is timed by when its lines are read. Read again later they would all have one time, and a trial that took
# minutes would have taken none.


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
    that time, up to the file's last write, by the progress that its lines state (:mod:`lora_tune.logs.arrival`). Where
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
        offset = self._known[-1].end if self._known else 0
        try:
            size = self._log.stat().st_size
        except OSError:  # nothing came yet
            return
        if offset > size:  # another file than the one whose times are known
            self._known, offset = [], 0
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
        offset = self._known[-1].end if self._known else 0
        with contextlib.suppress(OSError):
            if (size := self._log.stat().st_size) > offset:
                self._arrived((size, self._looked_at))

    def _spread(self, at: float, *, marked: bool) -> None:
        """What lies behind the last known byte came from ``at`` to the file's last write; ``marked``: an estimate."""
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
