"""A log without time stamps is timed by when it was read; a driver that starts anew must not time it again."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_tune.logs.follower import LogFollower
from lora_tune.logs.lines import make_reader
from lora_tune.logs.readers import JsonLinesReader
from lora_tune.logs.run import LogReader, RunLog

BEGAN = 1_760_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = BEGAN

    def __call__(self) -> float:
        return self.now


def lines(first: int, last: int) -> bytes:
    records = ({"step": step, "eval_loss": 2 - step / 10} for step in range(first, last + 1))
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def append(log: Path, data: bytes, at: float) -> None:
    with log.open("ab") as file:
        file.write(data)
    os.utime(log, (at, at))


def follow(log: Path, clock: Clock, begun: float | None = None) -> LogFollower:
    def reader() -> LogReader:
        return make_reader("jsonl", clock=clock, global_batch_size=8)

    return LogFollower(log, reader, clock.now, begun=begun)


def watched(log: Path, clock: Clock) -> RunLog:
    """A driver that reads ten evals, one every ten seconds."""
    followed = follow(log, clock)
    for step in range(1, 11):
        clock.now += 10.0006
        append(log, lines(step, step), clock.now)
        followed.poll(clock.now)
    return followed.run()


def seconds(run: RunLog) -> list[float]:
    return [round(e.seconds, 3) for e in run.evals]


def test_a_second_driver_reads_the_times_of_the_first(tmp_path: Path) -> None:
    log, clock = tmp_path / "job.log", Clock()
    first = watched(log, clock)
    assert seconds(first)[:3] == pytest.approx([0, 10, 20], abs=0.01)
    clock.now += 3600
    second = follow(log, clock, begun=BEGAN)
    second.poll(clock.now)
    assert second.run().evals == first.evals
    assert second.run().run_start_ms == first.run_start_ms
    assert second.guessed_seconds == 0


def test_what_came_while_nobody_looked_is_spread_over_that_time(tmp_path: Path) -> None:
    log, clock = tmp_path / "job.log", Clock()
    first = watched(log, clock)
    left = clock.now
    append(log, lines(11, 20), left + 100)
    clock.now += 5000  # the job ended long ago
    second = follow(log, clock, begun=BEGAN)
    second.poll(clock.now)
    found = second.run().evals
    assert found[:10] == first.evals
    steps = [b.seconds - a.seconds for a, b in pairwise(found[9:])]
    assert sum(steps) == pytest.approx(100, abs=0.01)
    assert steps == pytest.approx([10] * 10, abs=4), "their lines differ in length"
    assert second.guessed_seconds == pytest.approx(100, abs=0.01)
    third = follow(log, clock, begun=BEGAN)
    third.poll(clock.now)
    assert third.run().evals == found, "and that, too, is kept"


def test_a_trial_that_nobody_saw_at_all_did_not_take_no_time(tmp_path: Path) -> None:
    log, clock = tmp_path / "job.log", Clock()
    append(log, lines(1, 10), BEGAN + 300)
    clock.now = BEGAN + 9000
    followed = follow(log, clock, begun=BEGAN)
    followed.poll(clock.now)
    assert followed.run().evals[-1].seconds == pytest.approx(270, abs=15)
    assert followed.read_at_once(followed.run(), 270.0) == pytest.approx(9000), "nobody looked before"


@pytest.mark.parametrize("frozen", [15.0, 60.0])
def test_a_driver_that_stood_still_does_not_time_a_run_by_its_own_sleep(tmp_path: Path, frozen: float) -> None:
    """A run of one second, of which the driver saw the first line, and the others when it went on."""
    log, clock = tmp_path / "job.log", Clock()
    followed = follow(log, clock)
    append(log, lines(1, 1), clock.now)
    followed.poll(clock.now)
    append(log, lines(2, 11), clock.now + 1.0)
    clock.now += frozen
    followed.poll(clock.now)
    run = followed.run()
    assert run.evals[-1].seconds == pytest.approx(1.0, abs=0.01)
    assert followed.estimated_seconds(run, run.evals[-1].seconds) == pytest.approx(1.0, abs=0.01)
    assert followed.newly_guessed() == pytest.approx(1.0, abs=0.01)
    assert followed.newly_guessed() == 0
    again = follow(log, clock, begun=BEGAN)
    again.poll(clock.now)
    assert again.run().evals == run.evals
    assert again.estimated_seconds(again.run(), 0.5) == pytest.approx(0.5, abs=0.01), "the mark is kept, too"


HEADER = b"".join(b"transformer.h.%d.attn.q_proj: Linear(4096, 4096)\n" % layer for layer in range(400))
"""What a script prints at once before it trains: far more than all of its evals."""


def unseen_times(log: Path, before: bytes, after: bytes = b"") -> tuple[list[float], float]:
    """Seconds of ten evals that a driver finds printed between ``before`` and ``after`` when it comes back.

    The job began 100 s ago and trained evenly. Also how many of the seconds to the last eval are estimated.
    """
    clock = Clock()
    append(log, before + lines(1, 10) + after, BEGAN + 100)
    clock.now += 500
    followed = follow(log, clock, begun=BEGAN)
    followed.poll(clock.now)
    run = followed.run()
    return seconds(run), followed.estimated_seconds(run, run.evals[-1].seconds)


@pytest.mark.parametrize("before", [HEADER, HEADER.replace(b"\n", b" ") + b"\n", HEADER.replace(b"\n", b"\r")])
@pytest.mark.parametrize("after", [b"", HEADER])
def test_a_header_that_came_at_once_takes_no_time_from_the_training(
    tmp_path: Path, before: bytes, after: bytes
) -> None:
    """By bytes the evals would all have come in the last second, or, before a summary, in the first."""
    times, estimated = unseen_times(tmp_path / "job.log", before, after)
    assert times == pytest.approx(range(10, 101, 10), abs=0.01)
    assert estimated == pytest.approx(100, abs=0.01)


def test_a_header_alone_came_when_the_job_began_as_far_as_anybody_knows(tmp_path: Path) -> None:
    """The driver comes back before the first eval, and a run that it did not see begin is not the fastest for that."""
    log, clock = tmp_path / "job.log", Clock()
    append(log, HEADER, BEGAN + 60)
    clock.now += 60
    followed = follow(log, clock, begun=BEGAN)
    followed.poll(clock.now)
    clock.now += 40
    append(log, lines(1, 1), clock.now)
    followed.poll(clock.now)
    assert seconds(followed.run()) == pytest.approx([100], abs=0.01)
    assert followed.estimated_seconds(followed.run(), 100) == pytest.approx(100, abs=0.01)


def test_nothing_came_before_its_job_began(tmp_path: Path) -> None:
    """A busy driver looked while the job was queued, and again when it was over: the log seemed longer than the job."""
    log, clock = tmp_path / "job.log", Clock()
    followed = follow(log, clock)
    followed.poll(clock.now)
    append(log, HEADER + lines(1, 10), clock.now + 12)
    clock.now += 15
    followed.poll(clock.now, started=BEGAN + 5)
    assert seconds(followed.run())[-1] == pytest.approx(7, abs=0.01)


def test_a_line_cut_where_nobody_looked_any_more_is_not_read_as_another_number(tmp_path: Path) -> None:
    log, clock = tmp_path / "job.log", Clock()

    def reader() -> LogReader:
        return make_reader("regex", clock=clock, eval=r"(?P<step>[0-9]+)/9000 loss (?P<loss>[0-9.]+)")

    append(log, b"1000/9000 loss 2.0\n11", clock.now)
    followed = LogFollower(log, reader, clock.now)
    followed.poll(clock.now)
    append(log, b"".join(b"%d00/9000 loss 1.9\n" % n for n in range(11, 21))[2:], clock.now + 100)
    clock.now += 200
    followed.poll(clock.now)
    assert seconds(followed.run())[1:] == pytest.approx(range(10, 101, 10), abs=12)


def test_what_is_read_as_it_comes_is_no_estimate(tmp_path: Path) -> None:
    log, clock = tmp_path / "job.log", Clock()
    followed = follow(log, clock)
    for step in range(1, 40):
        clock.now += 0.9
        append(log, lines(step, step), clock.now)
        followed.poll(clock.now)
    assert followed.guessed_seconds == 0
    assert followed.estimated_seconds(followed.run(), 30.0) == 0


def test_a_short_run_between_two_looks_took_time(tmp_path: Path) -> None:
    """A busy driver looked every 1.5 s: a run of one second began and ended in between."""
    log, clock = tmp_path / "job.log", Clock()
    followed = follow(log, clock)
    followed.poll(clock.now)
    append(log, lines(1, 11), clock.now + 1.2)
    clock.now += 1.5
    followed.poll(clock.now)
    run = followed.run()
    assert run.evals[-1].seconds == pytest.approx(1.1, abs=0.05), "11 lines in the 1.2 s up to the file's last write"
    assert followed.read_at_once(run, run.evals[-1].seconds) == pytest.approx(1.5)
    assert followed.guessed_seconds == 0, "it is no less exact than the looks are"
    clock.now += 1.5
    append(log, lines(12, 12), clock.now)
    followed.poll(clock.now)
    assert followed.read_at_once(run, run.evals[-1].seconds) is None, "what goes on was not held back"


def test_the_times_kept_of_a_log_with_many_lines_do_not_grow_with_its_lines(tmp_path: Path) -> None:
    """Each look at a log that states 400 steps kept 400 times, and opened their file as often."""
    log, clock = tmp_path / "log", Clock()
    followed = follow(log, clock)
    kept = []
    for look in range(40):
        clock.now += 10
        append(log, lines(1 + 400 * look, 400 + 400 * look), clock.now)
        followed.poll(clock.now)
        kept.append(len((tmp_path / ".log.times").read_text().splitlines()))
    assert kept[0] >= 300, "each of the first looks is a large part of the log"
    assert kept[-1] - kept[-11] <= 10 * 50


class Fails(JsonLinesReader):
    """A reader of somebody else's."""

    def feed(self, chunk: bytes) -> None:
        if b"boom" in chunk:
            raise KeyError("boom")
        super().feed(chunk)


