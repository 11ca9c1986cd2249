"""No tick without a bound: however long a log is, a look reads a part of it, and its lines keep their times."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.launchers.base import JobState, JobStatus, Ticket
from lora_tune.logs import arrival, follower
from lora_tune.logs.follower import LEAST_BYTES, STAMPED, TICK_BYTES, LogFollower, ReadBudget
from lora_tune.logs.readers import JsonLinesReader
from lora_tune.store.records import Verdict
from tests.controller.test_driver import House
from tests.fakes import FakeClock, FakeCluster, Script, command_study, curve_script
from tests.logs.test_arrivals import BEGAN, Clock, append, follow, lines

FOUR_GB = 4 << 30


class Counting(JsonLinesReader):
    """Counts the bytes that all readers made by one test are fed."""

    fed = 0

    def feed(self, chunk: bytes) -> None:
        Counting.fed += len(chunk)
        super().feed(chunk)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Bytes fed since the last call."""
    monkeypatch.setattr(Counting, "fed", 0)

    def since() -> int:
        fed, Counting.fed = Counting.fed, 0
        return fed

    return since


@pytest.mark.parametrize("begun", [None, BEGAN], ids=["followed from its start", "of an earlier driver"])
def test_a_log_of_4_gb_is_read_a_little_at_each_look(
    begun: float | None, tmp_path: Path, counted: Callable[[], int]
) -> None:
    log, clock, limit = tmp_path / "job.log", Clock(), 1 << 20
    append(log, lines(1, 3), BEGAN)
    os.truncate(log, FOUR_GB)
    clock.now += 3600.0  # nobody had looked
    followed = LogFollower(log, lambda: Counting(clock), clock.now, begun=begun)
    assert counted() <= arrival.SCANNED_BYTES + arrival.WINDOWS
    for _ in range(4):
        clock.now += 5.0
        assert followed.poll(clock.now, drain=True, limit=limit) == limit
        assert counted() <= limit + arrival.SCANNED_BYTES + arrival.WINDOWS
    assert followed.unread == FOUR_GB - 4 * limit
    assert len(followed.run().evals) == 3


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(40, 400))
def test_times_are_the_same_however_little_a_look_reads(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], limit: int
) -> None:
    """Property: what lay in the log at a look came by then, also where it is read with a later one."""
    runs = []
    for bytes_read in (None, limit):
        log, clock, done = tmp_path_factory.mktemp("log") / "job.log", Clock(), 0
        followed = follow(log, clock)
        for count in steps:
            clock.now += 10.0
            append(log, lines(done + 1, done + count), clock.now)
            done += count
            followed.poll(clock.now, limit=bytes_read)
        while followed.poll(clock.now, drain=True, limit=bytes_read):
            pass
        runs.append(followed.run())
    whole, little = runs
    assert whole.evals == little.evals
    assert len(whole.evals) == sum(steps)


def trained(header: int, count: int) -> bytes:
    words = b"".join(b"loading module %d of a long list\n" % number for number in range(header))
    return words + b"".join(
        json.dumps({"step": step, "eval_loss": 1.0, "what": "x" * (step % 7)}).encode() + b"\n"
        for step in range(1, count + 1)
    )


@pytest.mark.parametrize(("header", "count"), [(0, 20_000), (500, 20_000), (3000, 20_000)])
def test_windows_of_a_long_stretch_tell_when_its_lines_came(
    header: int, count: int, tmp_path: Path, counted: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "job.log"
    log.write_bytes(trained(header, count))
    size = log.stat().st_size
    whole = arrival.log_pieces(log, 0, size, lambda: Counting(Clock()))
    counted()
    monkeypatch.setattr(arrival, "SCANNED_BYTES", 64 << 10)
    sampled = arrival.log_pieces(log, 0, size, lambda: Counting(Clock()))
    assert counted() <= (64 << 10) + arrival.WINDOWS
    assert sampled[-1].end == size
    assert all(a.end < b.end and a.share <= b.share for a, b in pairwise(sampled))
    assert max(abs(share_at(sampled, at) - share_at(whole, at)) for at in range(0, size, size // 500)) < 0.05


def share_at(pieces: list[arrival.LogPiece], at: int) -> float:
    return next(piece.share for piece in pieces if piece.end > at)


@given(st.lists(st.tuples(st.integers(0, 1 << 24), st.booleans()), min_size=1, max_size=300))
def test_a_tick_reads_so_much_of_all_logs_together(logs: list[tuple[int, bool]]) -> None:
    """Property: whatever the logs hold. What one leaves over, those after it may have."""
    budget, spent = ReadBudget(len(logs)), 0
    for waits, stamped in logs:
        allowed = budget.allows(stamped=stamped)
        assert allowed >= LEAST_BYTES
        read = min(waits, allowed)
        budget.spent(read, stamped=stamped)
        spent += -(-read // STAMPED) if stamped else read
    assert spent <= max(TICK_BYTES, LEAST_BYTES * len(logs))


class Forgets(FakeCluster):
    """Knows nothing of a job after the first look at it that showed its end, as a controller after MinJobAge."""

    ended: frozenset[str] = frozenset()

    def _status(self, ticket: Ticket) -> JobStatus:
        status = super()._status(ticket)
        if ticket.name in self.ended:
            return JobStatus(state=JobState.LOST)
        if not status.state.alive:
            self.ended = self.ended | {ticket.name}
        return status


def chatty(environment: object, start: float) -> Script:
    """The ordinary trial, which prints thousands of lines at its end."""
    for at, line in curve_script(environment, start):  # type: ignore[arg-type]
        yield at, "\n".join([line, *("a module is unloaded" for _ in range(2000))])


def test_a_trial_is_concluded_when_its_log_is_read_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several ticks, in which the cluster forgets the job; the driver looks at others meanwhile."""
    sweeps = []
    for number, limit in enumerate((TICK_BYTES, 8192)):
        monkeypatch.setattr(follower, "TICK_BYTES", limit)
        (tmp_path / str(number)).mkdir()
        cluster = Forgets(FakeClock(), chatty)
        there = House(tmp_path / str(number), cluster, command_study(trials=3, parallel=2, attempts=1))
        there.driver().run()
        sweeps.append((cluster.polls, [(t.verdict, t.seconds) for t in there.sweep().trials.values()]))
    (polls, at_once), (more_polls, in_parts) = sweeps
    assert in_parts == at_once
    assert {verdict for verdict, _ in at_once} <= {Verdict.REACHED, Verdict.CENSORED, Verdict.CAPPED}
    assert more_polls > polls


def test_a_reader_that_is_fed_windows_sees_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a window cuts off may state another number than the line: step 12 of step 1234."""
    log = tmp_path / "job.log"
    log.write_bytes(trained(0, 3000))
    monkeypatch.setattr(arrival, "SCANNED_BYTES", 4096)
    text, size = log.read_bytes(), log.stat().st_size
    found = list(arrival._lines(log, 0, size))
    assert len(found) < 100
    assert all(text[at : at + len(line)] == line and line.endswith(b"\n") for at, line in found)
    assert all(at == 0 or text[at - 1 : at] == b"\n" for at, _ in found)
