"""The dashboard's page that steers: forms become the rows that ``steer`` writes, and no other site can send one."""

from __future__ import annotations

import io
import re
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_tune.base.paths import SweepPaths
from lora_tune.cli import dashboard
from lora_tune.cli.options import Review
from lora_tune.cli.web_server import Application
from lora_tune.config.study import parse_study
from lora_tune.store import Store, sqlite_url
from lora_tune.store.port import Request
from lora_tune.store.records import TrialState
from lora_tune.store.requests import Requests
from tests.browser import Browser
from tests.builders import stored, sweep_of
from tests.cli.test_dashboard import ask, noted, reviewed
from tests.dashboards import serving

Post = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Review:
    """A stored sweep of eight trials, the last two of them running."""
    return reviewed(tmp_path_factory.mktemp("steer") / "built", trials=8, running=2)


@pytest.fixture
def review(built: Review, tmp_path: Path) -> Review:
    """A copy of it."""
    shutil.copytree(built.paths.root, tmp_path / "built")
    return replace(built, paths=SweepPaths(tmp_path / "built"))


@pytest.fixture
def shown(review: Review) -> Application:
    return dashboard.only_shown(dashboard.application(review, None), frozenset({"127.0.0.1"}))


def token_of(shown: Application) -> str:
    found = re.search(r'name="token" value="([^"]+)"', ask(shown, "/steer")[1])
    assert found
    return found[1]


def post(shown: Application, fields: dict[str, str], **environ: Any) -> tuple[str, str]:
    body = urlencode(fields).encode()
    more = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body)}
    return ask(shown, "/steer", **more, **environ)


def rows(review: Review) -> list[Request]:
    with closing(Store(sqlite_url(review.paths.database))) as store:
        return Requests(store, review.study.name).all()


@pytest.mark.parametrize(
    ("fields", "kind", "what"),
    [
        ({"stop": "6"}, "stop", {"trial": 6}),
        ({"enqueue": "1", "set.LR": "0.001"}, "enqueue", {"values": {"LR": 0.001}, "clone_of": None}),
        ({"pause": "pause"}, "pause", {}),
        ({"pause": "resume"}, "resume", {}),
        ({"parallel": "4", "node_hours": "", "trials": "60"}, "set", {"parallel": 4, "trials": 60}),
        ({"wall_hours": "1.5"}, "set", {"wall_hours": 1.5}),
    ],
)
def test_a_form_becomes_the_row_that_the_command_line_writes(
    shown: Application, review: Review, fields: dict[str, str], kind: str, what: dict[str, Any]
) -> None:
    status, _ = post(shown, {"token": token_of(shown), **fields})
    assert status.startswith("303"), "elsewhere, so that loading the page again asks for nothing twice"
    (row,) = rows(review)
    assert (row.kind, dict(row.what)) == (kind, what)
    assert "@" in row.who
    assert row.answered_at is None, "only the driver answers"


def test_what_is_left_empty_stays_as_in_the_trial_that_is_cloned(shown: Application, review: Review) -> None:
    tuned = review.sweep.trials[1].tuned
    page = ask(shown, "/steer", QUERY_STRING="clone=1")[1]
    assert "What is left empty stays as in trial 1." in page
    assert f'placeholder="{tuned["MAX_STEPS"]}"' in page
    fields = {"enqueue": "1", "clone": "1", "set.LR": "0.001", "set.MAX_STEPS": ""}
    assert post(shown, {"token": token_of(shown), **fields})[0].startswith("303")
    (row,) = rows(review)
    assert row.what == {"values": {**tuned, "LR": 0.001}, "clone_of": 1}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"enqueue": "1", "set.LR": "5"}, "LR = 5.0 is not within 0.0001 to 0.002"),
        ({"enqueue": "1", "set.LR": "fast"}, "LR: 'fast' is not a number"),
        ({"enqueue": "1", "set.NO": "1"}, "NO is not tuned"),
        ({"enqueue": "1"}, "no values are given"),
        ({"enqueue": "1", "clone": "99"}, "there is no such trial; there are 8, from 0"),
        ({"stop": "0"}, "it has ended"),
        ({"stop": "six"}, "'stop': 'six' is not a valid integer"),
        ({"stop": "9" * 400}, "there is no such trial"),
        ({"parallel": "many"}, "'parallel': 'many' is not a valid integer"),
        ({"parallel": "9" * 400}, "option budget.parallel: must be an integer of at most 18 digits"),
        ({"trials": "9" * 5000}, "is not a valid integer"),
        ({"wall_hours": "1e999"}, "option budget.wall_hours: must be a finite number"),
        ({"enqueue": "1", "set.MAX_STEPS": "9" * 400}, "is not within 400 to 1200"),
        ({"enqueue": "1", "clone": "9" * 400}, "there is no such trial"),
        ({"parallel": "0"}, "budget.parallel"),
        ({}, "nothing is filled in"),
    ],
)
def test_what_the_driver_would_refuse_is_told_at_once_and_what_was_typed_stays(
    shown: Application, review: Review, fields: dict[str, str], words: str
) -> None:
    status, page = post(shown, {"token": token_of(shown), **fields})
    assert status.startswith("400")
    found = re.search(r'<p class="said wrong" role="status">(.*?)</p>', page)
    assert found
    assert words in found[1].replace("&#39;", "'")
    if "set.LR" in fields:
        assert f'value="{fields["set.LR"]}"' in page
    assert rows(review) == []


