"""A small web server for pages of one person: a thread a request, and nobody holds threads and files for ever."""

from __future__ import annotations

import contextlib
import io
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from lora_tune.base.errors import SetupError

MOST_BYTES = 1 << 20
"""Of what a client sends after its headers; pages allow less."""

REQUEST_SECONDS = 30.0
SILENCE_SECONDS = 60.0

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class PageServer(ThreadingMixIn, WSGIServer):
    """Listens as soon as it is made.

    request_seconds: in which a client must have said what it wants. silence_seconds: for which it may take nothing of
    the answer. Beyond these its connection is closed.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, request_seconds: float, silence_seconds: float) -> None:
        self.request_seconds, self.silence_seconds = request_seconds, silence_seconds
        self._host = host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """As wsgiref's, without asking the name service for this machine's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self._host, self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or was too slow, is nobody's news; a mistake of ours is."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    server: PageServer

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.silence_seconds)
        self._patience = threading.Timer(self.server.request_seconds, _hang_up, (self.connection,))
        self._patience.daemon = True
        self._patience.start()

    def parse_request(self) -> bool:
        try:
            return super().parse_request() and self._take_body()
        finally:
            self._patience.cancel()

    def _take_body(self) -> bool:
        """Read what follows the headers while patience lasts, so that no page waits for what drips in."""
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            self.send_error(411, "Length Required", "a request says by Content-Length how many bytes follow")
            return False
        if len(length) > 9 or int(length) > MOST_BYTES:
            self.send_error(413, "Content Too Large", f"a request has at most {MOST_BYTES} bytes")
            return False
        body = self.rfile.read(int(length))
        self.rfile.close()
        self.rfile = io.BytesIO(body)
        return len(body) == int(length)

    def get_environ(self) -> dict[str, Any]:
        """As wsgiref's, with the client's port: by it the kernel knows whose connection it is."""
        return {**super().get_environ(), "REMOTE_PORT": str(self.client_address[1])}

    def finish(self) -> None:
        self._patience.cancel()
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are nobody's news."""


def listen(
    shown: Application,
    host: str,
    port: int,
    *,
    request_seconds: float = REQUEST_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
) -> PageServer:
    """A server of ``shown`` that listens already; see :class:`PageServer`. Raises SetupError when the port is taken."""
    try:
        server = PageServer(host, port, request_seconds, silence_seconds)
    except OSError as error:
        raise SetupError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    server.set_app(shown)
    return server


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the client was sooner
        connection.shutdown(socket.SHUT_RDWR)
