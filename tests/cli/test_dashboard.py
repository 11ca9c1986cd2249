"""The dashboard: optuna-dashboard over a sweep's tables, for who has its address; it only shows."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lora_tune.base.host import is_loopback
from lora_tune.base.paths import SweepPaths
from lora_tune.cli import commands, dashboard
from lora_tune.cli.options import Review
from lora_tune.cli.web_server import Application
from lora_tune.store.records import Verdict
from tests.browser import Browser
from tests.builders import STUDY, hostile, stored, study_of, sweep_of
from tests.confirmed_sweep import after_confirm
from tests.dashboards import serving
from tests.waiting import wait_for


def reviewed(folder: Path, trials: int = 4, running: int = 0) -> Review:
    """A stored sweep, as the command loads it."""
    study = study_of()
    sweep = sweep_of(study, trials=trials, running=running)
    stored(folder, sweep, study)
    return Review(study, sweep, SweepPaths(folder), Path("built.toml"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Review:
    """A stored sweep of 24 trials, two of them open."""
    return reviewed(tmp_path_factory.mktemp("sweeps") / "built", trials=24, running=2)


def ask(application: Application, path: str, **environ: Any) -> tuple[str, Any]:
    """Status and body of one request; JSON comes parsed."""
    heard: list[Any] = []
    request = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": path,
        "QUERY_STRING": "",
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": "80",
        "HTTP_HOST": "127.0.0.1:80",
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(),
        "wsgi.errors": io.StringIO(),
    }
    body = b"".join(application(request | environ, lambda status, headers, *_: heard.append((status, dict(headers)))))
    status, headers = heard[0]
    return status, json.loads(body) if headers.get("Content-Type") == "application/json" else body.decode()


@pytest.fixture(scope="module")
def shown(built: Review) -> Application:
    hosts = frozenset({"127.0.0.1", "localhost"})
    return dashboard.only_shown(dashboard.application(built, None), hosts)


def test_only_trials_that_reached_the_target_have_a_value_among_the_seconds(shown: Application, built: Review) -> None:
    """Optuna would show a pruned trial at its last eval loss, which among seconds looks like the best of all."""
    _, detail = ask(shown, "/api/studies/1")
    valued = {t["number"]: t["values"][0] for t in detail["trials"] if t.get("values")}
    reached = {n: t.metrics.objective for n, t in built.sweep.trials.items() if t.verdict is Verdict.REACHED}
    assert valued == reached


def test_evals_at_parts_of_an_epoch_are_shown_where_they_were(tmp_path: Path) -> None:
    text = STUDY.replace('["bash", "train.sh"]', '["bash", "train.sh"]\nlog = { kind = "hf_trainer" }')
    study = study_of(text)
    sweep = sweep_of(study, trials=3, text=text)
    parts = {key: tuple(e._replace(samples=(i + 1) / 4) for i, e in enumerate(c)) for key, c in sweep.evals.items()}
    sweep = replace(sweep, evals=parts)
    stored(tmp_path, sweep, study)
    _, detail = ask(dashboard.application(Review(study, sweep, SweepPaths(tmp_path), Path("built.toml")), None),
                    "/api/studies/1")  # fmt: skip
    for trial in detail["trials"]:
        steps = [point["step"] for point in trial["intermediate_values"]]
        assert steps == [e.samples for e in sweep.last_evals(trial["number"])]
    assert 0.25 in steps


def test_after_confirm_the_chosen_trial_is_the_best_one(tmp_path: Path) -> None:
    study = study_of()
    sweep, chosen, _ = after_confirm(study, sweep_of(study))
    stored(tmp_path, sweep, study)
    review = Review(study, sweep, SweepPaths(tmp_path), Path("built.toml"))
    _, detail = ask(dashboard.application(review, None), "/api/studies/1")
    assert [trial["number"] for trial in detail["best_trials"]] == [chosen.number]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(shown: Application, method: str) -> None:
    for path in (
        "/api/studies/1",
        "/api/studies/1/rename",
        "/api/studies/1/note",
        "/api/trials/1/tell",
        "/api/studies",
        "/api/trials/1/user-attrs",
    ):
        status, body = ask(shown, path, REQUEST_METHOD=method)
        assert status.startswith("403")
        assert "read-only" in body["reason"]


BIG, HUGE = "9" * 30, "9" * 5000


@pytest.mark.parametrize(
    ("path", "environ"),
    [
        (f"/api/studies/{BIG}/param_importances", {}),
        (f"/csv/{BIG}", {}),
        (f"/api/studies/1/{HUGE}/note", {}),
        ("/api/studies/1\0", {}),
        ("/dashboard/\xff", {}),
        ("/api/studies/1", {"QUERY_STRING": "after=x"}),
        ("/api/studies/1", {"QUERY_STRING": "after="}),
        ("/api/studies/1", {"QUERY_STRING": f"after={HUGE}"}),
        ("/csv/1", {"QUERY_STRING": "trial_ids=1,x"}),
        ("/dashboard", {"QUERY_STRING": "a=1&" * 2000}),
    ],
)
def test_a_request_that_cannot_be_is_answered_with_a_sentence(
    shown: Application, path: str, environ: dict[str, str]
) -> None:
    """Each of them was answered 500, with a traceback on the terminal."""
    status, sentence = ask(shown, path, **environ)
    assert status == "400 Bad Request"
    assert " " in sentence


@pytest.mark.parametrize("path", ["/api/studies/2", "/api/studies/0/plot/contour", "/csv/2", "/artifacts/2/1/log"])
def test_another_study_of_the_database_is_not_shown(shown: Application, path: str) -> None:
    """Whoever had the token of one sweep could read all sweeps of the team; a number that no study has gave 500."""
    assert ask(shown, path) == ("404 Not Found", {"reason": "this dashboard shows one study, number 1"})


@pytest.mark.parametrize("encoding", [None, "\xff"])
def test_a_client_that_names_no_encoding_gets_the_page(shown: Application, encoding: str | None) -> None:
    named = {} if encoding is None else {"HTTP_ACCEPT_ENCODING": encoding}
    assert ask(shown, "/dashboard")[0] == "200 OK"
    assert ask(shown, "/static/no-such-file.js", **named)[0] == "404 Not Found"


def test_a_page_elsewhere_cannot_read_it_by_another_name(shown: Application) -> None:
    status, _ = ask(shown, "/api/studies/1", HTTP_HOST="attacker.example:80")
    assert status.startswith("403")
    assert ask(shown, "/api/studies", HTTP_HOST="localhost:8080")[0].startswith("200")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("10.0.0.5", False),
        ("node7", False),
    ],
)
def test_what_counts_as_this_machine_only(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.fixture(scope="module")
def address(built: Review) -> Iterator[str]:
    """The running command's own server, at the address that it prints."""
    with serving(built) as found:
        yield found


