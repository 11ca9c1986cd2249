"""Database connections: supported URLs, settings of SQLite and PostgreSQL, and error messages."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import sqlalchemy as sa

from lora_tune.base.errors import DatabaseChangedError, KeyTakenError, NoSweepError, StoreError
from lora_tune.base.files import NETWORK, file_system, mountinfo

# Suppress the traceback that SQLAlchemy's pool logs for a Ctrl-C while it closes a connection; without a handler
# Python would print it.
logging.getLogger("sqlalchemy.pool").addHandler(logging.NullHandler())

# Detect that the SQLite file under a path is no longer the one that was opened.
#
# An open connection keeps using a file that was deleted or replaced: nothing fails, but all writes are lost with the
# process. So each use of a connection first checks the path.


Identity = tuple[int, int]
"""Device and inode."""

_LOG = "identity of the write-ahead log"


class FileGuard:
    """Ensures that an engine uses the file at ``path`` only while it is the one that its first connection opened.

    Likewise its write-ahead log while a connection is open: SQLite removes it with the last connection.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._log = path, path.with_name(f"{path.name}-wal")
        self._known: Identity | None = None

    def watch(self, engine: sa.Engine) -> None:
        """Make the engine's connections raise DatabaseChangedError instead of using another file."""
        # Also before a connection is opened: SQLite would create an empty file in place of a missing one.
        sa.event.listen(engine, "do_connect", lambda *_: self._check_file())
        sa.event.listen(engine, "connect", self._opened)
        sa.event.listen(engine, "checkin", self._used)
        sa.event.listen(engine, "checkout", self._before_use)

    def _opened(self, connection: Any, record: Any) -> None:
        self._known = self._known or _identity(self._path)
        self._used(connection, record)

    def _used(self, _connection: Any, record: Any) -> None:
        record.info[_LOG] = record.info.get(_LOG) or _identity(self._log)

    def _before_use(self, _connection: Any, record: Any, _proxy: Any) -> None:
        self._check_file()
        _check(self._log, record.info.get(_LOG))

    def _check_file(self) -> None:
        _check(self._path, self._known)


def _check(path: Path, known: Identity | None) -> None:
    if known is not None and (identity := _identity(path)) != known:
        what = "was deleted" if identity is None else "was replaced by another file"
        raise DatabaseChangedError(f"{path} {what} while a driver was using it")


def _identity(path: Path) -> Identity | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


OLDEST_POSTGRES = 15

_ONE_AT_A_TIME = 7_033_190_251
"""PostgreSQL advisory lock for migrations; any number that no other program uses."""

_SILENCE = "lora_tune_silence"
sa.dialects.plugins.register(_SILENCE, "lora_tune.store.silence", "Plugin")