KINDS = """
[workload]
kind = "command"
argv = ["train", "--mode={MODE}", "--lr={LR}"]
[site]
launcher = "local"
[space]
MODE = { type = "categorical", choices = ["", "full", "a  b"] }
LR = { type = "float", low = 1e-4, high = 1e-2 }
[objective]
target = 0.925
[budget]
trials = 5
"""


@pytest.fixture
def chosen(tmp_path: Path) -> Review:
    """A sweep over a category that may be empty, which its one trial set to "full"."""
    study = parse_study(KINDS, tmp_path / "kinds.toml")
    sweep = sweep_of(study, trials=1)
    trial = replace(sweep.trials[0], tuned={"MODE": "full", "LR": 0.001})
    sweep = replace(sweep, trials={0: trial})
    stored(tmp_path / "kinds", sweep, study)
    return Review(study, sweep, SweepPaths(tmp_path / "kinds"), tmp_path / "kinds.toml")


@pytest.mark.parametrize(("picked", "mode"), [("0", ""), ("2", "a  b"), ("", "full")])
def test_a_category_is_picked_by_its_place_so_that_every_text_can_be(chosen: Review, picked: str, mode: str) -> None:
    shown = dashboard.only_shown(dashboard.application(chosen, None), frozenset({"127.0.0.1"}))
    page = ask(shown, "/steer", QUERY_STRING="clone=0")[1]
    assert '<option value="">full</option><option value="0">(empty)</option><option value="1">full</option>' in page
    fields = {"enqueue": "1", "clone": "0", "set.MODE": picked, "set.LR": "0.002"}
    assert post(shown, {"token": token_of(shown), **fields})[0].startswith("303")
    (row,) = rows(chosen)
    assert row.what["values"] == {"MODE": mode, "LR": 0.002}


def test_a_pick_that_is_none_is_told_and_one_that_is_stays(chosen: Review) -> None:
    shown = dashboard.only_shown(dashboard.application(chosen, None), frozenset({"127.0.0.1"}))
    status, page = post(shown, {"token": token_of(shown), "enqueue": "1", "set.MODE": "3"})
    assert status.startswith("400")
    assert "MODE: there is no choice 3; choices are numbered 0 to 2" in page.replace("&#39;", "'")
    page = post(shown, {"token": token_of(shown), "enqueue": "1", "set.MODE": "0", "set.LR": "fast"})[1]
    assert '<option value="0" selected>(empty)</option>' in page


@pytest.mark.parametrize("clone", ["abc", "99", "9" * 11, "-1", "1.0"])
def test_a_trial_to_start_from_that_is_none_is_told_when_it_is_asked_for(
    shown: Application, review: Review, clone: str
) -> None:
    words = f"clone {clone}: there is no such trial; there are 8, from 0"
    status, page = ask(shown, "/steer", QUERY_STRING=f"clone={clone}")
    assert (status[:3], words in page) == ("400", True)
    status, page = post(shown, {"token": token_of(shown), "enqueue": "1", "clone": clone, "set.LR": "0.001"})
    assert (status[:3], words in page) == ("400", True)
    assert rows(review) == []


@pytest.mark.parametrize("sender", [{"HTTP_ORIGIN": "http://["}, {"CONTENT_LENGTH": "²"}, {"CONTENT_LENGTH": "-1"}])
def test_headers_that_cannot_be_read_are_no_error_of_the_server(
    shown: Application, review: Review, sender: dict[str, str]
) -> None:
    body = urlencode({"token": token_of(shown), "stop": "6"}).encode()
    sent = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body)}
    assert ask(shown, "/steer", **sent | sender)[0][:3] in ("400", "403")
    assert rows(review) == []


