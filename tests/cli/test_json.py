"""``--json``: one object, or one a line, that says what the sentences say; and what Optuna's study says of itself."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import click
import optuna
import pytest
from click.testing import CliRunner

from lora_tune import Sweep
from lora_tune.__main__ import main
from lora_tune.base.host import commit_of
from tests.cli.test_ask_tell import STUDY
from tests.conftest import REPOSITORY


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """A sweep of one trial that has ended."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(STUDY)
    sweep = Sweep("mine.toml", quiet=True)
    sweep.tell(sweep.ask().token, [(100, 0.5)])
    return sweep


def printed(*words: str) -> list[dict[str, object]]:
    done = CliRunner().invoke(main, [words[0], "--study", "mine.toml", "--json", *words[1:]])
    assert done.exit_code in (0, 3), done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_requests_are_objects_when_they_are_asked_and_when_they_are_listed(sweep: Sweep) -> None:
    (asked,) = printed("steer", "--enqueue", "--set", "LR=0.02")
    assert (asked["kind"], asked["what"]) == ("enqueue", {"values": {"LR": 0.02}, "clone_of": None})
    assert printed("steer") == [asked]


def test_an_export_says_its_file_and_the_line_that_runs_it(sweep: Sweep) -> None:
    (export,) = printed("export")
    assert Path(str(export["config"])).is_file()
    assert (export["trial"], "source" in str(export["run"])) == (0, True)
    refused = CliRunner().invoke(main, ["export", "--study", "mine.toml", "--json", "--check"])
    assert (refused.exit_code, "take --diff and --check out" in refused.stderr) == (2, True)


def test_a_finding_of_the_doctor_is_an_object(sweep: Sweep) -> None:
    findings = printed("doctor")
    assert findings
    assert all(finding.keys() == {"level", "what", "why", "fix"} for finding in findings)


def test_optunas_study_says_what_its_numbers_mean(sweep: Sweep) -> None:
    study = optuna.load_study(study_name="mine", storage=f"sqlite:///{sweep.folder}/sweep.db")
    attributes = {k.removeprefix("lora_tune:"): v for k, v in study.user_attrs.items() if k.startswith("lora_tune:")}
    assert attributes["metric_names"] == ["lowest loss"]
    assert (attributes["target"], attributes["study_hash"]) == (None, sweep.study.digest)
    assert Path(attributes["study_file"]).name == "mine.toml"


def test_a_commit_is_that_of_the_tree_and_says_where_files_differ(tmp_path: Path) -> None:
    assert commit_of(tmp_path / "nowhere") == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "mine.toml").write_text("a")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    clean = commit_of(tmp_path)
    assert len(clean) == 40
    (tmp_path / "mine.toml").write_text("b")
    assert commit_of(tmp_path) == f"{clean}+changes"


def test_a_report_says_its_file_and_ingest_what_it_took(sweep: Sweep) -> None:
    (report,) = printed("report")
    assert Path(str(report["report"])).is_file()
    (figures,) = printed("report", "--svg", "figures")
    assert figures["report"] is None
    assert all(Path(file).suffix == ".svg" for file in figures["figures"])
    Path("runs.csv").write_text("LR,loss\n0.01,0.5\n")
    (shown,) = printed("ingest", "--map", "eval=loss", "runs.csv")
    (taken,) = printed("ingest", "--map", "eval=loss", "--yes", "runs.csv")
    assert (shown["only_shown"], shown["taken"], taken["taken"], taken["known"]) == (True, 0, 1, 0)


def test_a_log_is_an_object_with_what_its_lines_say(sweep: Sweep) -> None:
    Path("run.log").write_text("nothing\n")
    done = CliRunner().invoke(main, ["logs", "--study", "mine.toml", "--json", "run.log"])
    assert done.exit_code == 4
    (log,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert log == {"log": "run.log", "lines": 1, "evals": 0, "read": [], "problem": None}


ALWAYS = {"ask", "tell", "schema"}
"""Commands whose only output is JSON."""

WITHOUT = {
    "init": "it writes the study; MCP's init answers with its text",
    "dashboard": "a server for a browser",
    "mcp": "a server that speaks a protocol",
    "recipes": "prints a study file",
}


def test_every_command_has_json_or_a_reason_and_the_documentation_names_all() -> None:
    commands = {name: main.get_command(click.Context(main), name) for name in main.list_commands(click.Context(main))}
    having = {n for n, c in commands.items() if c is not None and any("--json" in p.opts for p in c.params)}
    assert set(commands) - having - ALWAYS == set(WITHOUT) & set(commands)
    page = (REPOSITORY / "docs" / "service.md").read_text()
    (sentence,) = (line for line in page.splitlines() if "take `--json`" in line)
    assert having | (ALWAYS - {"schema"}) == set(re.findall(r"`([a-z]+)`", sentence.partition("always answer so")[0]))
