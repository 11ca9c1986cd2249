"""Log of a running attempt: its measurements and failures, read once for both."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from lora_tune.base.errors import SetupError
from lora_tune.base.files import open_regular
from lora_tune.base.paths import HEAD_BYTES
from lora_tune.logs.arrival import Arrivals
from lora_tune.logs.failures import FailureScanner
from lora_tune.logs.lines import LineReader
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import ExcludesPauses, LogReader, RunLog

# Follows a growing log file and feeds a :class:`~lora_tune.logs.run.LogReader` from a byte offset.


CHUNK_BYTES = 1 << 20
"""Bytes read at a time."""

POLL_BYTES = 16 << 20
"""Maximum bytes per call of :meth:`LogTail.poll`, so that one noisy trial does not stall the others."""

SEAM_BYTES = 64
"""Bytes before the offset that must be unchanged at the next poll: a file may be truncated and grow again meanwhile."""


class LogTail:
    """Follows one log file, which may be missing, vanish, be truncated or be replaced meanwhile.

    path: the log. make_reader: returns a new reader of its format; called at once, and again whenever the file starts
    over: it is shorter than what was read, its last read bytes have changed, or another file has replaced it. Previous
    contents are then discarded, since a file that starts over is another attempt's log. A file that vanished keeps its
    contents. No file stays open between two polls.
    """

    def __init__(self, path: Path, make_reader: Callable[[], LogReader]) -> None:
        self.path = path
        self.reader = make_reader()
        self.offset = 0
        """Bytes read so far from the current file."""
        self.size = 0
        """Its size at the last read."""
        self.restarts = 0
        """How often the file started over."""
        self._make_reader = make_reader
        self._identity: tuple[int, int] | None = None
        self._seam = b""  # the last bytes read

    def poll(self, limit: int = POLL_BYTES) -> int:
        """Feed new bytes, at most ``limit`` and ``POLL_BYTES``, to the reader; return their number.

        Returns 0 for a missing file. Raises SetupError for one that cannot be read.
        """
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place must not block the driver
            try:
                return self._read(file, min(limit, POLL_BYTES))
            finally:
                os.close(file)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                return 0
            raise SetupError(
                f"{self.path}: cannot read this log ({error.strerror}); it must be a file that this user may read"
            ) from error

    @property
    def deleted(self) -> bool:
        """Whether the file is missing; for ended jobs whose log existed."""
        return not self.path.exists()

    def _read(self, file: int, limit: int) -> int:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise SetupError(f"{self.path}: this log is not a regular file; remove it, so that the trial can write one")
        if self._starts_over(file, status):
            self.reader = self._make_reader()
            self.offset = 0
            self.restarts += 1
            self._seam = b""
        self._identity, self.size = (status.st_dev, status.st_ino), status.st_size
        begin, end = self.offset, min(status.st_size, self.offset + limit)
        while self.offset < end:
            chunk = os.pread(file, min(CHUNK_BYTES, end - self.offset), self.offset)
            if not chunk:  # truncated while being read: the next poll starts over
                break
            self.reader.feed(chunk)
            self.offset += len(chunk)
            self._seam = (self._seam + chunk[-SEAM_BYTES:])[-SEAM_BYTES:]
        return self.offset - begin

    def _starts_over(self, file: int, status: os.stat_result) -> bool:
        if self._identity not in (None, (status.st_dev, status.st_ino)):
            return True
        if status.st_size == self.offset:  # nothing new: the common case needs no read
            return False
        return os.pread(file, len(self._seam), self.offset - len(self._seam)) != self._seam


# Limits on the cost of reading logs: how often a run with very many evals is updated, and bytes per tick.


EACH = 1000
"""Evals up to which a run is updated on each change."""

LATER = 3.0
"""Seconds (or evals) per ``EACH`` evals between updates of a longer run."""


def due(evals: int, passed: float) -> bool:
    """Whether a run with so many evals is to be updated or judged again.

    With n thousand evals the interval is 3 n seconds, so a log takes a constant share of a processor, however long it
    is. For a curve without a clock the interval is in evals.

    Parameters
    ----------
    evals : int
        Evals of the run at its last update.
    passed : float
        Seconds, or evals, since then. True for 0, so that a repeated call returns the same.
    """
    return evals <= EACH or not 0 < passed < LATER * evals / EACH


TICK_BYTES = 2 << 20
"""Bytes per tick of all logs together: half a second of processor time if many lines look like failures."""

LEAST_BYTES = 4096
"""Minimum bytes of each log per tick, for any number of logs."""

STAMPED = 3
"""Factor by which logs with time stamps in their records are read faster."""


class ReadBudget:
    """Bytes that a tick may read of each log: an equal share, plus what the logs before it left over."""

    def __init__(self, logs: int) -> None:
        self._share, self._spare = max(LEAST_BYTES, TICK_BYTES // max(1, logs)), 0

    def allows(self, *, stamped: bool) -> int:
        """Bytes that may be read of the next log. stamped: its records have time stamps."""
        return (self._share + self._spare) * (STAMPED if stamped else 1)

    def spent(self, read: int, *, stamped: bool) -> None:
        """Account for ``read`` bytes of the log."""
        cost = -(-read // STAMPED) if stamped else read
        self._spare = max(0, self._share + self._spare - cost)


class _ReaderAndScanner:
    """Feeds the same bytes to a log reader and the failure scanner. arrivals: None for a log with time stamps."""

    def __init__(self, reader: LogReader, arrivals: Arrivals | None) -> None:
        self.reader, self.arrivals = reader, arrivals
        self.scanner = FailureScanner()

    def feed(self, chunk: bytes) -> None:
        try:
            for piece in (chunk,) if self.arrivals is None else self.arrivals.pieces(chunk):
                self.reader.feed(piece)
        except Exception as error:  # a user's reader; one trial's log must not end the sweep
            raise SetupError(f"the reader of workload.log fails: {type(error).__name__}: {error}") from error
        self.scanner.feed(chunk)

    def run(self) -> RunLog:
        return self.reader.run()

    @property
    def states_seconds(self) -> bool:
        """Whether the log's lines state the seconds since the run's start."""
        return isinstance(self.reader, LineReader) and self.reader.states_seconds


class LogFollower:
    """Follows ``path`` with readers made by ``make_reader``.

    begun: epoch seconds of the job's start if an earlier driver may have read the log, else None. grew_at: epoch
    seconds of the last observed growth. unreadable: why the last read failed, or ""; one trial's log must not end the
    sweep.
    """

    def __init__(
        self, path: Path, make_reader: Callable[[], LogReader], now: float, *, begun: float | None = None
    ) -> None:
        self.path, self._make_reader, self._begun = path, make_reader, begun
        self._tail = LogTail(path, self._reader)
        self._train_points = 0
        self._run: RunLog | None = None
        self._made_at = -math.inf  # time of the log's last read before ``_run`` was made
        self._behind = False  # whether more was read since then
        self._restarts = 0
        self._told_guesses = 0.0
        self._shown: set[tuple[float, str]] = set()  # evals that the log has ever had
        self._pauses: tuple[tuple[int, int], ...] = ()
        self.grew_at = now
        self.unreadable = ""

    def incomplete(self) -> str:
        """Why the log no longer contains all its job's output; "" if nothing shows that."""
        if self._tail.deleted:
            return "the log was deleted before its job ended"
        if self._tail.restarts and self._shown - _identities(self.run()):
            return "the log was cut or replaced while its job ran: evals that it had shown are gone"
        return ""

    def ends(self) -> tuple[bytes, bytes, int]:
        """The log's first bytes, which name its owner, its last two bytes, and its size; empty if unreadable."""
        with contextlib.suppress(OSError), os.fdopen(open_regular(self.path), "rb") as file:
            head, size = file.read(HEAD_BYTES), file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 2))
            return head, file.read(2), size
        return b"", b"", 0

    @property
    def cut(self) -> bool:
        """Whether the log started over while its job ran: a failure that it still shows may not be the cause."""
        return self._tail.restarts > 0

    def _reader(self) -> LogReader:
        """A reader of the log from its first byte; stored times apply only to the first file."""
        reader = self._make_reader()
        if not isinstance(reader, LineReader):
            return _ReaderAndScanner(reader, None)
        kept = self.path.with_name(f".{self.path.name}.times")
        if self._begun is None:
            with contextlib.suppress(OSError):  # missing file, or a read-only folder
                kept.unlink()
        arrivals = Arrivals(self.path, kept, self._begun, reader.clock, self._make_reader)
        reader.clock, self._begun = arrivals.now, None
        return _ReaderAndScanner(reader, arrivals)

    @property
    def _read(self) -> _ReaderAndScanner:
        reader = self._tail.reader
        assert isinstance(reader, _ReaderAndScanner)
        return reader

    @property
    def stamped(self) -> bool:
        """Whether the log has time stamps; else its lines are timed by arrival."""
        return self._read.arrivals is None

    @property
    def guessed_seconds(self) -> float:
        """Seconds in which a log without time stamps was not read, so that times are estimates."""
        return self._read.arrivals.guessed_seconds if self._read.arrivals else 0.0

    def unmatched(self, *, ended: bool) -> str:
        """Why no log line matches the study's format of an eval; "" if unknown or too early."""
        reader = self._read.reader
        return reader.unmatched.describe(ended=ended) if isinstance(reader, LineReader) else ""

    def newly_guessed(self) -> float:
        """Increase of ``guessed_seconds`` since the last call."""
        new, self._told_guesses = self.guessed_seconds - self._told_guesses, self.guessed_seconds
        return new

    def estimated_seconds(self, run: RunLog, seconds: float) -> float:
        """How many of the first ``seconds`` of ``run`` are estimated; 0 if the log states its times."""
        return self._of_arrivals(Arrivals.estimated, run, seconds) or 0.0

    def read_at_once(self, run: RunLog, seconds: float) -> float | None:
        """Seconds without a read before the last one, if that returned the first ``seconds`` of ``run``.

        None if it took several reads, more arrived later, or the log states its times.
        """
        return self._of_arrivals(Arrivals.at_once, run, seconds)

    def _of_arrivals(
        self, ask: Callable[[Arrivals, float, float], float | None], run: RunLog, seconds: float
    ) -> float | None:
        """Apply ``ask`` to the arrivals of the first ``seconds`` of ``run``; None if the log states its times."""
        if self._read.arrivals is None or self._read.states_seconds or run.run_start_ms is None:
            return None
        begin = run.run_start_ms / 1000
        return ask(self._read.arrivals, begin, begin + seconds)

    def poll(self, now: float, *, drain: bool = False, started: float | None = None, limit: int | None = None) -> int:
        """Read new bytes, with ``drain`` all of them (for an ended job); return their number.

        started: epoch seconds of the job's start, if known. limit: maximum bytes; the rest is read by the next call,
        with its arrival time.
        """
        self.unreadable, read = "", 0
        if self._read.arrivals:
            self._read.arrivals.look(started)
        try:
            while new := self._tail.poll(POLL_BYTES if limit is None else limit - read):
                self.grew_at = now
                self._behind, read = True, read + new
                if not drain or read == limit:
                    break
        except SetupError as error:
            self.unreadable = str(error)
        if self._behind and (drain or due(self._run.printed_evals if self._run else 0, now - self._made_at)):
            self._run, self._made_at, self._behind = None, now, False
        return read

    @property
    def unread(self) -> int:
        """Bytes of the log at its last read that are not read yet."""
        return max(0, self._tail.size - self._tail.offset)

    def exclude_pauses(self, pauses: Sequence[tuple[float, float]]) -> None:
        """Exclude pauses of the job, spans in epoch seconds in ascending order, from the run's times."""
        known = tuple((round(1000 * begin), round(1000 * end)) for begin, end in pauses)
        if known != self._pauses:
            self._pauses, self._run = known, None

    @property
    def leaves_out_pauses(self) -> bool:
        """Whether the run's times exclude its job's pauses; False if the log itself counts the seconds."""
        return isinstance(self._read.reader, ExcludesPauses) and not self._read.states_seconds

    def run(self) -> RunLog:
        """The run so far; with very many evals, as of the last update."""
        # Updated only after growth or a restart of the file: a thousand logs are polled each second.
        if self._run is None or self._restarts != self._tail.restarts:
            self._pass_on_pauses()
            self._run, self._restarts = self._tail.reader.run(), self._tail.restarts
            self._shown |= _identities(self._run)
        return self._run

    def _pass_on_pauses(self) -> None:
        if isinstance(self._read.reader, ExcludesPauses):
            self._read.reader.pauses = self._pauses

    def runs(self) -> tuple[RunLog, ...]:
        """Every run in the log, oldest first, if its format can contain several (``NEXP``)."""
        self._pass_on_pauses()
        reader = self._read.reader
        return reader.runs() if isinstance(reader, MllogReader) else (reader.run(),)

    def failures(self) -> FailureScanner:
        """The failure signatures so far."""
        return self._read.scanner

    def train_is_new(self) -> bool:
        """Whether the number of train points changed since the last call."""
        count = len(self.run().train)
        new, self._train_points = count != self._train_points, count
        return new


def _identities(run: RunLog) -> set[tuple[float, str]]:
    """A run's evals as (samples, text of the loss), which also works for NaN."""
    return {(point.samples, repr(point.loss)) for point in run.evals}