@pytest.mark.parametrize(
    "sender",
    [
        {"HTTP_ORIGIN": "http://elsewhere.example"},
        {"HTTP_ORIGIN": "null"},
        {"HTTP_SEC_FETCH_SITE": "cross-site"},
        {"HTTP_SEC_FETCH_SITE": "same-site", "HTTP_ORIGIN": "http://127.0.0.1:80"},
        {"HTTP_HOST": "elsewhere.example"},
    ],
)
def test_no_other_site_can_send_a_form_even_one_that_knew_the_token(
    shown: Application, review: Review, sender: dict[str, str]
) -> None:
    status, _ = post(shown, {"token": token_of(shown), "stop": "6"}, **sender)
    assert status.startswith("403")
    assert rows(review) == []


@pytest.mark.parametrize("token", ["", "guess", "é"])
def test_a_form_without_the_pages_own_token_asks_for_nothing(shown: Application, review: Review, token: str) -> None:
    status, words = post(shown, {"token": token, "stop": "6"}, HTTP_ORIGIN="http://127.0.0.1:80")
    assert status.startswith("403")
    assert "open /steer again" in words
    assert rows(review) == []


def test_the_page_can_be_put_into_no_frame_and_runs_no_script(shown: Application) -> None:
    heard: list[Any] = []
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/steer", "QUERY_STRING": "", "HTTP_HOST": "127.0.0.1"}
    page = b"".join(shown(environ, lambda status, headers, *_: heard.append(dict(headers))))
    assert heard[0]["X-Frame-Options"] == "DENY"
    assert "frame-ancestors 'none'" in heard[0]["Content-Security-Policy"]
    assert "default-src 'none'" in heard[0]["Content-Security-Policy"]
    assert b"<script" not in page


def test_typed_texts_are_texts(shown: Application) -> None:
    hostile = "\"><script>document.title='owned'</script>"
    status, page = post(shown, {"token": token_of(shown), "enqueue": "1", "set.LR": hostile, "parallel": hostile})
    assert status.startswith("400")
    assert "<script" not in page
    assert "<script" not in ask(shown, "/steer", QUERY_STRING=urlencode({"clone": hostile, "asked": hostile}))[1]


def test_the_page_says_what_became_of_a_request_and_looks_again_only_while_a_driver_is_at_work(
    shown: Application, review: Review
) -> None:
    def page(query: str) -> tuple[dict[str, str], str]:
        heard: list[Any] = []
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/steer", "QUERY_STRING": query, "HTTP_HOST": "127.0.0.1"}
        body = b"".join(shown(environ, lambda status, headers, *_: heard.append(dict(headers))))
        return heard[0], body.decode()

    assert post(shown, {"token": token_of(shown), "stop": "6"})[0].startswith("303")
    headers, text = page("asked=0")
    assert "Refresh" not in headers
    assert "Nobody drives the sweep now" in text
    assert "stop trial 6: noted" in text
    with closing(Store(sqlite_url(review.paths.database))) as store:
        lease = store.take_lease(review.study.name, "a driver", time.time(), dead=True)
        headers, text = page("asked=0")
        assert headers["Refresh"] == "2"
        assert "A driver is at work" in text
        Requests(store, review.study.name, lease).answer(rows(review)[0], "it ends", time.time(), accepted=True)
    headers, text = page("asked=0")
    assert "Refresh" not in headers
    assert "stop trial 6: it ends" in text


def test_the_notes_lead_to_the_page(shown: Application, review: Review) -> None:
    running = next(t.number for t in review.sweep.trials.values() if t.state is not TrialState.FINISHED)
    assert f"[Stop it, or try it with changes](/steer?clone={running})" in noted(shown, running)["note"]["body"]
    assert "[Try it with changes](/steer?clone=0)" in noted(shown, 0)["note"]["body"]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=st.dictionaries(st.sampled_from(["stop", "enqueue", "clone", "set.LR", "pause", "trials", "x"]), st.text())
)
def test_no_form_is_an_error_of_the_server(shown: Application, fields: dict[str, str]) -> None:
    clean = {name: text.encode(errors="replace").decode() for name, text in fields.items()}
    assert post(shown, {"token": token_of(shown), **clean})[0][0] in "34"


@pytest.mark.browser
def test_a_reviewer_stops_a_trial_with_one_click(browser: Browser, review: Review) -> None:
    with serving(review) as address:
        browser.look(width=500, height=900)
        browser.open(address + "/steer")
        browser.click("button", "Stop")
        assert "stop trial 6: noted" in browser.find("[role=status]").text
    (row,) = rows(review)
    assert row.what == {"trial": 6}
