"""What a driver saw while the database was away survives the driver too."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.base.errors import StoreError, SweepBusyError
from lora_tune.logs.run import Eval
from lora_tune.store import BufferedStore, Changes, Lease, Store, sqlite_url
from lora_tune.store.outage import read
from lora_tune.store.records import Attempt, Trial, TrialState, Verdict

NOW = 1_760_000_000.0


class Switch:
    """A store that can be taken away."""

    def __init__(self, inner: Store) -> None:
        self.inner, self.away = inner, False

    def __getattr__(self, name: str) -> Any:
        if self.away:
            raise StoreError("the database does not answer")
        return getattr(self.inner, name)


@pytest.fixture
def store(tmp_path: Path) -> Switch:
    inner = Store(sqlite_url(tmp_path / "sweep.db"))
    inner.begin("s", "d", "", NOW)
    return Switch(inner)


def trial(number: int, **values: Any) -> Trial:
    return replace(Trial(number=number, seed=number, tuned={}, parameters={}), **values)


def taken(store: Switch, owner: str = "node1 pid 1 start 1") -> Lease:
    return store.inner.take_lease("s", owner, NOW, dead=True)


def test_what_cannot_be_saved_is_on_disk_once_and_gone_when_it_is_saved(store: Switch, tmp_path: Path) -> None:
    file, lease = tmp_path / "unsaved.jsonl", taken(store)
    records = BufferedStore(store, file)  # type: ignore[arg-type]  # a store by its shape
    store.away = True
    running = trial(0, state=TrialState.RUNNING)
    changes = Changes(trials=(trial(0), running))
    for _ in range(600):  # ten minutes of ticks
        with pytest.raises(StoreError):
            records.save(lease, changes, NOW)
    assert len(file.read_text().splitlines()) == 1, "a tick that saw nothing new writes nothing"
    changes += Changes(evals=((0, 0, 0, Eval(1536.0, 0.95, 600.0)),))
    with pytest.raises(StoreError):
        records.save(lease, changes, NOW)
    assert len(file.read_text().splitlines()) == 2
    store.away = False
    records.save(lease, changes, NOW)
    assert not file.exists()
    found = store.inner.load("s")
    assert found is not None
    assert found.trials == {0: running}
    assert found.evals == {(0, 0): (Eval(1536.0, 0.95, 600.0),)}


def left_behind(store: Switch, file: Path, changes: Changes) -> Lease:
    """A driver that saw ``changes`` while the database was away, and died."""
    lease = taken(store)
    store.away = True
    with pytest.raises(StoreError):
        BufferedStore(store, file).save(lease, changes, NOW)  # type: ignore[arg-type]
    store.away = False
    return lease


def test_the_next_driver_saves_what_a_dead_one_left(store: Switch, tmp_path: Path) -> None:
    file = tmp_path / "unsaved.jsonl"
    ended = trial(0).finished(Verdict.CENSORED, "ran to its end", NOW)
    left_behind(store, file, Changes(trials=(ended,), attempts=(Attempt(trial=0, number=0, job_name="j", folder="f"),)))
    lease = taken(store)
    records = BufferedStore(store, file)  # type: ignore[arg-type]
    assert "1 trial changes" in records.recover(lease, NOW)
    found = store.inner.load("s")
    assert found is not None
    assert found.trials == {0: ended}
    assert not file.exists()
    assert records.recover(lease, NOW) == ""


def test_what_another_driver_has_overtaken_is_set_aside(store: Switch, tmp_path: Path) -> None:
    file = tmp_path / "unsaved.jsonl"
    old = left_behind(store, file, Changes(trials=(trial(0, state=TrialState.RUNNING),)))
    newer = trial(0).finished(Verdict.CENSORED, "seen by a driver on another host", NOW)
    store.inner.save(taken(store, "node2 pid 2 start 2"), Changes(trials=(newer,)), NOW)
    said = BufferedStore(store, file).recover(taken(store), NOW)  # type: ignore[arg-type]
    assert "another driver has written since" in said
    assert (tmp_path / f"unsaved.jsonl.{old.token}").exists()
    found = store.inner.load("s")
    assert found is not None
    assert found.trials == {0: newer}


def test_a_driver_without_its_lease_recovers_nothing(store: Switch, tmp_path: Path) -> None:
    file = tmp_path / "unsaved.jsonl"
    left_behind(store, file, Changes(trials=(trial(0),)))
    lost = taken(store)
    taken(store, "node2 pid 2 start 2")
    with pytest.raises(SweepBusyError):
        BufferedStore(store, file).recover(lost, NOW)  # type: ignore[arg-type]
    assert file.exists()


def test_a_line_that_was_cut_by_a_power_cut_costs_that_line_only(store: Switch, tmp_path: Path) -> None:
    file = tmp_path / "unsaved.jsonl"
    left_behind(store, file, Changes(trials=(trial(0), trial(1))))
    file.write_text(file.read_text()[:-30])
    said = BufferedStore(store, file).recover(taken(store), NOW)  # type: ignore[arg-type]
    assert "1 damaged lines left out" in said
    found = store.inner.load("s")
    assert found is not None
    assert set(found.trials) == {0}


def test_neither_database_nor_disk_is_said(store: Switch, tmp_path: Path) -> None:
    lease = taken(store)
    store.away = True
    records = BufferedStore(store, tmp_path)  # type: ignore[arg-type]  # a folder: cannot be written as a file
    with pytest.raises(StoreError, match=r"does not answer; .*cannot be written either"):
        records.save(lease, Changes(trials=(trial(0),)), NOW)


@pytest.mark.skipif(os.geteuid() != 0 and not os.environ.get("CI"), reason="mounting needs root")
def test_a_full_disk_spoils_no_line_but_the_last(store: Switch, tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], check=True)
    try:
        lease, file = taken(store), place / "unsaved.jsonl"
        records = BufferedStore(store, file)  # type: ignore[arg-type]
        store.away = True
        made = [trial(n, sentence="x" * 25_000) for n in range(6)]
        said = []
        for n in range(6):
            with pytest.raises(StoreError) as refused:
                records.save(lease, Changes(trials=tuple(made[: n + 1])), NOW)
            said.append("No space left" in str(refused.value))
        assert said == [False, False, True, True, True, True]
        token, changes, _ = read(file)
        assert token == lease.token
        assert [t.number for t in changes.trials] == [0, 1]
        store.away = False
        records.save(lease, Changes(trials=tuple(made)), NOW)
    finally:
        subprocess.run(["umount", "-l", place], check=True)
    found = store.inner.load("s")
    assert found is not None
    assert set(found.trials) == set(range(6)), "what found no room on disk was still in memory"


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_without_a_crash(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    file.write_bytes(content)
    token, changes, _ = read(file)
    assert (token, changes) == (0, Changes())
