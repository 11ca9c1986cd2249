"""One running attempt's log: what it measured, and what went wrong in it, read once for both."""

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
from lora_tune.logs.run import LeavesOutPauses, LogReader, RunLog

# The edge that follows a growing log file, feeding a :class:`~lora_tune.logs.run.LogReader` from a byte offset.


CHUNK_BYTES = 1 << 20
"""Bytes held at a time."""

POLL_BYTES = 16 << 20
"""Bytes that one call of :meth:`LogTail.poll` reads at most, so that one noisy trial cannot stall the others."""

SEAM_BYTES = 64
"""Bytes before the offset that must be the same at the next poll: a file may be truncated and grow again in between."""


class LogTail:
    """Follows one log file, which may not exist yet, vanish, be truncated or be replaced while it is followed.

    path: the log. make_reader: makes a fresh reader of its format; called at once, and again whenever the file
    starts over: it became shorter than what was read, its last bytes read are others now, or another file took its
    place. What was read before is forgotten then, since a file that starts over is another attempt's log.
    A file that has vanished leaves what was read. No file stays open between two polls.
    """

    def __init__(self, path: Path, make_reader: Callable[[], LogReader]) -> None:
        self.path = path
        self.reader = make_reader()
        self.offset = 0
        """Bytes read so far from the file that lies there now."""
        self.size = 0
        """Its length when it was read last."""
        self.restarts = 0
        """How often the file started over."""
        self._make_reader = make_reader
        self._identity: tuple[int, int] | None = None
        self._seam = b""  # the last bytes read

    def poll(self, limit: int = POLL_BYTES) -> int:
        """Read what is new, ``limit`` and ``POLL_BYTES`` at most, into the reader; tell how many bytes that were.

        A file that is not there is no error: 0. Raises SetupError for one that cannot be read.
        """
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place must not stop the driver
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
        """Whether no file is there; asked of a job that is over, which had one, whoever read it then."""
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
        if status.st_size == self.offset:  # nothing new: the common case costs no read
            return False
        return os.pread(file, len(self._seam), self.offset - len(self._seam)) != self._seam


# What looks at logs may cost: how often a run with very many evals is made anew, how much one tick reads.


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

STAMPED = 3
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


class _ReaderAndScanner:
    """Feeds the same bytes to a log reader and to the failure scanner. arrivals: None for a log with time stamps."""

    def __init__(self, reader: LogReader, arrivals: Arrivals | None) -> None:
        self.reader, self.arrivals = reader, arrivals
        self.scanner = FailureScanner()

    def feed(self, chunk: bytes) -> None:
        try:
            for piece in (chunk,) if self.arrivals is None else self.arrivals.pieces(chunk):
                self.reader.feed(piece)
        except Exception as error:  # a reader of somebody else's; one trial's log must not end the sweep
            raise SetupError(f"the reader of workload.log fails: {type(error).__name__}: {error}") from error
        self.scanner.feed(chunk)

    def run(self) -> RunLog:
        return self.reader.run()

    @property
    def states_seconds(self) -> bool:
        """Whether the log's lines say how many seconds its run had taken."""
        return isinstance(self.reader, LineReader) and self.reader.states_seconds


