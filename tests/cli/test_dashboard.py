"""The dashboard: optuna-dashboard over a sweep, with notes, files and figures; only people's notes are written."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import assume, given
from hypothesis import strategies as st
from optuna.artifacts.exceptions import ArtifactNotFound

from lora_tune.base.host import is_loopback
from lora_tune.base.paths import SweepPaths
from lora_tune.cli import commands, dashboard
from lora_tune.cli.options import Review, load_sweep
from lora_tune.cli.web_server import Application
from lora_tune.config.study import Study
from lora_tune.review import dashboard_storage, notes
from lora_tune.review.notes import LINE, LONGEST
from lora_tune.review.summary import recommended_text
from lora_tune.search.recommendation import Recommended
from lora_tune.store import Remarks, Store, sqlite_url
from lora_tune.store.port import Remark
from lora_tune.store.records import StudyRecords, Verdict
from tests.browser import Browser
from tests.builders import BEGAN, HOSTILE, STUDY, hostile, stored, study_of, sweep_of
from tests.confirmed_sweep import after_confirm
from tests.dashboards import serving
from tests.waiting import wait_for

NOW = BEGAN + 30 * 3600
LOG = ":::MLLOG a line of the log\nHF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345\n"


def with_files(folder: Path, sweep: StudyRecords) -> None:
    """A log and a config in every attempt's folder, as jobs leave them."""
    for attempt in sweep.attempts.values():
        place = folder / attempt.folder
        place.mkdir(parents=True)
        (place / "job.log").write_text(LOG)
        (place / "config_H100_1x8x4xtp4pp1cp1.sh").write_text("export LR=0.0004\n")