@pytest.mark.parametrize("begun", [None, BEGAN - 60], ids=["watched", "taken over"])
def test_a_reader_that_fails_on_lines_that_nobody_saw_come_makes_its_log_unreadable(
    tmp_path: Path, begun: float | None
) -> None:
    """It raised while their times were estimated, before its follower knew: the sweep ended, and on every rerun."""
    log, clock = tmp_path / "log", Clock()
    if begun:
        append(log, lines(1, 3) + b"boom\n", clock.now)
    followed = LogFollower(log, lambda: Fails(clock=clock, global_batch_size=8), clock.now, begun=begun)
    clock.now += 10
    append(log, lines(4, 5) + b"boom\n", clock.now)
    followed.poll(clock.now)
    assert "the reader of workload.log fails: KeyError" in followed.unreadable


def test_a_log_that_states_its_seconds_needs_no_estimate(tmp_path: Path) -> None:
    log, clock = tmp_path / "job.log", Clock()
    followed = follow(log, clock)
    followed.poll(clock.now)
    records = ({"step": step, "eval_loss": 2 - step / 10, "seconds": step} for step in range(1, 5))
    append(log, b"".join(json.dumps(record).encode() + b"\n" for record in records), clock.now + 4)
    clock.now += 60
    followed.poll(clock.now)
    assert seconds(followed.run()) == [1, 2, 3, 4]
    assert followed.estimated_seconds(followed.run(), 4.0) == 0