_PATIENCE = {
    # An unreachable host must not block the driver; libpq connection keywords, in seconds.
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",  # milliseconds
    "application_name": "lora_tune",
    # For a reachable host that does not answer: SQLAlchemy's key for engine plugins.
    "plugin": _SILENCE,
}


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file."""
    return f"sqlite:///{path.resolve()}"


def parse_url(url: str) -> sa.URL:
    """The parsed URL; PostgreSQL URLs get driver and time limits. Raises StoreError for unsupported ones."""
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise StoreError("the storage URL is unreadable; write sqlite:///FILE or postgresql+psycopg://...") from error
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        parsed = parsed.set(drivername="postgresql+psycopg")
        return parsed.update_query_dict({**_PATIENCE, **{k: str(v) for k, v in parsed.query.items()}})
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        return parsed
    raise StoreError(f"{parsed.drivername} is not a supported database; use sqlite:/// or postgresql+psycopg://")


def full_url(url: str) -> str:
    """The URL with driver, time limits and password."""
    return parse_url(url).render_as_string(hide_password=False)


def safe_url(url: str) -> str:
    """The URL without its password."""
    try:
        return sa.make_url(url).set(query={}).render_as_string(hide_password=True)
    except sa.exc.ArgumentError:
        return "(an unreadable URL)"


def has_password(url: str) -> bool:
    """Whether the URL contains a password; False if it is unreadable."""
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        return False
    return bool(parsed.password) or "password" in parsed.query


def sqlite_file(url: sa.URL) -> Path | None:
    """The file of a SQLite URL; None for PostgreSQL and in-memory databases."""
    in_file = url.drivername.startswith("sqlite") and url.database not in (None, "", ":memory:")
    return Path(str(url.database)).resolve() if in_file else None


def tune_sqlite(engine: sa.Engine, *, synchronous: Literal["NORMAL", "FULL"] = "NORMAL") -> None:
    """Enable the write-ahead log, so that readers never block, and check the file's identity before each use.

    synchronous: FULL if a commit must be on disk when it returns, such as the intention to submit a job; it also syncs
    all earlier commits. NORMAL syncs only at checkpoints: a commit costs microseconds, and a power failure may lose the
    last ones but never corrupts the file.
    """
    path = sqlite_file(engine.url)
    if path is None:
        return

    @sa.event.listens_for(engine, "connect")
    def _(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute("PRAGMA busy_timeout=10000")

    FileGuard(path).watch(engine)


def writing_engine(url: sa.URL) -> sa.Engine:
    """An engine for a driver. Raises StoreError if the SQLite file is on a network file system, or damaged."""
    if (path := sqlite_file(url)) is not None:
        _refuse_network(path, file_system(path, mountinfo()))
        _refuse_damaged(path)
        engine = sa.create_engine(url)
        tune_sqlite(engine, synchronous="FULL")
        return engine
    return sa.create_engine(url, pool_pre_ping=True)


def reading_engine(url: sa.URL) -> sa.Engine:
    """A read-only engine. An idle SQLite file in a folder without write permission is opened as immutable."""
    path = sqlite_file(url)
    if path is None:
        return sa.create_engine(url, pool_pre_ping=True, execution_options={"postgresql_readonly": True})
    if not path.exists():
        raise NoSweepError(f"there is no database at {path}; check --storage, --output or the current folder")
    _refuse_damaged(path)
    at_rest = not path.with_name(path.name + "-wal").exists() and not os.access(path.parent, os.W_OK)
    address = f"file:{quote(str(path))}?mode=ro{'&immutable=1' if at_rest else ''}"
    return sa.create_engine("sqlite://", creator=lambda: sqlite3.connect(address, uri=True, timeout=10.0))


def insert(dialect: str, table: sa.Table) -> Any:
    """An INSERT that supports ON CONFLICT; imports only the dialect in use."""
    return importlib.import_module(f"sqlalchemy.dialects.{dialect}").insert(table)


def upsert(dialect: str, table: sa.Table, keys: Sequence[str], values: Sequence[str]) -> Any:
    """An INSERT of rows that updates ``values`` if ``keys`` exist. dialect: its name in SQLAlchemy."""
    statement = insert(dialect, table)
    return statement.on_conflict_do_update(index_elements=keys, set_={v: statement.excluded[v] for v in values})


def server_version(url: str) -> str:
    """Name and version of a PostgreSQL server. Raises StoreError if it does not answer."""
    with translated(url):
        engine = sa.create_engine(parse_url(url))
        with engine.connect() as connection:
            version = str(connection.scalar(sa.text("SELECT version()")))
        engine.dispose()
    return " ".join(version.split()[:2])


def _refuse_network(path: Path, kind: str) -> None:
    if kind in NETWORK:
        raise StoreError(
            f"{path} is on {kind}, a network file system, where SQLite's locks do not hold and a second host corrupts "
            "the database; keep it on a local disk (--storage sqlite:////LOCAL/DISK/sweep.db; the sweep's folder may "
            "stay where it is), or use --storage postgresql+psycopg://..."
        )


def _refuse_damaged(path: Path) -> None:
    """Raise StoreError for a damaged file, which SQLAlchemy would open and fail on later. Never writes to it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.OperationalError:
        return  # locked or inaccessible: the actual connection reports it
    except sqlite3.DatabaseError as error:
        verdict = str(error)
    if verdict != "ok":
        raise StoreError(
            f"{path} is damaged ({verdict}); it is left as it is: put a copy of it back, or move it and the sweep's "
            "folder away to start anew"
        )


