"""People who write beside a sweep at one moment: none is lost, none is overwritten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_tune.store import Store, sqlite_url
from lora_tune.store.port import Request
from lora_tune.store.requests import Requests


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(sqlite_url(tmp_path / "sweep.db"))
    made.begin("s", "d", "", 0.0)
    yield made
    made.close()


def wish() -> Request:
    return Request(kind="pause", what={}, who="ada@login1", asked_at=0.0)


def test_a_request_whose_number_was_taken_meanwhile_gets_the_next(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, insert = Requests(store, "s"), Requests._row
    quicker = [wish()]

    def overtaken(self: Requests, request: Request) -> dict[str, object]:
        if quicker and self is not other:
            other.ask(quicker.pop())
        return insert(self, request)

    monkeypatch.setattr(Requests, "_row", overtaken)
    assert Requests(store, "s").ask(wish()).number == 1
    assert [r.number for r in other.all()] == [0, 1]
