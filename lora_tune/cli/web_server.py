"""A small threaded web server for pages, with time limits so that clients cannot hold threads or files forever."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import parse_qsl
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from lora_tune.base.errors import SetupError

REQUEST_SECONDS = 30.0
SILENCE_SECONDS = 60.0

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class PageServer(ThreadingMixIn, WSGIServer):
    """Listens from construction on, with one thread per request.

    request_seconds: limit for a client to send its request. silence_seconds: limit for which it may read nothing of the
    answer. Beyond these its connection is closed.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, request_seconds: float, silence_seconds: float) -> None:
        self.request_seconds, self.silence_seconds = request_seconds, silence_seconds
        self._host = host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """As in wsgiref, without a DNS lookup of this machine's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self._host, self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors of the server; ignore clients that disconnect or time out."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    server: PageServer
    default_request_version = "HTTP/1.0"  # else malformed requests are answered without a status line

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.silence_seconds)
        self._patience = threading.Timer(self.server.request_seconds, _hang_up, (self.connection,))
        self._patience.daemon = True
        self._patience.start()

    def parse_request(self) -> bool:
        try:
            parsed = super().parse_request()
        finally:
            self._patience.cancel()
        if parsed and (self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers):
            self.send_error(403, "Forbidden", "a request has no body here: pages are only shown")
            return False
        return parsed

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """As in the library, but an unknown HTTP version is a client error (400) instead of 505."""
        super().send_error(400 if code == HTTPStatus.HTTP_VERSION_NOT_SUPPORTED else code, message, explain)

    def finish(self) -> None:
        self._patience.cancel()
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def listen(
    shown: Application,
    host: str,
    port: int,
    *,
    request_seconds: float = REQUEST_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
) -> PageServer:
    """A listening server for ``shown``; see :class:`PageServer`. Raises SetupError if the port is taken."""
    try:
        server = PageServer(host, port, request_seconds, silence_seconds)
    except OSError as error:
        raise SetupError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    server.set_app(shown)
    return server


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the client has already closed it
        connection.shutdown(socket.SHUT_RDWR)


# Tokens that authenticate clients.


SHORTEST_TOKEN = 16
"""Minimum characters of a token, so that it cannot be guessed."""


def dashboard_token(path: Path) -> str:
    """The token in ``path``; created with mode 0600 if missing, and kept so that the address stays valid.

    Raises SetupError if other users can read the file.
    """
    try:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            return _read_token(path)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(file.fileno(), 0o600)
            token = secrets.token_urlsafe(24)
            file.write(f"{token}\n")
            return token
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}; set LORA_TUNE_TOKEN to a secret instead") from error


def _read_token(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        text = file.read(200).decode("ascii", errors="replace").strip()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or not len(text) >= SHORTEST_TOKEN:
        raise SetupError(f"{path} is not a token of this user alone (mode 0600); remove it, and another one is made")
    return text


def same(typed: str, token: str) -> bool:
    """Whether two texts are equal, compared in constant time."""
    return hmac.compare_digest(typed.encode(errors="replace"), token.encode())


def refusal(start_response: Callable[..., Any], reason: str, status: str = "403 Forbidden") -> list[bytes]:
    """A refusal with its reason, as JSON."""
    body = json.dumps({"reason": reason}).encode()
    start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]


def with_bearer(application: Application, token: str) -> Application:
    """``application``, restricted to requests with ``Authorization: Bearer TOKEN``."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if same(environ.get("HTTP_AUTHORIZATION", ""), f"Bearer {token}"):
            return application(environ, start_response)
        return refusal(start_response, "send Authorization: Bearer TOKEN", "401 Unauthorized")

    return answer


# Malformed requests are answered with 4xx and a reason before they reach the application.


MOST_FIELDS = 1000
"""Maximum fields of an address."""

_TOO_LONG = re.compile(r"[-+]?[0-9]{19,}")
"""An integer beyond the range of a database."""

_FIELDS = {"after": re.compile(r"[0-9]{1,18}"), "trial_ids": re.compile(r"(?: *[0-9]{1,18} *(?:,|$))*")}
"""Fields that optuna-dashboard converts to numbers without validation."""


def well_formed(application: Application) -> Application:
    """``application``, restricted to well-formed requests; optuna-dashboard answers others with 500."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        problem = problem_of(environ)
        if problem:
            body = problem.encode()
            headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
            start_response("400 Bad Request", headers)
            return [body]
        encoding = environ.get("HTTP_ACCEPT_ENCODING", "")
        return application(environ | {"HTTP_ACCEPT_ENCODING": encoding if encoding.isascii() else ""}, start_response)

    return answer


def problem_of(environ: Mapping[str, Any]) -> str:
    """What is wrong with a request; "" if nothing is."""
    try:
        path = environ["PATH_INFO"].encode("latin-1").decode()
        fields = parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True, max_num_fields=MOST_FIELDS)
    except UnicodeError:
        return "the path of this address is not UTF-8"
    except ValueError:
        return f"an address has at most {MOST_FIELDS} fields"
    if "\0" in path:
        return "the path of this address holds the character NUL"
    if any(map(_TOO_LONG.fullmatch, [*path.split("/"), *(value.strip() for _, value in fields)])):
        return "a number in this address is longer than any that is known here"
    if not all(_FIELDS[name].fullmatch(value) for name, value in fields if name in _FIELDS):
        return "a field of this address wants numbers"
    return ""
