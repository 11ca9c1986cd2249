"""A database that was deleted, replaced, damaged or set back under its driver is recognised at the next save."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from lora_tune.base.errors import DatabaseChangedError, SweepBusyError
from lora_tune.search.optuna_tables import OptunaTables
from lora_tune.store import Changes, Lease, Registered, SaveCount, Store, sqlite_url
from lora_tune.store.records import Trial
from tests.backups import set_back
from tests.builders import STUDY, study_of, sweep_of
from tests.postgres import Postgres

NOW = 1_760_000_000.0


def saved(store: Store, lease: Lease, number: int) -> None:
    store.save(lease, Changes(trials=(Trial(number=number, seed=1, tuned={}, parameters={}),)), NOW)


def begun(url: str) -> tuple[Store, Lease]:
    """A sweep with one trial on record, and the lease of its driver."""
    store = Store(url)
    store.begin("built", "d1", STUDY, NOW)
    lease = store.take_lease("built", "node1 pid 1 start 1", NOW)
    saved(store, lease, 0)
    return store, lease


class TestAFile:
    """SQLite would go on with a file that has no name any more, and nothing would fail."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return tmp_path / "sweep.db"

    @pytest.fixture
    def driver(self, file: Path) -> Iterator[tuple[Store, Lease]]:
        store, lease = begun(sqlite_url(file))
        yield store, lease
        store.close()

    def test_that_was_deleted_is_not_made_again(self, driver: tuple[Store, Lease], file: Path) -> None:
        file.unlink()
        for _ in range(3):
            with pytest.raises(DatabaseChangedError, match=r"sweep\.db was deleted while a driver was using it"):
                saved(*driver, 1)
        assert not file.exists()

    def test_that_was_replaced_is_not_written(self, driver: tuple[Store, Lease], file: Path) -> None:
        shutil.copy(file, file.with_name("copy.db"))
        file.with_name("copy.db").replace(file)
        before = file.read_bytes()
        with pytest.raises(DatabaseChangedError, match="was replaced by another file"):
            saved(*driver, 1)
        assert file.read_bytes() == before

    def test_whose_log_of_writes_was_deleted_is_told(self, driver: tuple[Store, Lease], file: Path) -> None:
        file.with_name("sweep.db-wal").unlink()
        with pytest.raises(DatabaseChangedError, match=r"sweep\.db-wal was deleted"):
            saved(*driver, 1)

    def test_whose_log_of_writes_was_deleted_is_told_by_a_new_connection_too(
        self, driver: tuple[Store, Lease], file: Path
    ) -> None:
        """SQLite calls it a disk I/O error, which was waited for, until a power cut took what was in memory."""
        file.with_name("sweep.db-wal").unlink()
        with pytest.raises(DatabaseChangedError):
            Store(sqlite_url(file))

    def test_that_comes_back_is_written_again(self, driver: tuple[Store, Lease], file: Path) -> None:
        away = [(path, path.with_name(f"away-{path.name}")) for path in file.parent.iterdir()]
        for path, elsewhere in away:
            path.replace(elsewhere)
        with pytest.raises(DatabaseChangedError):
            saved(*driver, 1)
        for path, elsewhere in away:
            elsewhere.replace(path)
        saved(*driver, 1)
        found = Store(sqlite_url(file), read_only=True).load("built")
        assert found is not None
        assert sorted(found.trials) == [0, 1]

    def test_into_which_a_backup_was_restored_is_told(self, driver: tuple[Store, Lease], file: Path) -> None:
        """The same file with earlier contents."""
        with set_back(file):
            saved(*driver, 1)
        with pytest.raises(DatabaseChangedError, match="was set back to an earlier state"):
            saved(*driver, 2)

    def test_that_was_overwritten_with_something_else_is_told(self, driver: tuple[Store, Lease], file: Path) -> None:
        driver[0].close()  # with the last connection SQLite puts everything into this one file
        file.write_bytes(b"no database " * 1000)
        with pytest.raises(DatabaseChangedError, match="is not a database"):
            saved(*driver, 1)

    def test_optunas_tables_are_not_made_in_another_file_either(self, driver: tuple[Store, Lease], file: Path) -> None:
        study = study_of()
        tables, sweep = OptunaTables(study, *driver), sweep_of(study, trials=2)
        assert tables.follow(replace(sweep, trials={0: sweep.trials[0]})) == ""
        file.unlink()
        assert "was deleted" in tables.follow(sweep)
        assert not file.exists()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "sweep.db")
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE lora_tune_lease SET saves = saves - 1",
        "DELETE FROM lora_tune_lease",
        "UPDATE lora_tune_lease SET token = token - 1",
        "DROP TABLE lora_tune_lease",
    ],
    ids=["an earlier state", "emptied", "the state before this driver", "tables dropped"],
)
def test_a_database_that_lost_what_was_written_takes_nothing_more(url: str, change: str) -> None:
    store, lease = begun(url)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(change)
    with pytest.raises(DatabaseChangedError):
        saved(store, lease, 1)
    with engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT number FROM lora_tune_trial").scalars().all() == [0]
    engine.dispose()
    store.close()


def test_a_driver_that_was_overtaken_is_not_mistaken_for_it(url: str) -> None:
    store, lease = begun(url)
    store.take_lease("built", "node2 pid 1 start 1", NOW, dead=True)
    with pytest.raises(SweepBusyError, match="taken over by another driver"):
        saved(store, lease, 1)
    store.close()


def test_what_a_driver_knows_fits_into_the_place_of_its_database(url: str, tmp_path: Path) -> None:
    store, lease = begun(url)
    count = SaveCount(store, "built", tmp_path / "saved.json")
    count.refuse_older()
    count.note()
    folder = Path("/sweeps/built")
    place = Registered(name="built", study_toml="", cwd=Path("/s"), file=Path("/s/a.toml"), folder=folder, options={})
    store.place(lease, place)
    store.finish(lease, "all 3 trials are proposed")
    known, registered = store.load("built"), store.registered()
    assert known is not None
    store.rescue(tmp_path / "rescued.db", known, NOW)
    fresh = Store(sqlite_url(tmp_path / "rescued.db"))
    assert fresh.load("built") == known
    assert fresh.registered() == registered, "a service drives it on, and a monitor knows that it is over"
    assert fresh.held("built").owner == ""
    SaveCount(fresh, "built", tmp_path / "saved.json").refuse_older()
    store.close()
    fresh.close()
