"""What every command ends with: its help, the table in docs/service.md, and what happens are one."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from lora_tune.__main__ import COMMANDS
from tests.conftest import REPOSITORY
from tests.fakes import command_study

TABLE = (REPOSITORY / "docs" / "service.md").read_text(encoding="utf-8").partition("## Exit codes\n")[2]


def command(name: str) -> click.Command:
    module = f"lora_tune.{name}.__main__" if name == "logs" else f"lora_tune.{name}"
    found: click.Command = importlib.import_module(module).main
    return found


def documented(name: str) -> set[int]:
    """The codes of a command's row, less those of an empty cell."""
    rows = [re.split(r" *\| *", line.strip("| ")) for line in TABLE.splitlines() if line.startswith("| `")]
    (row,) = (row for row in rows if f"`{name}`" in row[0])
    return {code for code, cell in zip((0, 2, 3, 4), row[1:], strict=False) if cell}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_names_the_codes_of_its_row(name: str) -> None:
    told = re.search(r"Exit codes: (.*?\.)\s*(?:[A-Z]|$)", " ".join((command(name).help or "").split()))
    assert told is not None
    assert {int(code) for code in re.findall(r"(?:^|; )([0-9]+) ", told[1])} - {1, 130} == documented(name)


READS_A_SWEEP = ("confirm", "status", "steer", "export", "report", "explain", "verdict", "dashboard")
MORE = {
    "steer": ["--pause"],
    "tell": ["--token", "x"],
    "logs": ["x.log"],
    "replay": ["x.log"],
    "ingest": ["x.log"],
}


def code(name: str, *options: str) -> int:
    ended = CliRunner().invoke(command(name), [*options, *MORE.get(name, [])])
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    return ended.exit_code


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(command_study(trials=1))
    (tmp_path / "x.log").write_text("nothing\n")
    return "s.toml"


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_that_there_is_not_is_the_users_input(name: str, study: str) -> None:
    assert code(name, "--nosuch") == 2


@pytest.mark.parametrize("name", ["sweep", "doctor", "logs", "replay", "ingest", *READS_A_SWEEP])
def test_a_study_that_there_is_not_is_the_users_input(name: str, study: str) -> None:
    assert code(name, "--study", "nosuch") == 2


@pytest.mark.parametrize("name", READS_A_SWEEP)
def test_a_sweep_that_there_is_not_yet_is_the_users_input_and_a_database_the_machines(name: str, study: str) -> None:
    assert code(name, "--study", study) == 2
    assert code(name, "--study", study, "--storage", "sqlite:////nowhere/x.db") == 3
    assert code(name, "--study", study, "--storage", "postgresql+psycopg://u@127.0.0.1:1/x") == 3


@pytest.mark.parametrize("name", ["logs", "ingest"])
def test_a_log_that_says_nothing_is_told_by_a_code_of_its_own(name: str, study: str) -> None:
    assert code(name, "--study", study) == 4


def test_a_folder_that_cannot_be_scored_is_the_users_input(study: str) -> None:
    assert code("score", ".") == 2
