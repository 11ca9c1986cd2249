"""Nobody keeps a connection to the dashboard, and with it a thread and a file, for as long as they like."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any
from wsgiref.simple_server import WSGIServer

import pytest

from lora_tune.cli.web_server import listen
from tests.waiting import wait_until_hung_up


def page(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"shown"]


@pytest.fixture
def server() -> Iterator[WSGIServer]:
    """A server that waits 0.3 s for a whole request."""
    found = listen(page, "127.0.0.1", 0, request_seconds=0.3)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


def connect(server: WSGIServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=20)


def test_who_says_nothing_is_hung_up_on(server: WSGIServer) -> None:
    with closing(connect(server)) as client:
        assert client.recv(100) == b""


def test_who_drips_headers_is_hung_up_on(server: WSGIServer) -> None:
    """Each byte would begin a limit of single reads anew."""
    with closing(connect(server)) as client:
        client.sendall(b"GET / HTTP/1.0\r\n")
        wait_until_hung_up(client, b"X-More: 1\r\n")


def test_others_are_served_meanwhile_and_after_it(server: WSGIServer, capfd: pytest.CaptureFixture[str]) -> None:
    with closing(connect(server)) as silent:
        for _ in range(2):
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=20) as answer:
                assert answer.read() == b"shown"
            assert silent.recv(100) == b""
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "headers", [b"Content-Length: x", b"Content-Length: \xb2", b"Transfer-Encoding: chunked", b"Content-Length: 1000"]
)
def test_a_body_is_refused_with_a_sentence_and_not_read(server: WSGIServer, headers: bytes) -> None:
    """Who drips one held a thread for as long as they liked."""
    with closing(connect(server)) as client:
        client.sendall(b"POST / HTTP/1.0\r\n" + headers + b"\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.split()[1] == b"403"
    assert b"a request has no body here" in answer


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/9.9\r\n\r\n", b"400"),
        (b"GET / HTTP/x\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1 x\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x00\xa5\x01\x00\r\n\r\n", b"400"),
        (b"GET\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\n" + b"X-A: 1\r\n" * 200 + b"\r\n", b"431"),
    ],
)
def test_what_is_no_request_is_answered_as_the_clients_mistake(
    server: WSGIServer, request_: bytes, status: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was answered without a status line, with 505 or not at all."""
    with closing(connect(server)) as client:
        with contextlib.suppress(OSError):  # it answers before it has read all
            client.sendall(request_)
            client.shutdown(socket.SHUT_WR)
        first = client.recv(4096)
    assert first.split()[:2] == [b"HTTP/1.0", status]
    assert capfd.readouterr().err == ""
