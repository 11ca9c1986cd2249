"""A PostgreSQL primary dies and its standby, which lags, takes its place: the rescued records go back into it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lora_tune.base.errors import SetupError, StoreError
from lora_tune.controller.driver import Driver
from lora_tune.store import Store
from lora_tune.store.port import Request
from lora_tune.store.records import TrialState
from lora_tune.store.requests import Requests, merge_rescued
from tests.builders import sweep_of
from tests.controller.test_driver import House
from tests.controller.test_rescue import run_until
from tests.fakes import FakeClock, FakeCluster, command_study
from tests.postgres import Postgres, missing

pytestmark = [pytest.mark.postgres, pytest.mark.long]

TRIALS = 6


@pytest.fixture
def primary() -> Iterator[Postgres]:
    if reason := missing():
        pytest.skip(reason)
    with Postgres() as server:
        yield server


@pytest.fixture
def house(primary: Postgres, tmp_path: Path) -> House:
    """A sweep in a team's database, beside another study of the team."""
    there = House(tmp_path, FakeCluster(FakeClock()), command_study(trials=TRIALS, parallel=2))
    url = primary.new_database()
    there.store = Store(url)
    there.store.begin(there.study.name, there.study.digest, there.file.read_text(), there.clock.now())
    other = sweep_of(there.study, trials=4)
    there.store.copy_in(replace(other, name="other"), there.clock.now(), 1)
    return there


def fail_over(primary: Postgres, house: House, before: int, after: int) -> Driver:
    """The driver once the standby has taken the primary's place: it knows of ``before`` ended trials, not ``after``."""
    driver = house.driver()
    run_until(driver, before)
    standby = primary.standby()
    run_until(driver, after)
    primary.stop(signal.SIGQUIT)
    primary.promote(standby)
    return driver


def test_after_a_failover_the_rescued_records_go_back_and_the_sweep_ends_with_each_trial_run_once(
    primary: Postgres, house: House
) -> None:
    driver = fail_over(primary, house, 1, 3)
    with pytest.raises(SetupError, match=r"was set back to an earlier state.*--merge-rescued"):
        driver.run()
    url = house.store.url
    house.store.close()
    house.store = Store(url)
    known = sum(t.state is TrialState.FINISHED for t in house.sweep().trials.values())
    assert known == 1, "the standby had not heard of the others"
    asked = Request(kind="pause", what={}, who="ada@login1", asked_at=1.0)
    Requests(house.store, house.study.name).ask(asked)
    others = house.store.load("other")

    lease = house.store.take_lease(house.study.name, "back", house.clock.now(), dead=True)
    merged = merge_rescued(house.store, lease, house.paths.rescued)
    house.store.release(lease)
    assert house.sweep() == merged
    assert house.store.load("other") == others, "the team's other study is untouched"
    assert [r.kind for r in Requests(house.store, house.study.name).all()] == ["pause"], "asked since, and kept"
    assert not house.paths.rescued.exists()
    house.driver().run()
    sweep = house.sweep()
    assert [trial.state for trial in sweep.trials.values()] == [TrialState.FINISHED] * TRIALS
    assert all(sweep.trials[n].seconds == t.seconds for n, t in merged.trials.items() if t.verdict), "as rescued"
    shown = primary.execute(
        url.partition("?")[0], "SELECT count(*) FROM trials WHERE state IN ('COMPLETE', 'PRUNED', 'FAIL')"
    )
    assert shown == [(TRIALS,)], "Optuna's tables, too"
    assert set(house.cluster.starts.values()) == {1}


def test_what_a_driver_did_in_the_promoted_database_is_not_written_over(primary: Postgres, house: House) -> None:
    driver = fail_over(primary, house, 1, 2)
    with pytest.raises(SetupError, match=r"rescued\.db"):
        driver.run()
    url = house.store.url
    house.store.close()
    house.store = Store(url)
    house.driver().tick()
    lease = house.store.take_lease(house.study.name, "back", house.clock.now(), dead=True)
    with pytest.raises(StoreError, match="a driver has gone on there"):
        merge_rescued(house.store, lease, house.paths.rescued)
    assert house.paths.rescued.exists()


def test_nothing_to_merge_is_said(house: House) -> None:
    lease = house.store.take_lease(house.study.name, "back", house.clock.now(), dead=True)
    with pytest.raises(StoreError, match=r"there is no .*rescued\.db to merge"):
        merge_rescued(house.store, lease, house.paths.rescued)