class LogFollower:
    """Follows ``path`` with readers made by ``make_reader``.

    begun: epoch seconds when the job started, where an earlier driver may have read the log, else None.
    grew_at: epoch seconds of the last growth seen. unreadable: why the file could not be read just now, "" when it
    could: one trial's log must not end the sweep.
    """

    def __init__(
        self, path: Path, make_reader: Callable[[], LogReader], now: float, *, begun: float | None = None
    ) -> None:
        self.path, self._make_reader, self._begun = path, make_reader, begun
        self._tail = LogTail(path, self._reader)
        self._train_points = 0
        self._run: RunLog | None = None
        self._made_at = -math.inf  # when the log was last read of which ``_run`` is made
        self._behind = False  # whether more was read since then
        self._restarts = 0
        self._told_guesses = 0.0
        self._shown: set[tuple[float, str]] = set()  # evals that the log has held
        self._pauses: tuple[tuple[int, int], ...] = ()
        self.grew_at = now
        self.unreadable = ""

    def incomplete(self) -> str:
        """Why the log does not hold what its job wrote any more; "" where nothing shows that."""
        if self._tail.deleted:
            return "the log was deleted before its job ended"
        if self._tail.restarts and self._shown - _identities(self.run()):
            return "the log was cut or replaced while its job ran: evals that it had shown are gone"
        return ""

    def ends(self) -> tuple[bytes, bytes, int]:
        """The log's first bytes, where it says whose it is, its last two, and its length; nothing where unreadable."""
        with contextlib.suppress(OSError), os.fdopen(open_regular(self.path), "rb") as file:
            head, size = file.read(HEAD_BYTES), file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 2))
            return head, file.read(2), size
        return b"", b"", 0

    @property
    def cut(self) -> bool:
        """Whether the log started over while its job ran: what it still shows of a failure may not be the cause."""
        return self._tail.restarts > 0

    def _reader(self) -> LogReader:
        """A reader of the log from its first byte; times that are kept belong to the file that was there first."""
        reader = self._make_reader()
        if not isinstance(reader, LineReader):
            return _ReaderAndScanner(reader, None)
        kept = self.path.with_name(f".{self.path.name}.times")
        if self._begun is None:
            with contextlib.suppress(OSError):  # none, or in a folder that takes none either
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
        """Whether the log has time stamps of its own; else its lines are timed as they come."""
        return self._read.arrivals is None

    @property
    def guessed_seconds(self) -> float:
        """How long nobody looked at a log without time stamps: times within are estimated. 0: none are."""
        return self._read.arrivals.guessed_seconds if self._read.arrivals else 0.0

    def unmatched(self, *, ended: bool) -> str:
        """Why nothing in the log is what the study says an eval looks like; "" where that cannot be said."""
        reader = self._read.reader
        return reader.unmatched.describe(ended=ended) if isinstance(reader, LineReader) else ""

    def newly_guessed(self) -> float:
        """What was added to ``guessed_seconds`` since the last call."""
        new, self._told_guesses = self.guessed_seconds - self._told_guesses, self.guessed_seconds
        return new

    def estimated_seconds(self, run: RunLog, seconds: float) -> float:
        """How many of the ``seconds`` since the start of ``run`` are estimated; 0 where the log states its times."""
        return self._of_arrivals(Arrivals.estimated, run, seconds) or 0.0

    def read_at_once(self, run: RunLog, seconds: float) -> float | None:
        """How long nobody had looked when the first ``seconds`` of ``run`` came at one look, with the end of the log.

        None where they came at several looks, where more came later, or where the log states its times.
        """
        return self._of_arrivals(Arrivals.at_once, run, seconds)

    def _of_arrivals(
        self, ask: Callable[[Arrivals, float, float], float | None], run: RunLog, seconds: float
    ) -> float | None:
        """What its arrivals say of the first ``seconds`` of ``run``; None where the log states its times."""
        if self._read.arrivals is None or self._read.states_seconds or run.run_start_ms is None:
            return None
        begin = run.run_start_ms / 1000
        return ask(self._read.arrivals, begin, begin + seconds)

    def poll(self, now: float, *, drain: bool = False, started: float | None = None, limit: int | None = None) -> int:
        """Read what is new; with ``drain`` everything there is, for a job that has ended. Returns how many bytes.

        started: epoch seconds at which the job did, as far as that is known. limit: bytes that are read at most; what
        is left is read with the next call, timed as it came.
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
        """Bytes that the log held when it was read last and that were not read yet."""
        return max(0, self._tail.size - self._tail.offset)

    def leave_out(self, pauses: Sequence[tuple[float, float]]) -> None:
        """The job stood still in these spans, epoch seconds in rising order: they are no part of the run's times."""
        known = tuple((round(1000 * begin), round(1000 * end)) for begin, end in pauses)
        if known != self._pauses:
            self._pauses, self._run = known, None

    @property
    def leaves_out_pauses(self) -> bool:
        """Whether the run's times are without its job's pauses: not where the log counts the seconds by itself."""
        return isinstance(self._read.reader, LeavesOutPauses) and not self._read.states_seconds

    def run(self) -> RunLog:
        """What the log says so far; with very many evals, what it said a while ago."""
        # Made anew only when there is more, or the file started over: a thousand logs are asked each second.
        if self._run is None or self._restarts != self._tail.restarts:
            self._pass_on_pauses()
            self._run, self._restarts = self._tail.reader.run(), self._tail.restarts
            self._shown |= _identities(self._run)
        return self._run

    def _pass_on_pauses(self) -> None:
        if isinstance(self._read.reader, LeavesOutPauses):
            self._read.reader.pauses = self._pauses

    def runs(self) -> tuple[RunLog, ...]:
        """Every run in the log, oldest first, where its format can hold several (``NEXP``)."""
        self._pass_on_pauses()
        reader = self._read.reader
        return reader.runs() if isinstance(reader, MllogReader) else (reader.run(),)

    def failures(self) -> FailureScanner:
        """The failure signatures seen so far."""
        return self._read.scanner

    def train_is_new(self) -> bool:
        """True when the train loss was reported since the last call."""
        count = len(self.run().train)
        new, self._train_points = count != self._train_points, count
        return new


def _identities(run: RunLog) -> set[tuple[float, str]]:
    """A run's evals by samples and loss, a loss that is no number included."""
    return {(point.samples, repr(point.loss)) for point in run.evals}
