"""A limit to PostgreSQL's silence, on every connection of this program.

A frozen server, or a firewall that swallows packets, leaves the connection open: the kernel acknowledges what no
process will ever read, so no time limit of TCP applies, and libpq waits for the answer for ever. Here whoever hears
nothing for ``SILENCE_SECONDS`` closes the connection and gets an OperationalError, as when the server is gone. From
then on this process knows the server as silent: other statements and new connections fail at once, so that a driver
goes on watching its jobs, and a thread of its own asks until there is an answer.

An engine gets all this by the word ``plugin`` in its URL, so Optuna's engine has it too. Needs psycopg: imported by
SQLAlchemy with such an engine only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping
from typing import Any

import psycopg
import sqlalchemy as sa

SILENCE_SECONDS = 10.0
"""As long as a connection may take (``connect_timeout``): well below the 20 s of a lease."""

MAKING_SECONDS = 120.0
"""While tables are made or changed: the server may be at work on one statement, or on another program's, for long."""


class Silence(psycopg.OperationalError):
    """The server keeps the connection open and says nothing."""


class ServerSilence:
    """What this process knows of one server. silent: it did not answer, and a thread waits until it does."""

    def __init__(self) -> None:
        self.silent = False
        self._lock = threading.Lock()

    def fell_silent(self, parameters: Mapping[str, Any]) -> None:
        """Note it, and ask with these connection parameters until it answers in whatever way."""
        with self._lock:
            if self.silent:
                return
            self.silent = True
        threading.Thread(target=self._ask, args=(parameters,), name="asks a silent database", daemon=True).start()

    def _ask(self, parameters: Mapping[str, Any]) -> None:
        try:
            while True:
                try:
                    psycopg.connect(**parameters).close()
                except psycopg.errors.ConnectionTimeout:
                    continue
                except psycopg.Error:
                    pass  # refused: whoever connects next hears that at once, and says so
                return
        finally:
            self.silent = False


_servers: dict[tuple[str, ...], ServerSilence] = {}


def server(parameters: Mapping[str, Any]) -> ServerSilence:
    """The server to which these connection parameters lead."""
    where = tuple(str(parameters.get(name, "")) for name in ("service", "host", "hostaddr", "port"))
    return _servers.setdefault(where, ServerSilence())


class Limited(psycopg.Connection[Any]):
    """A connection whose statements, commits and rollbacks end with :class:`Silence` when nothing is heard.

    making: tables are being made; see ``MAKING_SECONDS``.
    """

    server: ServerSilence
    parameters: Mapping[str, Any]
    making = False

    def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **options: Any) -> Any:
        """As psycopg's, through which everything goes that waits for the server, but for connecting."""
        try:
            return super().wait(self._limited(gen), *arguments, **options)
        except Silence:
            self.pgconn.finish()
            self.server.fell_silent(self.parameters)
            raise

    def _limited(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """``gen``, given up after a silence; psycopg turns it some times a second when nothing comes."""
        last_bytes_at = time.monotonic()
        try:
            query = next(gen)
            while True:
                ready = yield query
                silence = time.monotonic() - last_bytes_at
                if ready:
                    last_bytes_at = time.monotonic()
                elif silence >= self._limit():
                    raise Silence(f"the server has not answered for {silence:.0f} s")
                query = gen.send(ready)
        except StopIteration as end:
            return end.value

    def _limit(self) -> float:
        if self.making:
            return MAKING_SECONDS
        return 0.0 if self.server.silent else SILENCE_SECONDS


class Plugin(sa.CreateEnginePlugin):
    """What SQLAlchemy loads for the name in the URL."""

    def update_url(self, url: sa.URL) -> sa.URL:
        """As it is: SQLAlchemy itself takes our name out."""
        return url

    def engine_created(self, engine: sa.Engine) -> None:
        sa.event.listen(engine, "do_connect", _connect)


def _connect(_dialect: Any, _record: Any, arguments: list[Any], parameters: dict[str, Any]) -> Limited:
    at = server(parameters)
    if at.silent:
        raise Silence("the server does not answer; retrying until it does")
    try:
        connection = Limited.connect(*arguments, **parameters)
    except psycopg.errors.ConnectionTimeout:
        at.fell_silent(parameters)
        raise
    connection.server, connection.parameters = at, parameters
    return connection
