"""The same contract on SQLite and on a real PostgreSQL server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lora_tune.base.errors import StoreError
from lora_tune.store import Store, full_url, safe_url, sqlite_url
from tests.contracts.store import StoreContract

INTERRUPTED = """
import sqlalchemy as sa
from sqlalchemy.engine.default import DefaultDialect
from lora_tune.store.engine import writing_engine

def interrupted(dialect, connection):
    raise KeyboardInterrupt

DefaultDialect.do_close = interrupted
engine = writing_engine(sa.make_url("sqlite:///x.db"))
try:
    with engine.connect():
        pass
    engine.dispose()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_while_a_connection_is_closed_prints_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


class TestSqlite(StoreContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return sqlite_url(tmp_path / "sweep.db")


@pytest.mark.postgres
class TestPostgres(StoreContract):
    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url


@pytest.mark.postgres
def test_a_bare_postgresql_url_gets_its_driver_and_time_limits_but_keeps_what_it_says(postgres_url: str) -> None:
    bare = postgres_url.replace("postgresql+psycopg", "postgresql") + "?connect_timeout=3"
    store = Store(bare)
    assert store.url == full_url(store.url)
    assert store.url.startswith("postgresql+psycopg://")
    assert "connect_timeout=3" in store.url
    assert "tcp_user_timeout" in store.url
    store.close()


@pytest.mark.parametrize("url", ["mysql://me:secret@db/x", "no url at all", "oracle://me:secret@db/x"])
def test_other_databases_are_refused_without_showing_their_password(url: str) -> None:
    with pytest.raises(StoreError, match=r"sqlite:///") as refused:
        Store(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["postgresql://me:secret@127.0.0.1:1/x", "postgresql+psycopg://127.0.0.1:1/x?user=me&password=secret"]
)
def test_a_server_that_is_not_there_is_said_without_the_password(url: str) -> None:
    with pytest.raises(StoreError, match="cannot be used") as refused:
        Store(url)
    assert "secret" not in str(refused.value)
    assert "secret" not in safe_url(url)
