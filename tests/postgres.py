"""Real PostgreSQL for the tests: a private cluster in a folder of its own, on a port of its own, with a password.

PostgreSQL refuses to run as root, so it runs as Debian's user ``postgres`` then. What is started here ends with the
test session: in order, or by a keeper process (``python -m tests.postgres FOLDER``) when the session is killed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for

USER = "tuner"
PASSWORD = secrets.token_hex(12)
_SETTINGS = {
    "fsync": "off",  # need not survive a power cut; what is committed survives a crash all the same
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "100",
    "listen_addresses": "127.0.0.1",
}


def _programs() -> Path | None:
    """The folder of initdb and postgres, the newest version of Debian's; None when it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[4]))
    return found[-1].parent if found else None


def missing() -> str:
    """Why PostgreSQL cannot run here, or "" if it can."""
    if _programs() is None:
        return "not installed: postgresql (Debian packages: tests/packages.txt; make test installs them)"
    return ""


class Postgres:
    """One server in a new folder; a context manager. It can be stopped, killed and started again."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lora-tune-pg-", dir="/tmp"))
        self.port = _free_port()
        self._server: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            entry = pwd.getpwnam("postgres")
            os.chown(self.folder, entry.pw_uid, entry.pw_gid)
            self._as = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.postgres", str(self.folder)],
            stdin=subprocess.PIPE,
            cwd=Path(__file__).resolve().parent.parent,
            start_new_session=True,
        )

    def __enter__(self) -> Postgres:
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        if self._as:
            os.chown(secret, self._as["user"], self._as["group"])
        make = [f"--username={USER}", f"--pwfile={secret}", "--auth=scram-sha-256", "--encoding=UTF8", "--no-sync"]
        self._run(["initdb", "--pgdata", str(self.folder / "data"), *make])
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGQUIT)
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait(120)  # it removes some ten thousand files

    def start(self) -> None:
        """Bring the server up and wait until it answers."""
        options = [f"--{name.replace('_', '-')}={value}" for name, value in _SETTINGS.items()]
        argv = [f"--port={self.port}", f"--unix-socket-directories={self.folder}", *options]
        programs = _programs()
        assert programs is not None
        with (self.folder / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [programs / "postgres", "-D", self.folder / "data", *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_environment(),
                **self._as,
            )
        wait_for(self.answers, 60, "PostgreSQL answers")

    def freeze(self) -> None:
        """Every process of the server is there and does nothing; its host's kernel goes on acknowledging packets."""
        assert self._server is not None
        _signal_all(self._server.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Undo :meth:`freeze`."""
        if self._server is not None:
            _signal_all(self._server.pid, signal.SIGCONT)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the server. SIGINT: at once, in order. SIGQUIT: as a crash would, clients are dropped."""
        if self._server is not None and self._server.poll() is None:
            self.thaw()
            self._server.send_signal(how)
            self._server.wait(60)

    def standby(self) -> Path:
        """The data of a standby as it is now, taken by streaming; it hears of nothing that is written later."""
        data = self.folder / "standby"
        where = ["--host=127.0.0.1", f"--port={self.port}", f"--username={USER}", "--no-password"]
        self._run(["pg_basebackup", f"--pgdata={data}", "--write-recovery-conf", "--no-sync", "-c", "fast", *where])
        return data

    def promote(self, standby: Path) -> None:
        """A standby's data take the place, and the address, of the server's own, which has died."""
        assert self._server is None or self._server.poll() is not None, "the primary is still there"
        (self.folder / "data").rename(self.folder / "died")
        standby.rename(self.folder / "data")
        self.start()
        with self._connect("postgres") as connection:
            assert connection.execute("SELECT pg_promote()").fetchall() == [(True,)]

    def answers(self) -> bool:
        """Whether a client gets an answer now."""
        import psycopg

        with contextlib.suppress(psycopg.OperationalError):
            self._connect("postgres").close()
            return True
        return False

    def new_database(self) -> str:
        """The URL, with its password, of an empty database that nobody else uses."""
        name = f"db{next(self._numbers)}"
        with self._connect("postgres") as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def url(self, name: str) -> str:
        return f"postgresql+psycopg://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{name}"

    def execute(self, database_url: str, statement: str) -> Sequence[tuple[Any, ...]]:
        """The rows of a statement, none for one that has no rows."""
        with self._connect(database_url.rsplit("/", 1)[1]) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def _connect(self, name: str) -> Any:
        import psycopg

        where = {"host": "127.0.0.1", "port": self.port, "dbname": name}
        return psycopg.connect(**where, user=USER, password=PASSWORD, autocommit=True, connect_timeout=10)

    def _run(self, argv: list[str]) -> None:
        programs = _programs()
        assert programs is not None
        done = subprocess.run(
            [programs / argv[0], *argv[1:]],
            capture_output=True,
            text=True,
            timeout=120,
            env={**_environment(), "PGPASSWORD": PASSWORD},
            **self._as,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def _environment() -> dict[str, str]:
    """C is the one locale that every machine has."""
    return {"PATH": os.environ["PATH"], "LC_ALL": "C", "TZ": "UTC"}


def _signal_all(server: int, number: signal.Signals) -> None:
    """A signal to the server, first, so that it makes no new process meanwhile, and then to its processes."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, number)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if int((process / "stat").read_text().rpartition(")")[2].split()[1]) == server:
                os.kill(int(process.name), number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """One server for the session. Without PostgreSQL tests are skipped with the reason; where CI is set they fail."""
    if reason := missing():
        if os.environ.get("CI"):
            pytest.fail(f"nothing may be skipped here: {reason}")
        pytest.skip(reason)
    with Postgres() as server:
        yield server


@pytest.fixture
def postgres(postgres_server: Postgres) -> Postgres:
    """The server, up, also after a test that took it down."""
    postgres_server.thaw()
    if not postgres_server.answers():
        postgres_server.start()
    return postgres_server


@pytest.fixture
def postgres_url(postgres: Postgres) -> str:
    """The URL of an empty database, with its password."""
    return postgres.new_database()


def _keep(folder: Path) -> None:
    """End the server of ``folder`` and remove it, once our input closes: the session is over, in whatever way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
        pid = int((folder / "data" / "postmaster.pid").read_text().splitlines()[0])
        os.kill(pid, signal.SIGQUIT)
        _signal_all(pid, signal.SIGCONT)
        deadline = time.monotonic() + 20
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _keep(Path(sys.argv[1]))
