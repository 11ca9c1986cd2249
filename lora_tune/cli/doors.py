"""Who knocks: tokens of our small web servers, and what is known of who is at the other end of a connection."""

from __future__ import annotations

import getpass
import hmac
import json
import os
import pwd
import secrets
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lora_tune.base.errors import SetupError
from lora_tune.base.host import is_loopback
from lora_tune.cli.web_server import Application

SHORTEST_TOKEN = 16
"""Characters of a token that nobody guesses."""


def own_token(path: Path) -> str:
    """The token in the file ``path``, made with mode 0600 where there is none, so that an address stays valid.

    Raises SetupError where the file is not this user's alone: others may know what is in it.
    """
    try:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            return _read_own(path)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(file.fileno(), 0o600)
            token = secrets.token_urlsafe(24)
            file.write(f"{token}\n")
            return token
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}; set LORA_TUNE_TOKEN to a secret instead") from error


def _read_own(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        text = file.read(200).decode("ascii", errors="replace").strip()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or not len(text) >= SHORTEST_TOKEN:
        raise SetupError(f"{path} is not a token of this user alone (mode 0600); remove it, and another one is made")
    return text


def same(typed: str, token: str) -> bool:
    """Whether two texts are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(typed.encode(errors="replace"), token.encode())


def refusal(start_response: Callable[..., Any], reason: str, status: str = "403 Forbidden") -> list[bytes]:
    """An answer that says no, and why, as JSON."""
    body = json.dumps({"reason": reason}).encode()
    start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]


def with_bearer(application: Application, token: str) -> Application:
    """``application`` for programs that send ``Authorization: Bearer TOKEN``."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if same(environ.get("HTTP_AUTHORIZATION", ""), f"Bearer {token}"):
            return application(environ, start_response)
        return refusal(start_response, "send Authorization: Bearer TOKEN", "401 Unauthorized")

    return answer


def visitor(environ: Mapping[str, Any]) -> str:
    """Who is at the other end, by what the kernel knows: ``ada@host`` of this machine's users, else the address.

    What a client says of itself counts for nothing. Who runs the server stands behind it: it acts in that name.
    """
    owner = f"{getpass.getuser()}@{os.uname().nodename}"
    address, port = str(environ.get("REMOTE_ADDR", "")), str(environ.get("REMOTE_PORT", ""))
    if not address:
        return owner
    user = _user_of(address, int(port)) if is_loopback(address) and port.isdigit() else None
    who = address if user is None else f"{user}@{os.uname().nodename}"
    return who if who == owner else f"{who} by the dashboard of {owner}"


def _user_of(address: str, port: int) -> str | None:
    """The user whose socket has this local address (proc(5), net/tcp); None where the kernel does not say."""
    table, family = ("tcp6", socket.AF_INET6) if ":" in address else ("tcp", socket.AF_INET)
    words = struct.unpack(f">{4 if family == socket.AF_INET6 else 1}I", socket.inet_pton(family, address))
    wanted = "".join(f"{socket.htonl(word):08X}" for word in words) + f":{port:04X}"
    try:
        rows = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    uids = [fields[7] for row in rows if len(fields := row.split()) > 7 and fields[1] == wanted]
    if len(uids) != 1:
        return None
    try:
        return pwd.getpwuid(int(uids[0])).pw_name
    except KeyError:
        return f"uid {uids[0]}"
