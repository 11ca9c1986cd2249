"""Following a log file that does what log files do: appear late, grow, vanish, shrink, and be replaced."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_tune.base.errors import SetupError
from lora_tune.logs import follower as logtail
from lora_tune.logs.follower import LogTail
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import RunLog

EVAL = b':::MLLOG {"time_ms": %d, "key": "eval_accuracy", "value": %f, "metadata": {"samples_count": %d}}\n'


class Bytes:
    """A reader that keeps what it is fed, and the size of the largest piece."""

    def __init__(self) -> None:
        self.fed = b""
        self.largest = 0

    def feed(self, chunk: bytes) -> None:
        self.fed += chunk
        self.largest = max(self.largest, len(chunk))

    def run(self) -> RunLog:
        return RunLog()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "job.log"


def fed(tail: LogTail) -> bytes:
    assert isinstance(tail.reader, Bytes)
    return tail.reader.fed


def test_a_file_that_is_not_there_yet_is_waited_for(log: Path) -> None:
    tail = LogTail(log, Bytes)
    assert not tail.poll()
    assert not LogTail(log / "below" / "a" / "file", Bytes).poll()
    log.write_bytes(b"first\n")
    assert tail.poll()
    assert fed(tail) == b"first\n"
    assert not LogTail(log / "below" / "a" / "file", Bytes).poll(), "a file where a folder should be"


def test_each_poll_reads_only_what_is_new(log: Path) -> None:
    tail = LogTail(log, Bytes)
    log.write_bytes(b"one\ntw")
    assert tail.poll()
    assert not tail.poll()
    assert tail.offset == 6
    with log.open("ab") as file:
        file.write(b"o\n")
    assert tail.poll()
    assert fed(tail) == b"one\ntwo\n"
    assert tail.offset == 8


def test_a_line_cut_between_two_polls_is_one_record(log: Path) -> None:
    tail = LogTail(log, MllogReader)
    line = EVAL % (1000, 0.93, 1536)
    with log.open("wb", buffering=0) as file:
        for byte in line:
            file.write(bytes([byte]))
            tail.poll()
    assert [(e.samples, e.loss) for e in tail.reader.run().evals] == [(1536, 0.93)]


def test_a_file_that_vanishes_leaves_what_was_read(log: Path) -> None:
    tail = LogTail(log, MllogReader)
    log.write_bytes(EVAL % (1000, 0.93, 1536))
    tail.poll()
    log.unlink()
    assert not tail.poll()
    assert len(tail.reader.run().evals) == 1


@pytest.mark.parametrize("second", [b"second\n", b"second attempt, and a longer one\n"], ids=["shorter", "grown past"])
def test_a_truncated_file_is_read_from_its_start_by_a_fresh_reader(log: Path, second: bytes) -> None:
    tail = LogTail(log, Bytes)
    log.write_bytes(b"first attempt\n")
    tail.poll()
    with log.open("r+b") as file:  # the same inode
        file.truncate(0)
        file.write(second)
    assert tail.poll()
    assert fed(tail) == second
    assert tail.restarts == 1


def test_another_file_in_its_place_is_read_from_its_start(log: Path, tmp_path: Path) -> None:
    tail = LogTail(log, Bytes)
    log.write_bytes(b"first\n")
    tail.poll()
    other = tmp_path / "other"
    other.write_bytes(b"first\nsecond\n")  # longer, with the same beginning
    other.replace(log)
    tail.poll()
    assert fed(tail) == b"first\nsecond\n"


def test_a_poll_reads_a_bounded_piece_of_a_bounded_size(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logtail, "POLL_BYTES", 1000)
    monkeypatch.setattr(logtail, "CHUNK_BYTES", 300)
    log.write_bytes(os.urandom(2500))
    tail = LogTail(log, Bytes)
    offsets = []
    while tail.poll():
        offsets.append(tail.offset)
    assert offsets == [1000, 2000, 2500]
    assert isinstance(tail.reader, Bytes)
    assert tail.reader.largest == 300
    assert fed(tail) == log.read_bytes()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Path.mkdir, "not a regular file"),
        (os.mkfifo, "not a regular file"),
        (lambda log: log.symlink_to(log), "may read"),
    ],
    ids=["a folder", "a pipe", "a link to itself"],
)
def test_what_cannot_be_read_is_an_error_that_says_so_and_stops_no_driver(
    log: Path, make: Callable[[Path], object], words: str
) -> None:
    make(log)
    with pytest.raises(SetupError, match=words):
        LogTail(log, Bytes).poll()