def test_what_comes_after_the_second_driver_began_is_timed_as_it_comes(tmp_path: Path) -> None:
    log, clock = tmp_path / "job.log", Clock()
    watched(log, clock)
    clock.now += 50
    second = follow(log, clock, begun=BEGAN)
    second.poll(clock.now)
    clock.now += 7
    append(log, lines(11, 11), clock.now)
    second.poll(clock.now)
    *_, before, last = second.run().evals
    assert last.seconds - before.seconds == pytest.approx(57, abs=0.01)


def test_a_log_that_starts_over_is_timed_anew(tmp_path: Path) -> None:
    log, clock = tmp_path / "job.log", Clock()
    followed = follow(log, clock)
    append(log, lines(1, 9), clock.now)
    followed.poll(clock.now)
    log.write_bytes(b"")
    clock.now += 100
    followed.poll(clock.now)
    for step in (1, 2):
        clock.now += 5
        append(log, lines(step, step), clock.now)
        followed.poll(clock.now)
    assert seconds(followed.run()) == pytest.approx([0, 5])
    again = follow(log, clock, begun=BEGAN)
    again.poll(clock.now)
    assert again.run().evals == followed.run().evals


def test_another_file_than_the_one_whose_times_are_known(tmp_path: Path) -> None:
    log, clock = tmp_path / "job.log", Clock()
    watched(log, clock)
    log.unlink()
    append(log, lines(1, 2), clock.now + 10)
    clock.now += 20
    second = follow(log, clock, begun=clock.now - 20)
    second.poll(clock.now)
    assert seconds(second.run()) == pytest.approx([0, 5], abs=1)
    for step in range(3, 15):
        clock.now += 10
        append(log, lines(step, step), clock.now)
        second.poll(clock.now)
    third = follow(log, clock, begun=BEGAN)
    third.poll(clock.now)
    assert third.run().evals == second.run().evals, "the times of the file that is gone are forgotten"


