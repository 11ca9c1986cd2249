"""A slice of seconds of ``benchmarks.database_away``: the driver goes on without its database, and catches up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres import Postgres
from tests.store.away import Room

pytestmark = pytest.mark.postgres


@pytest.fixture
def room(tmp_path: Path, postgres: Postgres) -> Iterator[Room]:
    made = Room(tmp_path, postgres, "awaytest", seconds=5.0, parallel=5)
    yield made
    made.close()


def test_a_frozen_server_does_not_stop_the_driver_and_nothing_is_lost(room: Room) -> None:
    room.start("tests.store.hasty")
    seen = room.outage("freeze")
    assert seen.ended == 4, "two by themselves, one reached its target, and one that the driver stopped"
    assert seen.stopped == 1
    assert seen.buffered >= 4
    assert seen.submitted == 0
    assert seen.said <= 5, "the search's trouble is said once, and not with every eval"
    assert room.finish(60) == 0
    assert room.losses() == []
