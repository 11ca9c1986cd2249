"""A time limit for PostgreSQL servers that stop answering, on every connection of this program.

A frozen server, or a firewall that drops packets, leaves the connection open: the kernel acknowledges data that no
process reads, so no TCP timeout applies and libpq waits forever. After ``SILENCE_SECONDS`` without an answer this
module closes the connection and raises OperationalError, as if the server were gone. From then on statements and new
connections of this process fail at once, so that a driver keeps watching its jobs, while a background thread retries
until the server answers.

The ``plugin`` key of the URL activates this for an engine, Optuna's included. Needs psycopg, so only SQLAlchemy imports
it, for such an engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping
from typing import Any

import psycopg
import sqlalchemy as sa

SILENCE_SECONDS = 10.0
"""Equal to ``connect_timeout``, and well below the 20 s of a lease."""

MAKING_SECONDS = 120.0
"""Limit while tables are created or migrated, which may take long, as may another program's migration."""


class Silence(psycopg.OperationalError):
    """The server does not answer on an open connection."""


class ServerSilence:
    """State of one server. silent: it did not answer, and a thread retries until it does."""

    def __init__(self) -> None:
        self.silent = False
        self._lock = threading.Lock()

    def fell_silent(self, parameters: Mapping[str, Any]) -> None:
        """Mark the server as silent, and retry with these connection parameters until it responds in any way."""
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
                    pass  # a refusal: the next connection attempt reports it
                return
        finally:
            self.silent = False


_servers: dict[tuple[str, ...], ServerSilence] = {}


def server(parameters: Mapping[str, Any]) -> ServerSilence:
    """The server that these connection parameters address."""
    where = tuple(str(parameters.get(name, "")) for name in ("service", "host", "hostaddr", "port"))
    return _servers.setdefault(where, ServerSilence())


class Limited(psycopg.Connection[Any]):
    """A connection whose statements, commits and rollbacks raise :class:`Silence` if the server does not answer.

    making: tables are being created or migrated; see ``MAKING_SECONDS``.
    """

    server: ServerSilence
    parameters: Mapping[str, Any]
    making = False

    def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **options: Any) -> Any:
        """As in psycopg, which routes all waiting for the server through this, except connecting."""
        try:
            return super().wait(self._limited(gen), *arguments, **options)
        except Silence:
            self.pgconn.finish()
            self.server.fell_silent(self.parameters)
            raise

    def _limited(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """``gen``, aborted after a silence; psycopg resumes it several times a second even without data."""
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
    """Entry point that SQLAlchemy loads for ``plugin`` in the URL."""

    def update_url(self, url: sa.URL) -> sa.URL:
        """Unchanged: SQLAlchemy removes the plugin's name itself."""
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
