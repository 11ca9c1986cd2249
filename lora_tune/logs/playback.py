"""A finished log played back: the pieces in which a driver would have read it while it grew."""

from __future__ import annotations

import re
from collections.abc import Iterator

TICK_MS = 1000
"""Between two looks at a log, as the driver's period on a cluster."""

PIECES = 2000
"""Into which a log without time stamps is cut, at line ends."""

_STAMPED = re.compile(rb'^[^\n]*?:::MLLOG[^\n]{0,80}?"time_ms": ?(\d{10,14})', re.MULTILINE)


def ticks(log: bytes) -> Iterator[bytes]:
    """The log in the pieces in which a driver that looks once a second would have read it.

    By the time stamps of its MLLOG lines; a log without any comes in ``PIECES`` equal parts, cut at line ends.
    """
    begin, due = 0, None
    for line in _STAMPED.finditer(log):
        stamp = int(line[1])
        if due is None or stamp >= due:
            if line.start() > begin:
                yield log[begin : line.start()]
            begin, due = line.start(), max(due or 0, stamp + TICK_MS)
    step = max(1, len(log) // PIECES) if due is None else len(log)
    while begin < len(log):
        end = log.find(b"\n", begin + step) + 1 or len(log)
        yield log[begin:end]
        begin = end
