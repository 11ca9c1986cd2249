"""Logs of scripts that print an eval at every step: what they cost is counted, not timed."""

from __future__ import annotations

from pathlib import Path

from lora_tune.logs.follower import EACH, LATER, LogFollower
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import RunLog
from lora_tune.logs.run_builder import RunBuilder

START = 1_700_000_000_000
STAMP = (
    ':::MLLOG {{"time_ms": {ms}, "event_type": "POINT_IN_TIME", '
    '"key": "{key}", "value": {value}, "metadata": {more}}}\n'
)


def evals(first: int, count: int) -> str:
    """The records of evals, one a second."""
    return "".join(
        STAMP.format(ms=START + 1000 * i, key="eval_accuracy", value=0.95, more=f'{{"samples_count": {8 * i}}}')
        for i in range(first, first + count)
    )


class Counted(float):
    """A number of samples that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: float) -> bool:
        Counted.compared += 1
        return float(self) < float(other)

    def __gt__(self, other: float) -> bool:
        Counted.compared += 1
        return float(self) > float(other)


def comparisons(count: int) -> int:
    """How many comparisons it takes to make the run of a log with this many evals, and a train loss before each."""
    builder = RunBuilder()
    builder.run_start = START
    for i in range(1, count + 1):
        builder.add_train(Counted(8 * i - 4), 1.0, START + 1000 * i - 500)
        builder.add_eval(Counted(8 * i), 0.95, START + 1000 * i)
    Counted.compared = 0
    assert len(builder.run().evals) == count
    return Counted.compared


def test_the_speeds_of_blocks_without_marks_cost_no_look_at_every_train_loss_for_every_eval() -> None:
    assert comparisons(1000) < 3 * comparisons(500)


class CountingReader(MllogReader):
    """A reader that counts the runs that are made of it."""

    made = 0

    def run(self) -> RunLog:
        CountingReader.made += 1
        return super().run()


def followed(path: Path, begin: int, looks: int) -> tuple[LogFollower, int]:
    """A log of ``begin`` evals that grows by one eval before each look, ten looks a second; and the runs made of it."""
    path.write_text(STAMP.format(ms=START, key="run_start", value="null", more="{}") + evals(1, begin))
    log = LogFollower(path, CountingReader, now=0.0)
    log.poll(0.0)
    log.run()
    CountingReader.made = 0
    for i in range(looks):
        with path.open("a") as file:
            file.write(evals(begin + 1 + i, 1))
        log.poll(i / 10)
        log.run()
    return log, CountingReader.made


def test_a_log_of_usual_length_is_read_whenever_there_is_more(tmp_path: Path) -> None:
    log, made = followed(tmp_path / "job.log", 50, looks=40)
    assert made == 40
    assert len(log.run().evals) == 90


def test_a_log_with_thousands_of_evals_waits_three_seconds_for_each_thousand(tmp_path: Path) -> None:
    _, made = followed(tmp_path / "job.log", 4 * EACH, looks=200)
    assert made <= 200 / 10 / (4 * LATER) + 1


def test_what_a_long_log_says_is_known_a_little_later_also_where_it_falls_silent_and_at_its_end(tmp_path: Path) -> None:
    log, _ = followed(tmp_path / "job.log", 2 * EACH, looks=5)
    assert len(log.run().evals) < 2 * EACH + 5
    log.poll(2 * LATER + 1)
    assert len(log.run().evals) == 2 * EACH + 5, "nothing new was printed meanwhile"
    with log.path.open("a") as file:
        file.write(evals(2 * EACH + 6, 1))
    log.poll(2 * LATER + 1.1)
    log.poll(2 * LATER + 1.1, drain=True)
    assert len(log.run().evals) == 2 * EACH + 6, "its job has ended"
