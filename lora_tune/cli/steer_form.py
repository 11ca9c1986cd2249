"""The dashboard's page that steers: a form becomes a row, as options of ``steer`` do; the driver alone acts."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

import click

from lora_tune.base.errors import InputError, LoraTuneError
from lora_tune.cli import steer
from lora_tune.cli.doors import visitor
from lora_tune.cli.web_server import Application
from lora_tune.cli.wishes import WISHED, wishes
from lora_tune.config.study import Study
from lora_tune.controller.steering import SETTINGS, course, words
from lora_tune.review.steer_page import SET, Form, steer_html
from lora_tune.store.port import Request
from lora_tune.store.records import StudyRecords

PATH = "/steer"

LONGEST = 100_000
"""Bytes of a form."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

_PAGE = [
    ("Content-Type", "text/html; charset=utf-8"),
    ("Content-Security-Policy", _POLICY),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "same-origin"),
]

_TEXT = [("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff")]


class ForeignFormError(Exception):
    """A form that this page has not sent."""


class FormRequests(Protocol):
    """Where requests lie. Methods raise StoreError."""

    def requests(self) -> Sequence[Request]: ...

    def ask(self, request: Request) -> Request: ...

    def driven(self) -> bool:
        """Whether a driver is at work."""
        ...


def is_steering(path: str, method: str) -> bool:
    """Whether a request asks something of the sweep."""
    return method == "POST" and path == PATH


def with_steering(
    application: Application, study: Study, records: Callable[[], StudyRecords], requests: FormRequests
) -> Application:
    """``application`` with the page that steers at ``PATH``.

    A form must bring the token that this page gave it, and come from this page's own address where the browser says
    from where: another site can neither read the page nor send its forms.
    """
    token = secrets.token_urlsafe(24)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path != PATH or method not in ("GET", "POST"):
            return application(environ, start_response)
        try:
            fields = _sent(environ, token) if method == "POST" else _fields(environ.get("QUERY_STRING", ""))
            answered: Request | Form
            if method == "POST":
                answered = _asked(study, records(), fields, requests, visitor(environ))
            else:
                answered = _opened(study, records(), fields, requests)
            if isinstance(answered, Request):  # elsewhere, so that loading the page again asks for nothing twice
                place = f"{PATH}?asked={answered.number}"
                return _said(start_response, "303 See Other", "", [("Location", place)])
            now, driven, known = time.time(), requests.driven(), requests.requests()
            page = steer_html(study, records(), known, now, token=token, driven=driven, form=answered)
            status, soon = "400 Bad Request" if answered.wrong else "200 OK", []
            if "asked" in fields and driven and not all(r.answer for r in known):
                soon = [("Refresh", "2")]
            return _said(start_response, status, page, [*_PAGE, *soon])
        except ForeignFormError as error:
            return _said(start_response, "403 Forbidden", str(error), _TEXT)
        except LoraTuneError as error:
            return _said(start_response, "503 Service Unavailable", str(error), _TEXT)

    return answer


def _said(
    start_response: Callable[..., Any], status: str, text: str, headers: Sequence[tuple[str, str]]
) -> list[bytes]:
    body = text.encode()
    start_response(status, [*headers, ("Cache-Control", "no-store"), ("Content-Length", str(len(body)))])
    return [body]


def _fields(text: str) -> dict[str, str]:
    """The fields of a form or an address; of several with one name the last."""
    return {name: values[-1].strip() for name, values in parse_qs(text, max_num_fields=1000).items()}


