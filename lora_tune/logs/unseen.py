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

_LINES = re.compile(rb"[^\r\n]*[\r\n]|[^\r\n]+")


class LogPiece(NamedTuple):
    """Bytes up to ``end`` came when ``share`` (0 to 1) of the stretch had passed."""

    end: int
    share: float


def pieces(log: Path, begin: int, end: int, make_reader: Callable[[], LogReader]) -> list[LogPiece]:
    """The stretch of a log between two bytes, cut where its lines came at different times.

    Lines before the first that states progress came with the beginning, those behind the last with the end, so that no
    run seems shorter than it was. Where no line states any in the middle of a log, its bytes count.

    Parameters
    ----------
    log : Path
    begin, end : int
        Bytes; ``end`` is behind ``begin``. The file is read once more in between.
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
        return _by_progress(points[:: -(-len(points) // most)], begin, end)
    return _by_bytes(cuts, begin, end) if begin else _header(at, end)


def _lines(log: Path, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in the stretch, those of a progress bar too, and where; none of a log that cannot be read.

    What is left of a line that began before may state another number than the whole.
    """
    at = max(0, begin - 1)
    try:
        with os.fdopen(open_regular(log), "rb") as file:
            file.seek(at)
            while at < end and (chunk := file.read(min(CHUNK_BYTES, end - at))):
                for line in _LINES.findall(chunk):
                    if at >= begin:
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


def _by_bytes(cuts: list[int], begin: int, end: int) -> list[LogPiece]:
    return [LogPiece(at, (at - begin) / (end - begin)) for at in (*cuts, end)]


def _header(last_line: int, end: int) -> list[LogPiece]:
    """The beginning of a log, up to no progress yet: its run may have begun at once."""
    return [*([LogPiece(last_line, 0.0)] if last_line else []), LogPiece(end, 1.0)]