def test_a_log_with_time_stamps_needs_no_times(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    append(log, b':::MLLOG {"time_ms": 1}\n', BEGAN)
    LogFollower(log, lambda: make_reader("mllog"), BEGAN, begun=BEGAN).poll(BEGAN)
    assert [p.name for p in tmp_path.iterdir()] == ["job.log"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    cuts=st.lists(st.tuples(st.integers(0, 700), st.floats(0, 1000)), max_size=12),
    damaged=st.integers(0, 400),
)
def test_however_it_came_and_whatever_was_kept_every_byte_is_read_once(
    tmp_path: Path, data: st.DataObject, cuts: list[tuple[int, float]], damaged: int
) -> None:
    folder = tmp_path / str(data.draw(st.integers(0, 10**12)))
    folder.mkdir(exist_ok=True)
    log, clock, whole = folder / "job.log", Clock(), lines(1, 20)
    log.unlink(missing_ok=True)
    followed = follow(log, clock)
    sent = 0
    for size, wait in cuts:
        clock.now += wait
        append(log, whole[sent : sent + size], clock.now)
        sent += size
        followed.poll(clock.now)
    kept = folder / ".job.log.times"
    if kept.exists():
        kept.write_bytes(kept.read_bytes()[:damaged])
    append(log, whole[sent:], clock.now)
    clock.now += 1
    second = follow(log, clock, begun=BEGAN)
    second.poll(clock.now)
    run = second.run()
    assert [e.samples for e in run.evals] == [8.0 * s for s in range(1, 21)]
    times = [e.seconds for e in run.evals]
    assert times == sorted(times)
    assert run.dropped_lines == 0


@pytest.mark.parametrize("begun", [None, BEGAN], ids=["in the course of it", "before its driver began"])
def test_a_pipe_where_the_times_are_kept_stops_nobody(tmp_path: Path, begun: float | None) -> None:
    """A trial that made it there stopped its driver for good."""
    clock, log, kept = Clock(), tmp_path / "job.log", tmp_path / ".job.log.times"
    append(log, lines(1, 1), clock.now)
    first = follow(log, clock)
    first.poll(clock.now)
    kept.unlink()
    os.mkfifo(kept)
    followed = first if begun is None else follow(log, clock, begun)
    append(log, lines(2, 2), clock.now)
    followed.poll(clock.now)
    assert len(followed.run().evals) == 2


def test_the_times_are_not_written_to_where_a_link_points(tmp_path: Path) -> None:
    clock, log, kept, other = Clock(), tmp_path / "job.log", tmp_path / ".job.log.times", tmp_path / "other"
    followed = follow(log, clock)
    other.write_text("")
    kept.symlink_to(other)
    append(log, lines(1, 1), clock.now)
    followed.poll(clock.now)
    assert other.read_text() == ""
