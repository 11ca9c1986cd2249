"""``python -m lora_tune.dashboard --study NAME``: the sweep in optuna-dashboard, read only, behind a token."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import re
import signal
from collections.abc import Callable, Iterable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, quote

import click

from lora_tune import store as stores
from lora_tune.base.errors import InputError, StoreError
from lora_tune.base.host import is_loopback
from lora_tune.cli.options import Review, load_review, load_sweep
from lora_tune.cli.web_server import Application, dashboard_token, listen, refusal, same, well_formed
from lora_tune.config.study import Study
from lora_tune.search.recommendation import best_run
from lora_tune.store.records import StudyRecords

if TYPE_CHECKING:
    from optuna.study._frozen import FrozenStudy
    from optuna.trial import FrozenTrial

TOKEN_FILE = "dashboard.token"
"""Name in the sweep's folder; readable by its owner only."""


class OneStudy:
    """The storage ``inner`` as optuna-dashboard reads it, restricted to the reviewed study.

    Optuna reports a stopped trial's last eval loss as its value, which among times in seconds would look like a record.
    Optuna's best trial is the luckiest; here it is the best that a confirmation has not passed over.
    """

    def __init__(self, inner: Any, study: Study, load: Callable[[StudyRecords | None], StudyRecords]) -> None:
        """load: reads what is new since the sweep it receives."""
        self._inner, self._study, self._load = inner, study, load
        self._sweep: StudyRecords | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_all_studies(self) -> list[FrozenStudy]:
        return [study for study in self._inner.get_all_studies() if study.study_name == self._study.name]

    def get_all_trials(self, *arguments: Any, **options: Any) -> list[FrozenTrial]:
        return [_shown(trial) for trial in self._inner.get_all_trials(*arguments, **options)]

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """The best run. Raises ValueError if no trial has a result."""
        self._sweep = self._load(self._sweep)
        if (best := best_run(self._study, self._sweep)) is None:
            raise ValueError("no trial has a result")
        trial_id = self._inner.get_trial_id_from_study_id_trial_number(study_id, best.number)
        return _shown(self._inner.get_trial(trial_id))


def _shown(trial: FrozenTrial) -> FrozenTrial:
    """A copy with values only for COMPLETE trials, and with evals as logged, which may be at fractions of an epoch."""
    from lora_tune.search.recorded import curve_of

    shown = copy.copy(trial)
    if trial.state.name != "COMPLETE":
        shown.values = None
    shown.intermediate_values = cast("dict[int, float]", curve_of(trial))  # the page accepts fractional steps
    return shown


def application(review: Review, storage: str | None) -> Application:
    """optuna-dashboard for the sweep's tables, as a WSGI application. Raises StoreError."""
    import optuna
    import optuna_dashboard

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = stores.full_url(storage or stores.sqlite_url(review.paths.database))

    def load(known: StudyRecords | None) -> StudyRecords:
        return load_sweep(review.study.name, review.paths, storage, known)

    try:
        inner = optuna.storages.get_storage(optuna.storages.RDBStorage(url, skip_table_creation=True))
        number = inner.get_study_id_from_name(review.study.name)
    except KeyError as error:
        raise StoreError(f"Optuna knows no study {review.study.name} yet; wait for the first proposal") from error
    except Exception as error:  # Optuna and the database driver have separate exception trees
        raise StoreError(f"Optuna cannot read the database: {str(error).splitlines()[0]}") from error
    optuna.storages.BaseStorage.register(OneStudy)
    shown = optuna_dashboard.wsgi(cast("optuna.storages.BaseStorage", OneStudy(inner, review.study, load)))
    return well_formed(_of_one_study(shown, number))


_STUDY = re.compile(r"/(?:api/studies|csv|artifacts|dashboard/studies)/([0-9]+)(?:/|$)")