@contextlib.contextmanager
def exclusive(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A transaction that excludes migrations by other programs."""
    if engine.dialect.name == "sqlite":
        # Python's sqlite3 opens no transaction for CREATE TABLE.
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.exec_driver_sql("ROLLBACK")
                raise
            connection.exec_driver_sql("COMMIT")
        return
    with engine.begin() as connection:
        version = int((connection.dialect.server_version_info or (0,))[0])
        if version < OLDEST_POSTGRES:
            raise StoreError(f"the server is PostgreSQL {version}; {OLDEST_POSTGRES} or later is needed")
        with _migration_timeout(connection):
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ONE_AT_A_TIME)))
            yield connection


@contextlib.contextmanager
def _migration_timeout(connection: sa.Connection) -> Iterator[None]:
    """Raise the silence limit: migrations, ours or another program's, may take long."""
    driver: Any = connection.connection.driver_connection
    driver.making = True
    try:
        yield
    finally:
        driver.making = False


@contextlib.contextmanager
def reading(engine: sa.Engine, url: str) -> Iterator[sa.Connection]:
    """A connection with a consistent snapshot of the database. Raises StoreError."""
    with translated(url):
        postgres = engine.dialect.name != "sqlite"
        options = {"isolation_level": "REPEATABLE READ"} if postgres else {}
        with engine.connect().execution_options(**options) as connection:
            if not postgres:
                connection.exec_driver_sql("BEGIN")
            yield connection


@contextlib.contextmanager
def writing(engine: sa.Engine, url: str) -> Iterator[sa.Connection]:
    """One transaction, committed at its end. Raises StoreError."""
    with translated(url), engine.begin() as connection:
        yield connection


@contextlib.contextmanager
def translated(url: str) -> Iterator[None]:
    """Convert database errors to StoreError, without the password.

    DatabaseChangedError if tables are missing, KeyTakenError if the key of a new row exists.
    """
    try:
        yield
    except sa.exc.IntegrityError as error:
        raise KeyTakenError(f"the database {safe_url(url)} holds such a row already: {_message(error)}") from error
    except sa.exc.DatabaseError as error:
        kind = DatabaseChangedError if _is_missing_table(error) else StoreError
        raise kind(f"the database {safe_url(url)} cannot be used: {_message(error)}") from error
    except (sa.exc.SQLAlchemyError, ModuleNotFoundError) as error:
        raise StoreError(f"the database {safe_url(url)} cannot be used: {_message(error)}") from error


def _is_missing_table(error: sa.exc.DatabaseError) -> bool:
    """Whether the error means that our tables are missing, or that the file is damaged, truncated or no database.

    After its write-ahead log is deleted, a file appears to a new connection as shorter than its index says.
    """
    message = str(error.orig)
    if getattr(error.orig, "sqlite_errorname", "") == "SQLITE_IOERR_SHORT_READ":
        return True
    missing = "no such table: lora_tune_" in message or 'relation "lora_tune_' in message
    return missing or type(error.orig) is sqlite3.DatabaseError


def _message(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; install it with: pip install 'lora-tune[postgres]'"
    message: str = str(getattr(error, "orig", None) or error).splitlines()[0]
    if "database or disk is full" in message:
        return f"{message}; free some space; nothing already written is lost"
    if "unable to open database file" in message:
        return f"{message}; its folder must be there, and writable for this user"
    if "readonly database" in message:
        return f"{message}; make the file and its folder writable for this user"
    return message