def reviewed(folder: Path, trials: int = 4, running: int = 0) -> Review:
    """A stored sweep, as the command loads it."""
    study = study_of()
    sweep = sweep_of(study, trials=trials, running=running)
    stored(folder, sweep, study)
    return Review(study, sweep, SweepPaths(folder), Path("built.toml"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Review:
    """A stored sweep of 24 trials, two of them open, with files."""
    review = reviewed(tmp_path_factory.mktemp("sweeps") / "built", trials=24, running=2)
    with_files(review.paths.root, review.sweep)
    return review


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


def test_each_trial_comes_with_a_note_attributes_with_units_and_its_files(shown: Application, built: Review) -> None:
    _, detail = ask(shown, "/api/studies/1")
    assert len(detail["trials"]) == len(built.sweep.trials)
    for trial in detail["trials"]:
        record = built.sweep.trials[trial["number"]]
        assert f"{LINE}\n\n## Trial {record.number}: " in trial["note"]["body"]
        attributes = {a["key"]: a["value"] for a in trial["user_attrs"]}
        assert attributes["verdict"] == str(record.verdict or record.state)
        if record.seconds is not None:
            assert float(attributes["time to target (s)"]) == pytest.approx(record.seconds, rel=1e-5)
            assert float(attributes["time to target, 90% low (s)"]) <= record.seconds * 1.00001
        assert {"job.log", "config_H100_1x8x4xtp4pp1cp1.sh"} <= {a["filename"] for a in trial["artifacts"]}


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


def test_after_confirm_the_chosen_trial_is_the_best_one_and_the_other_says_that_it_was_passed_over(
    tmp_path: Path,
) -> None:
    study = study_of()
    sweep, chosen, passed = after_confirm(study, sweep_of(study))
    stored(tmp_path, sweep, study)
    review = Review(study, sweep, SweepPaths(tmp_path), Path("built.toml"))
    _, detail = ask(dashboard.application(review, None), "/api/studies/1")
    assert [trial["number"] for trial in detail["best_trials"]] == [chosen.number]
    said = {t["number"]: {a["key"]: a["value"] for a in t["user_attrs"]} for t in detail["trials"]}
    assert said[chosen.number]["with more seeds"].startswith("chosen: mean ")
    assert said[passed.number]["with more seeds"].startswith("passed over: mean ")


def test_a_failed_attempt_offers_its_diagnosis(shown: Application, built: Review) -> None:
    failed = next(a for a in built.sweep.attempts.values() if a.failure)
    _, detail = ask(shown, "/api/studies/1")
    trial = next(t for t in detail["trials"] if t["number"] == failed.trial)
    file = next(a for a in trial["artifacts"] if a["filename"].endswith("diagnosis.txt"))
    status, text = ask(shown, f"/artifacts/1/{trial['trial_id']}/{file['artifact_id']}")
    assert status.startswith("200")
    assert failed.line in text
    assert failed.remedy in text


def test_a_file_is_shown_as_text_with_secrets_hidden(shown: Application) -> None:
    _, detail = ask(shown, "/api/studies/1")
    trial = detail["trials"][0]
    log = next(a for a in trial["artifacts"] if a["filename"] == "job.log")
    assert log["mimetype"].startswith("text/plain")
    _, text = ask(shown, f"/artifacts/1/{trial['trial_id']}/{log['artifact_id']}")
    assert "a line of the log" in text
    assert "hf_abcdefghijklmnopqrstuvwxyz012345" not in text


def test_the_figures_and_the_summary_are_there(shown: Application) -> None:
    _, detail = ask(shown, "/api/studies/1")
    assert detail["objective_names"] == ["time to eval loss 0.925 (s)"]
    assert "| Recommended |" in detail["note"]["body"]
    assert "| Best run |" in detail["note"]["body"]
    figures = {f["id"]: json.loads(f["graph_object"]) for f in detail["plotly_graph_objects"]}
    wanted = {
        "eval-curves",
        "samples-to-target",
        "time",
        "throughput",
        "spending",
        "timeline",
    }
    assert figures.keys() == wanted
    assert all(f["data"] for f in figures.values())


def test_the_list_waits_for_no_model_and_the_note_is_whole_when_it_is_done(
    built: Review, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, may = dashboard_storage.recommend, threading.Event()

    def slow(study: Study, sweep: StudyRecords) -> Recommended | None:
        assert may.wait(60)
        return real(study, sweep)

    monkeypatch.setattr(dashboard_storage, "recommend", slow)
    shown = dashboard.application(built, None)
    _, detail = ask(shown, "/api/studies/1")
    assert len(detail["trials"]) == 24
    assert f"| Recommended | {notes.WORKING} |" in detail["note"]["body"]
    assert "| Best run |" in detail["note"]["body"]
    may.set()
    wait_for(lambda: notes.WORKING not in ask(shown, "/api/studies/1")[1]["note"]["body"])
    believed = real(built.study, built.sweep)
    assert believed is not None
    whole = ask(shown, "/api/studies/1")[1]["note"]["body"]
    assert f"| Recommended | {notes.plain(recommended_text(built.study, believed))}, " in whole


def test_what_working_it_out_raised_is_raised_and_tried_again(built: Review, monkeypatch: pytest.MonkeyPatch) -> None:
    real, fails = dashboard_storage.recommend, [True]

    def broken(study: Study, sweep: StudyRecords) -> Recommended | None:
        if fails.pop():
            raise ValueError("no model")
        return real(study, sweep)

    monkeypatch.setattr(dashboard_storage, "recommend", broken)
    monkeypatch.setattr(dashboard_storage, "GRACE_SECONDS", 60)
    belief, fresh = dashboard_storage.RecommendationInBackground(built.study), replace(built.sweep)
    with pytest.raises(ValueError, match="no model"):
        belief.of(fresh)
    fails[:] = [False, False]
    assert belief.of(fresh) == (real(built.study, built.sweep), True)


def test_a_thread_that_cannot_be_started_is_tried_again(built: Review, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    belief, fresh = dashboard_storage.RecommendationInBackground(built.study), replace(built.sweep)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="new thread"):
            belief.of(fresh)
    monkeypatch.setattr(dashboard_storage, "GRACE_SECONDS", 60)
    assert belief.of(fresh)[1]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(shown: Application, method: str) -> None:
    for path in (
        "/api/studies/1",
        "/api/studies/1/rename",
        "/api/trials/1/tell",
        "/api/studies",
        "/api/trials/1/user-attrs",
    ):
        status, body = ask(shown, path, REQUEST_METHOD=method)
        assert status.startswith("403")
        assert "read-only" in body["reason"]


def put(shown: Application, path: str, **wish: Any) -> tuple[str, Any]:
    """The answer to a request that writes a note."""
    connection = {name: wish.pop(name) for name in ("REMOTE_ADDR", "REMOTE_PORT") if name in wish}
    body = json.dumps(wish).encode()
    given = connection | {"CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body)}
    return ask(shown, path, REQUEST_METHOD="PUT", **given)


def test_a_note_carries_who_wrote_it_and_not_who_runs_the_dashboard(tmp_path: Path) -> None:
    review = reviewed(tmp_path / "noted")
    shown = dashboard.application(review, None)
    status, _ = put(shown, "/api/studies/1/note", version=2, body="mine", REMOTE_ADDR="192.0.2.7", REMOTE_PORT="5")
    assert status.startswith("204")
    with closing(Store(sqlite_url(review.paths.database), read_only=True)) as store:
        (remark,) = Remarks(store, review.study.name).history()
    assert remark.who.startswith("192.0.2.7 by the dashboard of ")


def noted(shown: Application, number: int) -> dict[str, Any]:
    """A trial as the dashboard lists it."""
    _, detail = ask(shown, "/api/studies/1")
    return next(t for t in detail["trials"] if t["number"] == number)


def test_what_a_colleague_writes_beside_a_trial_is_kept_with_its_tags_and_the_facts_stay_ours(
    tmp_path: Path,
) -> None:
    review = reviewed(tmp_path / "noted")
    shown = dashboard.application(review, None)
    before = noted(shown, 2)
    facts = before["note"]["body"]
    edited = "Odd spike, #rerun it. #good\n\n" + facts.replace("## Trial 2: ", "## Trial 2 is wonderful: ")
    status, _ = put(
        shown, f"/api/studies/1/{before['trial_id']}/note", version=before["note"]["version"] + 1, body=edited
    )
    assert status.startswith("204")
    status, _ = put(shown, "/api/studies/1/note", version=2, body="Ask Ann before you export.")
    assert status.startswith("204")

    again = dashboard.application(review, None)
    after = noted(again, 2)
    assert after["note"] == {
        "version": before["note"]["version"] + 1,
        "body": "Odd spike, #rerun it. #good\n\n" + facts,
    }
    assert {"key": "tags", "value": "rerun good"} in after["user_attrs"]
    _, detail = ask(again, "/api/studies/1")
    assert detail["note"]["body"].startswith("Ask Ann before you export.\n\n" + LINE)
    assert "| Best run |" in detail["note"]["body"]
    assert load_sweep("built", review.paths, None).trials == review.sweep.trials


def test_of_two_who_write_at_once_the_second_is_told_and_loses_nothing(tmp_path: Path) -> None:
    review = reviewed(tmp_path / "noted")
    shown = dashboard.application(review, None)
    trial = noted(shown, 0)
    path, version = f"/api/studies/1/{trial['trial_id']}/note", trial["note"]["version"] + 1
    assert put(shown, path, version=version, body="first")[0].startswith("204")
    status, answer = put(shown, path, version=version, body="second")
    assert status.startswith("409")
    assert "copy your text" in answer["reason"]
    assert answer["note"]["body"].startswith("first\n")
    assert put(shown, path, version=answer["note"]["version"] + 1, body="first, second")[0].startswith("204")
    assert noted(shown, 0)["note"]["body"].startswith("first, second\n")


@pytest.mark.parametrize(
    "wish",
    [
        {},
        {"version": 2},
        {"version": "2", "body": ""},
        {"version": 2, "body": 3},
        {"version": 2, "body": "x" * LONGEST},
        {"version": 2, "body": "half a pair: \ud83d"},
        {"version": 2, "body": "nothing: \0"},
    ],
)
def test_what_is_no_note_is_refused(built: Review, wish: dict[str, Any]) -> None:
    status, answer = put(dashboard.application(built, None), "/api/studies/1/note", **wish)
    assert status.startswith("400")
    assert "note" in answer["reason"] or "version" in answer["reason"]


def test_the_lines_that_steer_stand_beside_the_sweep_and_each_trial(tmp_path: Path) -> None:
    review = reviewed(tmp_path / "steered", running=1)
    shown = dashboard.application(review, None)
    last = len(review.sweep.trials) - 1
    line = f"lora_tune.steer --study built --output {tmp_path / 'steered'}"
    assert f"{line} --stop {last}\n" in noted(shown, last)["note"]["body"]
    ended = noted(shown, 0)["note"]["body"]
    assert "--stop" not in ended
    assert f"{line} --enqueue --clone 0 --set NAME=VALUE\n" in ended
    _, detail = ask(shown, "/api/studies/1")
    assert f"{line} --pause\n" in detail["note"]["body"]


@given(st.text(), st.text(min_size=1).map(lambda text: f"## {text}"))
def test_an_unedited_note_gives_back_what_was_written(text: str, facts: str) -> None:
    body = notes.whole(Remark(trial=0, version=1, text=text.strip(), who="", written_at=0.0), facts)["body"]
    assume(LINE not in text)
    assert notes.own_part(body, facts) == text.strip()


def test_tags_are_words_that_begin_with_a_number_sign() -> None:
    assert notes.tags("#good, see issue #12 and a#b\n# Heading\n#re-run #good") == ["good", "re-run"]


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
        ("/api/studies/1/note", {"REQUEST_METHOD": "PUT", "CONTENT_LENGTH": "\xb2"}),
        ("/api/studies/1/note", {"REQUEST_METHOD": "PUT", "CONTENT_LENGTH": HUGE}),
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


def test_the_storage_refuses_by_itself(built: Review) -> None:
    import optuna

    inner = optuna.storages.RDBStorage(f"sqlite:///{built.paths.database}")
    storage = dashboard_storage.DashboardStorage(
        inner, dashboard_storage.Snapshot(built.study, built.paths.root, lambda _: built.sweep)
    )
    for change in (lambda: storage.delete_study(1), lambda: storage.set_study_user_attr(1, "a", 1)):
        with pytest.raises(dashboard_storage.ReadOnlyError):
            change()


@pytest.mark.parametrize("wrong", ["ffff-0-00000000", "0-0-deadbeef", "zz", "0-0", ""])
def test_only_files_of_attempts_are_served(built: Review, wrong: str) -> None:
    files = dashboard_storage.SweepFiles(
        dashboard_storage.Snapshot(built.study, built.paths.root, lambda _: built.sweep)
    )
    with pytest.raises(ArtifactNotFound):
        files.open_reader(wrong)


def test_a_folder_outside_the_sweep_offers_nothing(built: Review, tmp_path: Path) -> None:
    from dataclasses import replace

    (tmp_path / "secret.txt").write_text("not yours")
    attempt = replace(next(iter(built.sweep.attempts.values())), folder=f"../../../..{tmp_path}", failure="")
    assert notes.artifacts(built.paths.root, attempt) == []


def test_of_a_long_log_the_end_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "job.log"
    with file.open("wb") as log:
        log.truncate(1 << 30)
        log.seek(1 << 30)
        log.write(b"\nthe last line\n")
    text = dashboard_storage.shown(file)
    assert text.startswith("[the last ")
    assert text.endswith("the last line\n")
    assert len(text) < dashboard_storage.LARGEST_FILE + 100


@pytest.mark.parametrize("text", [HOSTILE, "a|b", "**x**", "<b>", "http://x.example/", "line\nline", "`$(x)`"])
def test_plain_leaves_no_markup(text: str) -> None:
    made = notes.plain(text)
    assert "\n" not in made
    assert not re.search(r"(?<!\\)[`*_\[\]<>|$]", made)
    assert "http://" not in made


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
        with pytest.raises(urllib.error.HTTPError, match="401"):
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


def test_a_sweep_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(commands.dashboard, ["--study", "tiny", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "there is no sweep of tiny" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_is_said_in_one_line(built: Review, address: str) -> None:
    options = ["--study", "built", "--output", str(built.paths.root), "--port", address.rsplit(":", 1)[1]]
    result = CliRunner().invoke(commands.dashboard, options)
    assert result.exit_code == 3
    assert "choose another --port" in result.output


@pytest.mark.browser
def test_a_reviewer_opens_the_study_a_trial_its_file_and_a_figure(
    browser: Browser, address: str, built: Review
) -> None:
    browser.look(width=1400, height=1000)
    browser.open(address + "/dashboard")
    browser.click("a[href$='/studies/1']", "built")
    drawn = "return [...document.querySelectorAll('.gtitle')].map(t => t.textContent)"
    titles = {"Eval curves", "Where the time goes", "Throughput by layout", "Timeline of nodes"}
    browser.until(lambda: titles <= set(browser.run(drawn)), "the saved figures are drawn")
    _hide_a_trace_of(browser, "Eval curves")

    number = next(a.trial for a in built.sweep.attempts.values() if a.failure == "infrastructure")
    browser.click("a[href$='/studies/1/trials']")
    browser.click("[role=button]", f"Trial {number}\n")
    browser.find("h2", f"Trial {number}: ")
    assert "another node; run the NCCL test on this one" in browser.find("body").text
    browser.click("li a", "job.log")
    assert "a line of the log" in browser.find("body").text


@pytest.mark.browser
@pytest.mark.parametrize("page", ["/dashboard", "/dashboard/studies/1", "/dashboard/studies/1/note"])
def test_no_page_complains(browser: Browser, address: str, page: str) -> None:
    browser.open(address + page)
    browser.until(lambda: "built" in browser.find("body").text, "the page is drawn")
    wait_for(lambda: browser.run("return document.readyState") == "complete", 20)
    assert browser.complaints() == []


@pytest.mark.browser
def test_a_long_command_wraps_instead_of_widening_the_note(browser: Browser, address: str) -> None:
    browser.look(width=700, height=900)
    browser.open(address + "/dashboard/studies/1/note")
    browser.find("pre", "lora_tune.steer")
    assert browser.run("const p = document.querySelector('pre'); return p.scrollWidth <= p.clientWidth")


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1440])
def test_a_trial_s_page_is_as_wide_as_the_window(browser: Browser, address: str, built: Review, width: int) -> None:
    number = next(a.trial for a in built.sweep.attempts.values() if a.failure == "infrastructure")
    browser.look(width=width, height=900)
    browser.open(f"{address}/dashboard/studies/1/trials?numbers={number}")
    heading = browser.find("h2", f"Trial {number}: ")
    assert browser.run("return document.documentElement.scrollWidth") == width
    assert heading.rect["width"] > min(width, 600) / 2, "the list of trials leaves it room"


def _hide_a_trace_of(browser: Browser, title: str) -> None:
    """A click on the last name in a figure's legend, which takes its lines away."""
    plot = f"[...document.querySelectorAll('.js-plotly-plot')].find(p => p.textContent.includes('{title}'))"
    lines = f"return {plot}.querySelectorAll('.scatterlayer .trace').length"
    before = browser.run(lines)
    browser.run(f"{plot}.scrollIntoView({{block: 'center'}})")
    browser.run(f"return [...{plot}.querySelectorAll('.legendtoggle')].at(-1)").click()
    browser.until(lambda: browser.run(lines) < before, "the lines went away")


@pytest.mark.browser
def test_a_hostile_study_runs_nothing_in_the_dashboard(browser: Browser, tmp_path: Path) -> None:
    study, sweep = hostile()
    folder = tmp_path / "hostile"
    stored(folder, sweep, study)
    with_files(folder, sweep)
    review = Review(study, sweep, SweepPaths(folder), Path("hostile.toml"))
    with serving(review) as address:
        for page in ("", "/trials?numbers=0", "/note", "/trialTable"):
            browser.open(f"{address}/dashboard/studies/1{page}")
            browser.find("header", "hostile")
            wait_for(lambda: browser.run("return document.readyState") == "complete", 20)
            assert "owned" not in browser.run("return document.title")
            assert browser.run("return document.querySelectorAll('img[src=x]').length") == 0
    assert not [p for p in Path.cwd().iterdir() if p.name == "owned"]


def test_trials_are_made_of_the_records_and_not_read_from_optuna_s_tables(built: Review) -> None:
    """Which takes seconds for thousands of trials; the study alone is asked for there."""
    import optuna

    class OnlyTheStudy(optuna.storages.RDBStorage):
        def get_all_trials(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("Optuna's trials are read")

        get_trial = get_all_trials

    inner = OnlyTheStudy(f"sqlite:///{built.paths.database}")
    snapshot = dashboard_storage.Snapshot(built.study, built.paths.root, lambda _: built.sweep)
    storage = dashboard_storage.DashboardStorage(inner, snapshot)
    shown = storage.get_all_trials(1)
    assert [trial.number for trial in shown] == sorted(built.sweep.trials)
    for trial in shown:
        assert trial.params == dict(built.sweep.trials[trial.number].tuned)
        assert storage.number_of(trial._trial_id) == trial.number
        assert storage.get_trial(trial._trial_id).number == trial.number
    complete = storage.get_all_trials(1, states=(optuna.trial.TrialState.COMPLETE,))
    assert complete
    assert {t.state for t in complete} == {optuna.trial.TrialState.COMPLETE}
    for unknown in (0, -1, len(shown) + 1):
        with pytest.raises(KeyError):
            storage.get_trial(unknown)


def test_a_study_of_thousands_of_attributes_is_not_read_for_every_trial(built: Review) -> None:
    """The trials' notes are no study attributes: optuna-dashboard would look through all of them for each trial."""
    import optuna

    inner = optuna.storages.RDBStorage(f"sqlite:///{built.paths.database}")
    storage = dashboard_storage.DashboardStorage(
        inner, dashboard_storage.Snapshot(built.study, built.paths.root, lambda _: built.sweep)
    )
    assert len(storage.get_study_system_attrs(1)) < 15
