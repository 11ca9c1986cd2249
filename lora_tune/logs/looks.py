"""What looks at logs may cost: how often a run with very many evals is made anew, how much one tick reads."""

from __future__ import annotations

EACH = 1000
"""Evals up to which a run is looked at each time there is more."""

LATER = 3.0
"""Seconds (or evals) that pass for each so many evals until a longer run is looked at again."""


def due(evals: int, passed: float) -> bool:
    """Whether a run with so many evals is made of its log, or judged, anew.

    With n thousand evals, 3 n seconds after the last time: one log takes the same share of a processor, however long it
    is. A curve that nobody gives a clock is looked at after as many evals.

    Parameters
    ----------
    evals : int
        Evals of the run when it was looked at last.
    passed : float
        Seconds, or evals, since then. Asked again with none passed, the answer is yes, as it was.
    """
    return evals <= EACH or not 0 < passed < LATER * evals / EACH


TICK_BYTES = 2 << 20
"""Bytes that one tick reads of all logs together: half a second of processor where many of them look like failures."""

LEAST_BYTES = 4096
"""Bytes of each log that a tick may read, however many logs there are."""

STAMPED = 8
"""How many times as fast logs are read whose records carry time stamps."""


class ReadBudget:
    """The bytes that a tick may read of each of so many logs: an equal share, and what those before it left over."""

    def __init__(self, logs: int) -> None:
        self._share, self._spare = max(LEAST_BYTES, TICK_BYTES // max(1, logs)), 0

    def allows(self, *, stamped: bool) -> int:
        """How many bytes of the next log may be read. stamped: its records carry time stamps."""
        return (self._share + self._spare) * (STAMPED if stamped else 1)

    def spent(self, read: int, *, stamped: bool) -> None:
        """So many bytes of it were."""
        cost = -(-read // STAMPED) if stamped else read
        self._spare = max(0, self._share + self._spare - cost)
