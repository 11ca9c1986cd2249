"""Databases of every released schema become one of today, on SQLite and on PostgreSQL."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from lora_tune.base.errors import StoreError, SweepBusyError
from lora_tune.store import SCHEMA_VERSION, Changes, Store, sqlite_url
from lora_tune.store import schema as tables
from lora_tune.store.records import TrialState, Verdict
from tests.conftest import REPOSITORY
from tests.postgres import Postgres

GOLDEN = sorted((REPOSITORY / "tests" / "golden").glob("store_schema_*.sql"))


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    """Makes a database of SQL statements, and returns its URL."""
    if request.param == "sqlite":

        def fill(text: str) -> str:
            with contextlib.closing(sqlite3.connect(tmp_path / "old.db")) as connection:
                connection.executescript(text)
            return sqlite_url(tmp_path / "old.db")

        return fill
    server: Postgres = request.getfixturevalue("postgres")

    def fill_server(text: str) -> str:
        url = server.new_database()
        server.execute(url, text)
        return url

    return fill_server


def columns(url: str) -> dict[str, set[str]]:
    """Our tables and their columns, as the database has them."""
    engine = sa.create_engine(url)
    inspector = sa.inspect(engine)
    names = [n for n in inspector.get_table_names() if n.startswith("lora_tune")]
    found = {name: {c["name"] for c in inspector.get_columns(name)} for name in names}
    engine.dispose()
    return found


def test_there_is_a_golden_database_of_every_released_schema() -> None:
    assert [int(re.findall(r"\d+", path.stem)[0]) for path in GOLDEN] == list(range(1, SCHEMA_VERSION))


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda p: p.stem)
def test_an_older_database_is_brought_up_to_date_and_goes_on(filled: Callable[[str], str], golden: Path) -> None:
    url = filled(golden.read_text())
    store = Store(url)
    sweep = store.load("built")
    assert sweep is not None
    assert sweep.trials[0].verdict is Verdict.REACHED
    assert sweep.trials[3].state is TrialState.RUNNING
    assert len(sweep.attempts) == 4
    assert len(sweep.id) == 32
    assert sum(map(len, sweep.evals.values())) == 9
    assert store.held("built").owner == "node7 pid 12 start 99"
    lease = store.take_lease("built", "node8 pid 1 start 1", sweep.began_at + 100)
    assert lease.token == 2
    store.save(lease, Changes(trials=(sweep.trials[3].finished(Verdict.FAILED, "lost", 0.0),)), sweep.began_at + 101)
    store.close()
    fresh = {table.name: {c.name for c in table.columns} for table in tables.metadata.tables.values()}
    assert columns(url) == fresh, "the same tables as in a new database"
    Store(url).close()  # once more changes nothing


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda p: p.stem)
def test_a_watcher_leaves_an_older_database_as_it_is_and_says_what_to_do(
    filled: Callable[[str], str], golden: Path
) -> None:
    url = filled(golden.read_text())
    before = columns(url)
    with pytest.raises(StoreError, match=r"schema \d of an earlier release; resuming the sweep brings it up"):
        Store(url, read_only=True)
    assert columns(url) == before


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda p: p.stem)
def test_a_driver_of_an_earlier_release_at_work_is_not_disturbed(
    filled: Callable[[str], str], golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = filled(golden.read_text())
    before = columns(url)
    renewed_at = 1_760_000_060.0
    monkeypatch.setattr("lora_tune.store.database.time.time", lambda: renewed_at + 5)
    with pytest.raises(SweepBusyError, match="driven by node7 pid 12 start 99, a lora_tune of an earlier release"):
        Store(url)
    assert columns(url) == before


def test_a_database_of_a_later_release_is_refused_and_left(filled: Callable[[str], str]) -> None:
    later = "CREATE TABLE lora_tune_version (version INTEGER PRIMARY KEY); INSERT INTO lora_tune_version VALUES ({});"
    url = filled(later.format(SCHEMA_VERSION + 1))
    for read_only in (False, True):
        with pytest.raises(StoreError, match=f"has schema {SCHEMA_VERSION + 1}.*use the release that wrote it"):
            Store(url, read_only=read_only)
    assert columns(url) == {"lora_tune_version": {"version"}}


def test_an_upgrade_that_fails_half_way_changes_nothing(
    filled: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = filled(GOLDEN[0].read_text())
    before = columns(url)
    first = tables._UPGRADES[1]

    def fails(connection: Any, now: float) -> None:
        first(connection, now)
        raise StoreError("the power went")

    monkeypatch.setitem(tables._UPGRADES, 1, fails)
    with pytest.raises(StoreError, match="the power went"):
        Store(url)
    assert columns(url) == before
    monkeypatch.undo()
    Store(url).close()
