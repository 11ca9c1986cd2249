"""One running attempt's log: what it measured, and what went wrong in it, read once for both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lora_tune.diagnose import FailureScanner
from lora_tune.errors import SurroundingsError
from lora_tune.logtail import LogTail
from lora_tune.mllog import LogReader, MllogReader, Run


class _ReaderAndScanner:
    """Feeds the same bytes to a log reader and to the failure scanner."""

    def __init__(self, reader: LogReader) -> None:
        self.reader = reader
        self.scanner = FailureScanner()

    def feed(self, chunk: bytes) -> None:
        self.reader.feed(chunk)
        self.scanner.feed(chunk)

    def run(self) -> Run:
        return self.reader.run()


class FollowedLog:
    """Follows ``path`` with readers made by ``make_reader``.

    grew_at: epoch seconds of the last growth seen. unreadable: why the file could not be read just now, "" when it
    could: one trial's log must not end the sweep.
    """

    def __init__(self, path: Path, make_reader: Callable[[], LogReader], now: float) -> None:
        self._tail = LogTail(path, lambda: _ReaderAndScanner(make_reader()))
        self._train_points = 0
        self._run: Run | None = None
        self._restarts = 0
        self.grew_at = now
        self.unreadable = ""

    def poll(self, now: float, *, drain: bool = False) -> None:
        """Read what is new; with ``drain`` everything there is, for a job that has ended."""
        self.unreadable = ""
        try:
            while self._tail.poll():
                self.grew_at = now
                self._run = None
                if not drain:
                    return
        except SurroundingsError as error:
            self.unreadable = str(error)

    def run(self) -> Run:
        """What the log says so far."""
        # Made anew only when there is more, or the file started over: a thousand logs are asked each second.
        if self._run is None or self._restarts != self._tail.restarts:
            self._run, self._restarts = self._tail.reader.run(), self._tail.restarts
        return self._run

    def runs(self) -> tuple[Run, ...]:
        """Every run in the log, oldest first, where its format can hold several (``NEXP``)."""
        reader = self._tail.reader
        assert isinstance(reader, _ReaderAndScanner)
        return reader.reader.runs() if isinstance(reader.reader, MllogReader) else (reader.run(),)

    def failures(self) -> FailureScanner:
        """The failure signatures seen so far."""
        reader = self._tail.reader
        assert isinstance(reader, _ReaderAndScanner)
        return reader.scanner

    def train_is_new(self) -> bool:
        """True when the train loss was reported since the last call."""
        count = len(self.run().train)
        new, self._train_points = count != self._train_points, count
        return new
