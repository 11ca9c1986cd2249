"""One folder, one driver: across databases, processes and hosts, and after a death of any kind."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_tune.base import host
from lora_tune.base.errors import SetupError, SweepBusyError
from lora_tune.controller import sweep_folder
from lora_tune.controller.sweep_folder import FolderLock
from lora_tune.store import LEASE_SECONDS


class Steady:
    """The clock that nobody sets, and waiting on it; ``meanwhile`` is what others do in a second of it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.meanwhile: list[FolderLock] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for lock in self.meanwhile:
            lock.touch()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Steady:
    made = Steady()
    monkeypatch.setattr(sweep_folder, "steady", lambda: made.now)
    return made


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What follows happens on another host."""
    with monkeypatch.context() as patch:
        patch.setattr(host, "host", lambda: "login2")
        patch.setattr(host, "place", lambda: "another boot/pid:[7]")
        yield patch


def lock_in(folder: Path, about: str = "study a, records in X") -> FolderLock:
    return FolderLock(folder / "driver.lock", about)


def test_a_second_driver_is_refused_with_who_is_at_work(tmp_path: Path, clock: Steady) -> None:
    first = lock_in(tmp_path)
    first.take(clock.sleep)
    clock.meanwhile = [first]
    with pytest.raises(SweepBusyError, match=rf"pid {os.getpid()} \(study a, records in X\).*--output"):
        lock_in(tmp_path, "study a, records in Y").take(clock.sleep)
    first.release()
    lock_in(tmp_path).take(clock.sleep)


def test_an_owner_that_vanished_with_its_host_is_taken_over_and_stops_when_it_comes_back(
    tmp_path: Path, clock: Steady, elsewhere: pytest.MonkeyPatch
) -> None:
    first, second = lock_in(tmp_path), lock_in(tmp_path)
    first.take(clock.sleep)
    elsewhere.undo()
    before = clock.now
    second.take(clock.sleep)
    assert LEASE_SECONDS <= clock.now - before <= LEASE_SECONDS + 1
    with pytest.raises(SweepBusyError, match="was taken over by"):
        first.check()
    first.release()
    second.check()


def test_an_owner_of_another_host_that_lives_keeps_its_folder(
    tmp_path: Path, clock: Steady, elsewhere: pytest.MonkeyPatch
) -> None:
    first = lock_in(tmp_path)
    first.take(clock.sleep)
    elsewhere.undo()
    clock.meanwhile = [first]
    with pytest.raises(SweepBusyError, match="login2"):
        lock_in(tmp_path).take(clock.sleep)


def test_a_dead_process_of_this_host_is_taken_over_at_once(tmp_path: Path, clock: Steady) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_take_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert (tmp_path / "driver.lock").exists()
    before = clock.now
    lock_in(tmp_path).take(clock.sleep)
    assert clock.now == before


def _take_and_die(folder: Path) -> None:
    lock_in(folder).take()
    os._exit(9)


@pytest.mark.parametrize("place", ["a boot/pid:[7]", "yesterday"])
def test_a_process_of_another_boot_or_pid_namespace_is_another_hosts(tmp_path: Path, clock: Steady, place: str) -> None:
    """Containers on the network of their host have its name: whoever came second took the folder at once."""
    first = lock_in(tmp_path)
    first.take(clock.sleep)
    path = tmp_path / "driver.lock"
    record = {**json.loads(path.read_text()), "pid": 2**22, "place": place}
    path.write_text(json.dumps(record))
    before = clock.now
    lock_in(tmp_path).take(clock.sleep)
    assert LEASE_SECONDS <= clock.now - before <= LEASE_SECONDS + 1


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"{", b"[]", b"{}", b'{"token": 5, "pid": "x"}'])
def test_a_damaged_lock_keeps_nobody_out(content: bytes, tmp_path: Path, clock: Steady) -> None:
    (tmp_path / "driver.lock").write_bytes(content)
    lock_in(tmp_path).take(clock.sleep)


def test_a_lock_file_that_somebody_removed_is_made_again(tmp_path: Path, clock: Steady) -> None:
    first = lock_in(tmp_path)
    first.take(clock.sleep)
    (tmp_path / "driver.lock").unlink()
    first.touch()
    clock.meanwhile = [first]
    with pytest.raises(SweepBusyError):
        lock_in(tmp_path).take(clock.sleep)


def test_a_folder_that_somebody_removed_stops_its_driver_and_says_what_to_do(tmp_path: Path, clock: Steady) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    lock = lock_in(folder)
    lock.take(clock.sleep)
    shutil.rmtree(folder)
    clock.now += LEASE_SECONDS
    with pytest.raises(SetupError, match=r"sweep was removed while its sweep ran.*rerun it without the folder"):
        lock.check()


@pytest.mark.parametrize("round_", range(5))
def test_of_drivers_that_start_at_one_instant_exactly_one_works(round_: int, tmp_path: Path, clock: Steady) -> None:
    barrier, locks = threading.Barrier(4), [lock_in(tmp_path) for _ in range(4)]
    taken: list[FolderLock] = []

    def race(lock: FolderLock) -> None:
        barrier.wait()
        with contextlib.suppress(SweepBusyError):
            lock.take(lambda _: [winner.touch() for winner in taken])
            taken.append(lock)

    threads = [threading.Thread(target=race, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    taken[0].touch()
