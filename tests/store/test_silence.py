"""A server that is there and says nothing: its processes are stopped, its host's kernel acknowledges every packet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from lora_tune.base.errors import StoreError, SweepBusyError
from lora_tune.search.optuna_tables import OptunaTables
from lora_tune.store import BufferedStore, Changes, Store, engine, silence
from lora_tune.store.records import Trial
from tests.builders import study_of, sweep_of
from tests.postgres import Postgres
from tests.waiting import wait_for

pytestmark = pytest.mark.postgres

NOW = 1_760_000_000.0
LIMIT = 1.0
PATIENT = 60.0
"""Seconds that a busy machine may take over what waits for one limit; without the limit it would wait for ever."""


@pytest.fixture
def quick(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[Postgres]:
    """A server that may be silent for a second; connecting may take two, the least that psycopg knows."""
    monkeypatch.setattr(silence, "SILENCE_SECONDS", LIMIT)
    monkeypatch.setitem(engine._PATIENCE, "connect_timeout", "2")
    yield postgres
    postgres.thaw()
    wait_for(lambda: not silent(), 20, "nobody asks any more")


def silent() -> bool:
    return any(server.silent for server in silence._servers.values())


def trial(number: int, **values: Any) -> Trial:
    return Trial(number=number, seed=number, tuned={}, parameters={}, **values)


def refused(action: Callable[[], object], error: type[Exception] = StoreError) -> float:
    """Seconds after which ``action`` failed."""
    began = time.monotonic()
    with pytest.raises(error):
        action()
    return time.monotonic() - began


def test_a_save_fails_within_the_limit_and_nothing_waits_after_it(
    quick: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(quick.new_database())
    store.begin("s", "d", "", NOW)
    lease = store.take_lease("s", "node1 pid 1 start 1", NOW)
    records = BufferedStore(store, tmp_path / "unsaved.jsonl")
    records.save(lease, Changes(trials=(trial(0),)), NOW)
    quick.freeze()
    changes = Changes(trials=(trial(0, sentence="seen while it was frozen"), trial(1)))
    assert LIMIT <= refused(lambda: records.save(lease, changes, NOW)) < PATIENT
    monkeypatch.setattr(silence, "SILENCE_SECONDS", 10 * PATIENT)
    ticks = [refused(lambda: records.save(lease, changes, NOW)) for _ in range(20)]
    assert sum(ticks) < PATIENT, "one wait for an outage, not one a tick"
    assert len((tmp_path / "unsaved.jsonl").read_text().splitlines()) == 2
    quick.thaw()
    wait_for(lambda: not silent(), 20, "it is heard again")
    records.save(lease, changes, NOW)
    found = store.load("s")
    store.close()
    assert found is not None
    assert [t.sentence for t in found.trials.values()] == ["seen while it was frozen", ""]
    assert not (tmp_path / "unsaved.jsonl").exists()


def test_a_driver_that_was_overtaken_meanwhile_is_fenced(quick: Postgres) -> None:
    url = quick.new_database()
    store = Store(url)
    store.begin("s", "d", "", NOW)
    lease = store.take_lease("s", "node1 pid 1 start 1", NOW)
    quick.freeze()
    refused(lambda: store.save(lease, Changes(trials=(trial(0),)), NOW))
    quick.thaw()
    wait_for(lambda: not silent(), 20, "it is heard again")
    other = Store(url)
    taken = other.take_lease("s", "node2 pid 2 start 2", NOW, dead=True)
    with pytest.raises(SweepBusyError, match="taken over by another driver"):
        store.save(lease, Changes(trials=(trial(0),)), NOW)
    other.save(taken, Changes(), NOW)
    found = other.load("s")
    assert found is not None
    assert found.trials == {}
    store.close()
    other.close()


@pytest.mark.parametrize("moment", ["a commit", "a rollback", "many rows", "reading"])
def test_whatever_waits_for_the_server_is_limited(quick: Postgres, moment: str) -> None:
    with engine.translated(""):
        made = engine.writing_engine(engine.parse_url(quick.new_database()))
        with made.begin() as connection:
            connection.execute(sa.text("CREATE TABLE t (n integer)"))
    doing: dict[str, Callable[[sa.Connection], object]] = {
        "a commit": lambda c: c.commit(),
        "a rollback": lambda c: c.rollback(),
        "many rows": lambda c: c.execute(sa.text("INSERT INTO t VALUES (:n)"), [{"n": n} for n in range(50_000)]),
        "reading": lambda c: c.execute(sa.text("SELECT * FROM t")).all(),
    }
    connection = made.connect()
    connection.execute(sa.text("INSERT INTO t VALUES (1)"))
    quick.freeze()
    assert refused(lambda: doing[moment](connection), sa.exc.OperationalError) < PATIENT
    connection.close()
    made.dispose()


def test_connecting_is_limited_and_is_then_refused_at_once(quick: Postgres) -> None:
    url = quick.new_database()
    quick.freeze()
    assert refused(lambda: Store(url)) < PATIENT
    with pytest.raises(StoreError, match="retrying until it does"):
        Store(url)
    quick.thaw()
    wait_for(lambda: not silent(), 20, "it is heard again")
    Store(url).close()


def test_a_server_that_ends_while_it_is_silent_is_refused_as_usual(quick: Postgres) -> None:
    url = quick.new_database()
    quick.freeze()
    refused(lambda: Store(url))
    quick.stop()
    wait_for(lambda: not silent(), 20, "it is known to be gone")
    with pytest.raises(StoreError, match="refused"):
        Store(url)


def test_making_tables_has_more_time(quick: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program holds the lock under which tables are made for longer than a statement may take."""
    url = quick.new_database()
    Store(url).close()
    with engine.translated(""):
        other = engine.writing_engine(engine.parse_url(url))
        with engine.exclusive(other):
            opening = threading.Thread(target=lambda: Store(url).close())
            opening.start()
            opening.join(2 * LIMIT)
            assert opening.is_alive()
            assert not silent()
    opening.join(20)
    assert not opening.is_alive()
    other.dispose()


def test_no_trial_is_shown_twice_in_optunas_tables(quick: Postgres) -> None:
    """The server commits what the client has given up: the rows are in the database, and nobody was told."""
    url, study = quick.new_database(), study_of()
    sweep = sweep_of(study, trials=4, running=2)
    store = Store(url)
    store.begin(study.name, "d", "", NOW)
    tables = OptunaTables(study, store, store.take_lease(study.name, "tests", NOW))
    assert tables.follow(replace(sweep, trials={0: sweep.trials[0]})) == ""

    def freeze(_connection: sa.Connection) -> None:
        quick.freeze()

    sa.event.listen(store._engine, "commit", freeze)
    assert "could not be brought up to date" in tables.follow(sweep)
    sa.event.remove(store._engine, "commit", freeze)
    quick.thaw()
    wait_for(lambda: not silent(), 20, "it is heard again")
    assert quick.execute(url, "SELECT count(*) FROM trials") == [(4,)], "the commit that nobody heard of"
    assert tables.follow(sweep) == ""
    assert quick.execute(url, "SELECT number FROM trials ORDER BY trial_id") == [(0,), (1,), (2,), (3,)]
    store.close()