def _sent(environ: Mapping[str, Any], token: str) -> dict[str, str]:
    """The fields of a form that this page has sent. Raises ForeignFormError for any other."""
    length = _number(environ.get("CONTENT_LENGTH") or "0")
    if length is None or length > LONGEST:
        raise ForeignFormError(f"a form has at most {LONGEST} bytes")
    site, origin = environ.get("HTTP_SEC_FETCH_SITE", ""), environ.get("HTTP_ORIGIN", "")
    try:
        elsewhere = site not in ("same-origin", "none") if site else urlsplit(origin).netloc != environ.get("HTTP_HOST")
        fields = _fields(environ["wsgi.input"].read(length).decode())
    except ValueError as error:
        raise ForeignFormError("this form does not come from this page") from error
    if (origin or site) and elsewhere:
        raise ForeignFormError("this form comes from another site; steer from the page /steer of this dashboard")
    if not hmac.compare_digest(fields.pop("token", "").encode(errors="replace"), token.encode()):
        raise ForeignFormError("this page is older than the dashboard that runs now; open /steer again, and repeat it")
    return fields


def _opened(_study: Study, sweep: StudyRecords, fields: Mapping[str, str], requests: FormRequests) -> Form:
    """The page as an address asks for it: with a trial to start from, or with what became of a request."""
    try:
        clone = _clone(fields, sweep)
    except InputError as error:
        return Form(said=str(error), wrong=True)
    answered = [r for r in requests.requests() if str(r.number) == fields.get("asked")]
    return Form(clone=clone, said=f"{words(answered[0])}: {answered[0].answer or 'noted'}" if answered else "")


def _asked(
    study: Study, sweep: StudyRecords, fields: Mapping[str, str], requests: FormRequests, who: str
) -> Request | Form:
    """The last request of a form as it was noted, or the form with what is wrong with it. who: sent it."""
    clone = None
    try:
        clone = _clone(fields, sweep)
        stands = course(study, requests.requests()).study
        wanted = list(wishes(stands, sweep, _options(stands, fields, clone), time.time(), who))
        if not wanted:
            raise InputError("nothing is filled in")
    except InputError as error:
        return Form(clone=clone, typed=fields, said=str(error).removeprefix("--"), wrong=True)
    return [requests.ask(wish) for wish in wanted][-1]


def _clone(fields: Mapping[str, str], sweep: StudyRecords) -> int | None:
    """The trial to start from; None where none is named. Raises InputError where there is no such trial."""
    text = fields.get("clone", "")
    number = _number(text)
    if text and number not in sweep.trials:
        raise InputError(f"clone {text}: there is no such trial; there are {len(sweep.trials)}, from 0")
    return number


_OPTIONS = click.Command("steer", params=[option for option in steer.main.params if option.name in WISHED])
"""The options of ``steer`` that wish for something: what the command line takes for a number, a form does."""


def _options(study: Study, fields: Mapping[str, str], clone: int | None) -> dict[str, Any]:
    """A form as the options of ``steer``. Raises InputError for what the command line cannot read either."""
    arguments = [f"--{name.replace('_', '-')}={fields[name]}" for name in SETTINGS if fields.get(name)]
    if "stop" in fields:
        arguments.append(f"--stop={fields['stop']}")
    if fields.get("pause") in ("pause", "resume"):
        arguments.append(f"--{fields['pause']}")
    if "enqueue" in fields:
        tuned = {name.removeprefix(SET): text for name, text in fields.items() if name.startswith(SET) and text}
        arguments += ["--enqueue", *(f"--set={name}={_value(study, name, text)}" for name, text in tuned.items())]
        arguments += [] if clone is None else [f"--clone={clone}"]
    try:
        return _OPTIONS.make_context("steer", arguments).params
    except click.UsageError as error:
        raise InputError(error.format_message().replace("'--", "'")) from error


def _value(study: Study, name: str, text: str) -> str:
    """A value as the command line has it; of a category the form says the place of a choice."""
    choices = getattr(study.search_space.distributions().get(name), "choices", None)
    if choices is None:
        return text
    place = _number(text)
    if place is None or place >= len(choices):
        raise InputError(f"{name}: there is no choice {text}; choices are numbered 0 to {len(choices) - 1}")
    return str(choices[place])


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
