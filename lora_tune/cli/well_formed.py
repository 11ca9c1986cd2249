"""Requests that no page of ours sends are answered before the page hears of them: with 4xx and a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from lora_tune.cli.web_server import Application

MOST_FIELDS = 1000
"""Of an address."""

_TOO_LONG = re.compile(r"[-+]?[0-9]{19,}")
"""A number that no database holds."""

_LENGTH = re.compile(r"[0-9]{0,9}")
_FIELDS = {"after": re.compile(r"[0-9]{1,18}"), "trial_ids": re.compile(r"(?: *[0-9]{1,18} *(?:,|$))*")}
"""What optuna-dashboard takes for numbers without a look."""


def well_formed(application: Application) -> Application:
    """``application`` for requests that it can read; optuna-dashboard answers others with 500."""

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
    """What is wrong with a request, a sentence; "" where nothing is."""
    if not _LENGTH.fullmatch(environ.get("CONTENT_LENGTH") or ""):
        return "Content-Length is no number of bytes"
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
