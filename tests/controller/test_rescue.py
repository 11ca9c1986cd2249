"""A driver whose database is deleted or set back under it stops writing, watches its jobs, and keeps everything."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from lora_tune.base.errors import SetupError, StoreError
from lora_tune.controller.driver import Driver
from lora_tune.controller.sweep_records import check_store
from lora_tune.search.session import Session
from lora_tune.store import SaveCount, Store, sqlite_url
from lora_tune.store.port import Request
from lora_tune.store.records import StudyRecords, TrialState
from lora_tune.store.requests import Requests
from tests.backups import set_back
from tests.builders import study_of, sweep_of
from tests.controller.test_driver import House, assert_all_accounted_for
from tests.fakes import FakeClock, FakeCluster, command_study

TRIALS = 6


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path, FakeCluster(FakeClock()), command_study(trials=TRIALS, parallel=2))


def run_until(driver: Driver, ended: int) -> None:
    """Tick until so many trials have ended."""
    while sum(t.state is TrialState.FINISHED for t in driver.sweep.trials.values()) < ended:
        driver.tick()
        driver._dependencies.clock.sleep(1.0)


def files_of(database: Path) -> list[Path]:
    return [path for path in database.parent.iterdir() if path.name.startswith(database.name)]


def test_a_deleted_database_is_said_and_every_record_is_kept(house: House) -> None:
    driver = house.driver()
    run_until(driver, 2)
    running = sum(t.state is TrialState.RUNNING for t in driver.sweep.trials.values())
    for path in files_of(house.paths.database):
        path.unlink()
    with pytest.raises(SetupError, match=r"sweep\.db was deleted.*all records are in .*rescued\.db\. To go on"):
        driver.run()
    assert running > 0
    assert not house.paths.database.exists()
    kept = stored(house.paths.rescued, house)
    assert kept.trials == dict(driver.sweep.trials)
    assert kept.attempts == dict(driver.sweep.attempts)
    assert {key: tuple(found) for key, found in kept.evals.items()} == driver.sweep.evals
    assert sum(t.state is TrialState.FINISHED for t in kept.trials.values()) == 2 + running, "watched to their end"


def test_with_the_kept_records_in_its_place_the_sweep_goes_on(house: House) -> None:
    driver = house.driver()
    run_until(driver, 3)
    for path in files_of(house.paths.database):
        path.unlink()
    with pytest.raises(SetupError):
        driver.run()
    before = stored(house.paths.rescued, house)
    house.paths.rescued.replace(house.paths.database)
    house.store = Store(sqlite_url(house.paths.database))
    house.driver().run()
    assert_all_accounted_for(house, TRIALS)
    finished = {n: t for n, t in before.trials.items() if t.state is TrialState.FINISHED}
    assert {n: house.sweep().trials[n].seconds for n in finished} == {n: t.seconds for n, t in finished.items()}


def test_what_people_asked_is_done_by_the_driver_that_goes_on(house: House) -> None:
    """A point that was accepted and had not run, one that nobody had answered, and a budget that was set."""
    desk = Requests(house.store, house.study.name)
    driver = house.driver(requests=desk)
    desk._lease = driver._records._lease
    run_until(driver, 1)
    wish = Request(kind="enqueue", what={"values": {"LR": 0.002}}, who="ada@login1", asked_at=house.clock.now())
    desk.ask(wish)
    desk.ask(replace(wish, kind="set", what={"trials": TRIALS + 2}))
    driver.tick()
    asked = desk.all()
    assert [r.accepted for r in asked] == [True, True]
    assert not [t for t in driver.sweep.trials.values() if t.request is not None], "the slots were taken"
    for path in files_of(house.paths.database):
        path.unlink()
    with pytest.raises(SetupError, match=r"rescued\.db"):
        driver.run()
    house.paths.rescued.replace(house.paths.database)
    house.store = Store(sqlite_url(house.paths.database))
    rescued = Requests(house.store, house.study.name)
    assert rescued.all() == asked
    house.driver(requests=rescued).run()
    assert [t.tuned["LR"] for t in house.sweep().trials.values() if t.request == 0] == [0.002]
    assert len(house.sweep().trials) == TRIALS + 2


def test_a_database_that_was_set_back_takes_no_request_from_the_driver(house: House) -> None:
    desk = Requests(house.store, house.study.name)
    driver = house.driver(requests=desk)
    desk._lease = driver._records._lease
    driver.tick()
    desk.ask(Request(kind="pause", what={}, who="ada@login1", asked_at=house.clock.now()))
    driver.tick()
    asked = desk.all()
    with contextlib.closing(sqlite3.connect(house.paths.database)) as database, database:
        database.execute("DELETE FROM lora_tune_request")
        database.execute("UPDATE lora_tune_lease SET saves = 1")
    with pytest.raises(SetupError, match=r"was set back to an earlier state"):
        driver.run()
    with contextlib.closing(Store(sqlite_url(house.paths.rescued), read_only=True)) as store:
        assert Requests(store, house.study.name).all() == asked


def test_a_backup_put_into_its_place_starts_nothing_again(house: House, tmp_path: Path) -> None:
    driver = house.driver()
    run_until(driver, 1)
    with set_back(house.paths.database):
        run_until(driver, 3)
    with pytest.raises(SetupError, match=r"was set back to an earlier state"):
        driver.run()
    assert set(house.cluster.starts.values()) == {1}


def test_a_database_that_goes_while_the_driver_says_goodbye_is_missed(house: House, tmp_path: Path) -> None:
    """The sweep was over, its report written, and the database deleted: exit code 0, and no records."""
    house.driver().run()
    kept = tmp_path / "rescued.db"
    sweep = house.sweep()
    check_store(house.store, sweep, [], kept, 0.0)
    assert not kept.exists()
    for path in Path(house.store.url.removeprefix("sqlite:///")).parent.glob("*.db*"):
        path.unlink()
    with pytest.raises(SetupError, match=r"was deleted while a driver was using it.*rescued\.db"):
        check_store(house.store, sweep, [], kept, 0.0)
    with contextlib.closing(Store(sqlite_url(kept), read_only=True)) as store:
        assert store.load(sweep.name) == sweep


def test_a_backup_restored_while_the_driver_says_goodbye_is_missed(house: House, tmp_path: Path) -> None:
    """All trials had ended, the report was written, and the database forgot the last of them: exit code 0."""
    driver, kept = house.driver(), tmp_path / "rescued.db"
    run_until(driver, 1)
    with set_back(house.paths.database):
        driver.run()
        sweep = house.sweep()
        check_store(house.store, sweep, [], kept, 0.0)
    with pytest.raises(SetupError, match=r"was set back to an earlier state.*rescued\.db"):
        check_store(house.store, sweep, [], kept, 0.0)
    with contextlib.closing(Store(sqlite_url(kept), read_only=True)) as store:
        assert store.load(sweep.name) == sweep


def test_a_database_that_is_put_back_is_driven_on(house: House) -> None:
    driver = house.driver()
    run_until(driver, 2)
    away = [(path, path.with_name(f"away-{path.name}")) for path in files_of(house.paths.database)]
    for path, elsewhere in away:
        path.replace(elsewhere)
    driver.tick()
    assert house.paths.rescued.exists()
    for path, elsewhere in away:
        elsewhere.replace(path)
    assert driver.run().reason == f"all {TRIALS} trials are proposed"
    assert_all_accounted_for(house, TRIALS)
    assert not house.paths.rescued.exists(), "it would be out of date"


def stored(database: Path, house: House) -> StudyRecords:
    store = Store(sqlite_url(database), read_only=True)
    found = store.load(house.study.name)
    store.close()
    assert found is not None
    return found


def test_the_search_is_made_from_the_records() -> None:
    study = study_of()
    records = sweep_of(study, trials=12, running=2)
    session = Session(study, records)
    for number, trial in records.trials.items():
        frozen = session._frozen(number)
        assert frozen.params == dict(trial.tuned)
        assert frozen.state.is_finished() == (trial.verdict is not None)
        assert len(frozen.intermediate_values) == len(records.last_evals(number))
    asked = session.ask()
    assert not isinstance(asked, str)
    assert asked.number == 12


class TestABackupRestoredWhileNobodyDrove:
    """The folder knows how often the database was written to; the trials that it forgot must not run unseen again."""

    @pytest.fixture
    def house(self, house: House, tmp_path: Path) -> House:
        """A sweep of which the database is an earlier state than what its folder has seen."""
        count = SaveCount(house.store, house.study.name, house.paths.saved)
        count.refuse_older()
        driver = house.driver()
        run_until(driver, 1)
        with set_back(house.paths.database):
            run_until(driver, 2)
            count.note()
            count.refuse_older()
            count.note()
        return house

    def test_it_is_refused_with_both_ways_on(self, house: House) -> None:
        count = SaveCount(house.store, house.study.name, house.paths.saved)
        with pytest.raises(
            StoreError, match=r"older than this folder.*Put the newer database back, or rescued.*remove .*json"
        ):
            count.refuse_older()
        house.paths.saved.unlink()
        count.refuse_older()

    def test_a_note_that_says_nothing_of_this_sweep_refuses_nothing(self, house: House) -> None:
        count = SaveCount(house.store, house.study.name, house.paths.saved)
        for content in (b"", b"{", b'{"sweep": "another", "saves": 99999}', b"[1]", b'{"saves": "x"}'):
            house.paths.saved.write_bytes(content)
            count.refuse_older()
