"""Notes in optuna-dashboard: what people write stands first and is kept; what the records say is made anew below it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from lora_tune.base.errors import InputError, LoraTuneError, RemarkChangedError
from lora_tune.store.port import SWEEP, Remark

# What is changed in optuna-dashboard's answers on their way to the browser, and the style that its page lacks.


Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

STYLE = b"""<style>
a:not([class]) { color: #2196f3; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
table:not([class]) { border-spacing: 0; }
table:not([class]) :is(th, td) { padding: 2px 14px 2px 0; text-align: left; vertical-align: top; }
main, main div { min-width: 0; }
@media (max-width: 600px) {
  main div:has(> .MuiDivider-vertical) { flex-direction: column; }
  main div:has(> .MuiDivider-vertical) > :first-child { width: 100%; max-height: 25vh; flex-shrink: 0; }
  main div:has(> .MuiDivider-vertical) > :last-child { width: 100%; }
  table:not([class]) { display: block; overflow-x: auto; }
}
[aria-label="delete study"], [aria-label="rename study"] { display: none; }
</style>
"""
"""Notes are Markdown, which optuna-dashboard leaves to the browser: links are seen on dark too, commands wrap, tables
have room, and a trial's page is as wide as the window: on a phone the list of trials stands above the trial. And no
buttons for what is refused."""

_END_OF_HEAD = b"</head>"


def rewritten(
    application: Application,
    environ: dict[str, Any],
    start_response: Callable[..., Any],
    change: Callable[[bytes], bytes],
) -> list[bytes]:
    """What ``application`` answers, the body of a success as ``change`` makes it."""
    started: list[Any] = []
    body = b"".join(application(environ, lambda *arguments: started.append(arguments)))
    status, headers, *rest = started[0]
    if not status.startswith("200"):
        start_response(status, headers, *rest)
        return [body]
    body = change(body)
    kept = [(name, value) for name, value in headers if name.lower() != "content-length"]
    start_response(status, [*kept, ("Content-Length", str(len(body)))], *rest)
    return [body]


def with_style(application: Application) -> Application:
    """``application`` with STYLE at the end of each page's head."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET" or not environ["PATH_INFO"].startswith("/dashboard"):
            return application(environ, start_response)
        return rewritten(application, environ, start_response, _styled)

    return answer


def _styled(page: bytes) -> bytes:
    return page.replace(_END_OF_HEAD, STYLE + _END_OF_HEAD, 1)


LONGEST = 100_000
"""Bytes of a request that writes a note."""

LINE = "*Write above this line, with #tags if you like. Below it stands what the records say, made anew each time.*"

_STUDY_DETAIL = re.compile(r"/api/studies/\d+/?")
_NOTE = re.compile(r"/api/studies/\d+(?:/(?P<trial>[0-9]{1,18}))?/note")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_TAG = re.compile(r"(?<!\S)#([^\W\d][\w-]*)")


class RemarkStore(Protocol):
    """Where people's remarks lie. Methods raise StoreError."""

    def latest(self) -> Mapping[int, Remark]: ...

    def write(self, trial: int, version: int, text: str, who: str) -> None:
        """Raises RemarkChangedError where somebody was quicker."""
        ...


class Facts(Protocol):
    """What the records say, in Markdown; SWEEP stands for the sweep itself."""

    def note(self, number: int) -> str: ...

    def number_of(self, trial_id: int) -> int | None:
        """A trial's number by Optuna's own id; None where there is no such trial."""
        ...


def is_note(path: str, method: str) -> bool:
    """Whether a request writes a note, the one thing that may be changed."""
    return method == "PUT" and _NOTE.fullmatch(path) is not None


def whole(remark: Remark | None, facts: str) -> dict[str, Any]:
    """A note as optuna-dashboard reads it: people's text, the line, the facts. Pure."""
    text = f"{remark.text}\n\n" if remark else ""
    # optuna-dashboard takes 0 for "no note"; there is always one, so that versions are counted from 1.
    return {"version": 1 + (remark.version if remark else 0), "body": f"{text}{LINE}\n\n{facts}"}


def own_part(body: str, facts: str) -> str:
    """What of an edited note is people's own: all above the line; without the line, all but the facts. Pure."""
    above, separator, _ = body.partition(LINE)
    if not separator:
        above = body.partition(facts.partition("\n")[0])[0] if facts.strip() else body
    return above.strip()


def tags(text: str) -> list[str]:
    """The words of a text that begin with #, each once. Pure."""
    return list(dict.fromkeys(_TAG.findall(text)))


def with_notes(
    application: Application, facts: Facts, remarks: RemarkStore, visitor: Callable[[Mapping[str, Any]], str]
) -> Application:
    """``application`` with a note for each trial in the answers that list trials, and with what people write kept.

    visitor: who sends a request.
    """

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if is_note(path, method):
            return _write(environ, start_response, facts, remarks, visitor(environ))
        if method != "GET" or not _STUDY_DETAIL.fullmatch(path):
            return application(environ, start_response)

        def noted(body: bytes) -> bytes:
            return json.dumps(_noted(json.loads(body), facts, remarks.latest())).encode()

        return rewritten(application, environ, start_response, noted)

    return answer


def _noted(detail: dict[str, Any], facts: Facts, remarks: Mapping[int, Remark]) -> dict[str, Any]:
    """The answer with notes, and people's tags as an attribute of their trials."""
    tagged = False
    for trial in (*detail["trials"], *detail["best_trials"]):
        remark = remarks.get(trial["number"])
        trial["note"] = whole(remark, facts.note(trial["number"]))
        if remark and (own_tags := tags(remark.text)):
            trial["user_attrs"].append({"key": "tags", "value": " ".join(own_tags)})
            tagged = True
    if tagged:
        detail["union_user_attrs"].append({"key": "tags", "sortable": False})
    detail["note"] = whole(remarks.get(SWEEP), facts.note(SWEEP))
    return detail


def _write(
    environ: Mapping[str, Any], start_response: Callable[..., Any], facts: Facts, remarks: RemarkStore, who: str
) -> Iterable[bytes]:
    """Keep what somebody, ``who``, has written, or say why not."""
    try:
        number, version, body = _wish(environ, facts)
    except InputError as error:
        return _said(start_response, "400 Bad Request", str(error))
    try:
        remarks.write(number, version - 1, own_part(body, facts.note(number)), who)
    except RemarkChangedError as error:
        now = whole(remarks.latest().get(number), facts.note(number))
        return _said(start_response, "409 Conflict", str(error), note=now)
    except LoraTuneError as error:
        return _said(start_response, "503 Service Unavailable", str(error))
    start_response("204 No Content", [])
    return []


def _wish(environ: Mapping[str, Any], facts: Facts) -> tuple[int, int, str]:
    """(trial's number, version, body) of a request. Raises InputError."""
    match = _NOTE.fullmatch(environ["PATH_INFO"])
    assert match is not None
    length = environ.get("CONTENT_LENGTH") or "0"
    if not length.isdigit() or int(length) > LONGEST:
        raise InputError(f"a note has at most {LONGEST} bytes")
    number = SWEEP if match["trial"] is None else facts.number_of(int(match["trial"]))
    try:
        wish = json.loads(environ["wsgi.input"].read(int(length)))
        version, body = wish["version"], wish["body"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError("a note is written as JSON with version and body") from error
    if number is None or type(version) is not int or type(body) is not str:
        raise InputError("there is no such trial" if number is None else "version is an integer, body a text")
    if _UNSTORABLE.search(body):
        raise InputError("a note cannot hold the character NUL, nor half of a surrogate pair")
    return number, version, body


def _said(start_response: Callable[..., Any], status: str, reason: str, **more: Any) -> list[bytes]:
    body = json.dumps({"reason": reason, **more}).encode()
    start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]