def test_the_command_serves_on_loopback_and_ends_on_ctrl_c(address: str) -> None:
    assert address.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(address + "/api/studies", timeout=20) as answer:
        assert json.load(answer)["study_summaries"][0]["study_name"] == "built"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(urllib.request.Request(address + "/api/studies/1", method="DELETE"), timeout=20)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_who_does_not_know_the_token_is_shown_nothing_and_beyond_this_machine_there_is_a_warning(
    built: Review, host: str
) -> None:
    """On 127.0.0.1, too, where every user of a login node could read the sweep and write notes in its owner's name."""
    command = (sys.executable, "-m", "lora_tune.dashboard", "--study", "built", "--port", "0", "--host", host)
    process = subprocess.Popen(
        (*command, "--output", str(built.paths.root)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        assert process.stdout is not None
        if host == "0.0.0.0":
            assert "can be reached from other machines" in process.stderr.readline()
        address = process.stdout.readline().split()[1].replace("0.0.0.0", "127.0.0.1")
        bare = address.split("/dashboard")[0] + "/api/studies"
        for wrong in (bare, bare + "?token=", bare + "?token=guess"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(wrong, timeout=20)
        note = bare.replace("/api/studies", "/api/studies/1/note")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(note, data=b"trials=999", timeout=20)
        client = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with client.open(address, timeout=20) as answer:
            assert "token" not in answer.url, "the address that stays in the browser does not tell it"
        with client.open(bare, timeout=20) as answer:
            assert json.load(answer)["study_summaries"][0]["study_name"] == "built"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


def test_without_a_token_it_is_for_this_machine_alone() -> None:
    asked = CliRunner().invoke(commands.dashboard, ["--study", "built", "--host", "0.0.0.0", "--no-token"])
    assert asked.exit_code == 2
    assert "--no-token is for this machine alone" in asked.output


def test_two_dashboards_of_one_machine_keep_their_tokens_apart() -> None:
    """A browser sends a cookie to every port of a host, and has one of a name."""
    kept: list[str] = []

    def start_response(_status: str, headers: list[tuple[str, str]]) -> None:
        kept.append(dict(headers)["Set-Cookie"].partition("=")[0])

    for token in ("one", "two"):
        environ = {"REQUEST_METHOD": "GET", "QUERY_STRING": f"token={token}"}
        list(dashboard.with_token(lambda *_: [], token)(environ, start_response))
    assert kept[0] != kept[1]


@pytest.mark.parametrize(
    "cookie", ["", "lora_tune_token", "lora_tune_token=", "lora_tune_token=x", "\x00;=;é=,", "a=" * 999]
)
def test_a_wrong_cookie_opens_nothing(cookie: str) -> None:
    guarded = dashboard.with_token(lambda *_: pytest.fail("it answered"), "the token")
    assert ask(guarded, "/api/studies", HTTP_COOKIE=cookie)[0] == "401 Unauthorized"


def test_a_taken_port_is_said_in_one_line(built: Review, address: str) -> None:
    options = ["--study", "built", "--output", str(built.paths.root), "--port", address.rsplit(":", 1)[1]]
    result = CliRunner().invoke(commands.dashboard, options)
    assert result.exit_code == 3
    assert "choose another --port" in result.output


@pytest.mark.browser
@pytest.mark.parametrize("page", ["/dashboard", "/dashboard/studies/1"])
def test_no_page_complains(browser: Browser, address: str, page: str) -> None:
    browser.open(address + page)
    browser.until(lambda: "built" in browser.find("body").text, "the page is drawn")
    wait_for(lambda: browser.run("return document.readyState") == "complete", 20)
    assert browser.complaints() == []


@pytest.mark.browser
def test_a_hostile_study_runs_nothing_in_the_dashboard(browser: Browser, tmp_path: Path) -> None:
    study, sweep = hostile()
    folder = tmp_path / "hostile"
    stored(folder, sweep, study)
    review = Review(study, sweep, SweepPaths(folder), Path("hostile.toml"))
    with serving(review) as address:
        for page in ("", "/trials?numbers=0", "/note", "/trialTable"):
            browser.open(f"{address}/dashboard/studies/1{page}")
            browser.find("header", "hostile")
            wait_for(lambda: browser.run("return document.readyState") == "complete", 20)
            assert "owned" not in browser.run("return document.title")
            assert browser.run("return document.querySelectorAll('img[src=x]').length") == 0
    assert not [p for p in Path.cwd().iterdir() if p.name == "owned"]