def _of_one_study(application: Application, number: int) -> Application:
    """``application``, restricted to the reviewed study: the database may hold others, which have other tokens."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        match = _STUDY.match(environ["PATH_INFO"])
        if match and int(match[1]) != number:
            return refusal(start_response, f"this dashboard shows one study, number {number}", "404 Not Found")
        return application(environ, start_response)

    return answer


def only_shown(application: Application, hosts: frozenset[str]) -> Application:
    """``application``, read only and restricted to requests whose Host header is one of ``hosts`` (empty: any).

    The Host check prevents DNS rebinding: a foreign web page cannot read the sweep through a name that points here.
    """

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST", "").rsplit(":", 1)[0].strip("[]").lower()
        if hosts and host not in hosts:
            return refusal(start_response, f"this dashboard answers to {', '.join(sorted(hosts))} only")
        method = environ["REQUEST_METHOD"]
        if method not in ("GET", "HEAD"):
            reason = "this dashboard is read-only; to stop, pause or enqueue trials use lora-tune steer"
            return refusal(start_response, reason)
        return application(environ, start_response)

    return answer


def with_token(application: Application, token: str) -> Application:
    """``application``, restricted to clients with ``token``: first as ``?token=`` in the address, then as a cookie.

    The first request is redirected to an address without it, so that it stays out of the history and Referer headers.
    """

    # Cookies ignore ports, so each dashboard on a host needs its own cookie name.
    name = f"lora_tune_token_{hashlib.sha256(token.encode()).hexdigest()[:8]}"

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        cookie = SimpleCookie()
        with contextlib.suppress(CookieError):
            cookie.load(environ.get("HTTP_COOKIE", ""))
        if name in cookie and same(cookie[name].value, token):
            return application(environ, start_response)
        typed = parse_qs(environ.get("QUERY_STRING", "")).get("token", [""])[0]
        if environ["REQUEST_METHOD"] == "GET" and same(typed, token):
            keep = f"{name}={token}; HttpOnly; SameSite=Strict; Path=/"
            start_response("303 See Other", [("Location", "/dashboard"), ("Set-Cookie", keep), ("Content-Length", "0")])
            return [b""]
        reason = "open the whole address, with its ?token=, that the dashboard command printed"
        return refusal(start_response, reason, "401 Unauthorized")

    return answer


def run(study_name: str, storage: str | None, output: Path | None, host: str, port: int, no_token: bool) -> None:
    """Run ``dashboard``; options: cli/commands.py."""
    loopback = is_loopback(host)
    if no_token and not loopback:
        raise InputError(f"--no-token is for this machine alone; {host} can be reached from others")
    review = load_review(study_name, output, storage)
    hosts = frozenset({"127.0.0.1", "localhost", "::1", host}) if loopback else frozenset[str]()
    shown = only_shown(application(review, storage), hosts)
    if no_token:
        serve(shown, host, port, review.study.name)
        return
    if not loopback:
        click.echo(
            f"warning: {host} can be reached from other machines, and what they see travels unencrypted. Anyone with "
            "the address and token below can read all parameters and logs. Safer: leave --host out and use ssh -L, or "
            "put a reverse proxy with TLS in front (docs/review.md)",
            err=True,
        )
    token = os.environ.get("LORA_TUNE_TOKEN") or dashboard_token(review.paths.root / TOKEN_FILE)
    shown = with_token(shown, token)
    serve(shown, host, port, review.study.name, f"?token={quote(token)}")


def serve(shown: Application, host: str, port: int, name: str, query: str = "") -> None:
    """Serve until Ctrl-C. query: appended to the printed address. Raises SetupError if the port is taken."""
    server = listen(shown, host, port)
    shown_host = f"[{host}]" if ":" in host else host
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore SIGINT for background jobs
    try:
        click.echo(f"{name}: http://{shown_host}:{server.server_port}/dashboard{query}  (Ctrl-C ends)")
        server.serve_forever()
    except KeyboardInterrupt:
        click.echo("")
    finally:
        server.server_close()
