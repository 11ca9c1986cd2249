"""What a log without time stamps says of when its lines came, where nobody was looking: by the progress they state.

Training goes on evenly; printing does not. A header, a table or a summary comes at once, however long it is.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from lora_tune.base.small_files import open_regular
from lora_tune.logs.line_reader import LineReader
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


def pieces(log: Path, begin: int, end: int, make_reader: Callable[[], LogReader]) -> list[LogPiece]:
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
        Gives a fresh :class:`~lora_tune.logs.line_reader.LineReader` of the log's format.

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
        found = _by_progress(points[:: -(-len(points) // most)], begin, end)
        return found if len(_windows(begin, end)) == 1 else _filled(found, begin, most)
    return _by_bytes(cuts, begin, end) if begin else _header(at, end)


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
    if not points:
        return []
    (first, least), (_, most) = points[0], points[-1]
    usual = median(b - a for (_, a), (_, b) in pairwise(points)) if len(points) > 1 else most
    base = max(0.0, least - usual)
    shares = [(samples - base) / (most - base) if most > base else 1.0 for _, samples in points]
    ends = [*(byte for byte, _ in points[1:]), end]
    header = [LogPiece(first, 0.0)] if first > begin else []
    return [*header, *map(LogPiece, ends, shares)]


def _filled(pieces: list[LogPiece], begin: int, most: int) -> list[LogPiece]:
    """The same, with pieces between those that lie far apart: what nobody looked at came as its bytes did."""
    filled, step = list[LogPiece](), max(1, (pieces[-1].end - begin) // most)
    for piece, after in zip(pieces, (*pieces[1:], pieces[-1]), strict=True):
        first = filled[-1].end if filled else begin
        for end in range(first + step, piece.end, step):
            passed = (end - step - first) / (piece.end - first)
            filled.append(LogPiece(end, piece.share + passed * (after.share - piece.share)))
        filled.append(piece._replace(share=filled[-1].share) if filled and filled[-1].share > piece.share else piece)
    return filled


def _by_bytes(cuts: list[int], begin: int, end: int) -> list[LogPiece]:
    return [LogPiece(at, (at - begin) / (end - begin)) for at in (*cuts, end)]


def _header(last_line: int, end: int) -> list[LogPiece]:
    """The beginning of a log, up to no progress yet: its run may have begun at once."""
    return [*([LogPiece(last_line, 0.0)] if last_line else []), LogPiece(end, 1.0)]
