"""``lora-tune``: one command for all, fast to start, completed by the shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from lora_tune.__main__ import COMMANDS, main
from tests.conftest import REPOSITORY

RUN = [sys.executable, "-c", "from lora_tune.__main__ import main; main(prog_name='lora-tune')"]


def completed(words: str, place: Path) -> list[str]:
    """What bash is offered for the last word."""
    variables = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1), "PYTHONPATH": str(REPOSITORY)}
    environment = {**os.environ, "_LORA_TUNE_COMPLETE": "bash_complete", **variables}
    done = subprocess.run(RUN, cwd=place, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_commands_options_and_studies_are_completed(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").touch()
    assert completed("lora-tune s", tmp_path) == [name for name in COMMANDS if name.startswith("s")]
    assert "--dry-run" in completed("lora-tune sweep --dr", tmp_path)
    assert completed("lora-tune status --study ti", tmp_path) == ["tiny"]
    assert completed("lora-tune status mi", tmp_path) == ["mine.toml"]


def with_a_study(command: str) -> bool:
    """Whether a command is about one study, which may be its first word."""
    loaded = main.get_command(click.Context(main), command)
    assert loaded is not None
    return any(isinstance(p, click.Argument) and p.name == "word" for p in loaded.params)


@pytest.mark.parametrize("command", [name for name in COMMANDS if with_a_study(name)])
def test_the_study_is_an_option_or_the_first_word(command: str) -> None:
    loaded = main.get_command(click.Context(main), command)
    assert loaded is not None
    needed = [word for p in loaded.params if p.required for word in (p.opts[0], "1")]
    by_option = CliRunner().invoke(main, [command, "--study", "tinny", *needed])
    by_word = CliRunner().invoke(main, [command, "tinny", *needed])
    assert "did you mean tiny?" in by_option.output
    assert (by_word.exit_code, by_word.output) == (by_option.exit_code, by_option.output)

    twice = CliRunner().invoke(main, [command, "tinny", "--study", "tiny", *needed])
    assert twice.exit_code == 2
    assert "the study is given twice: tiny by --study, and tinny" in twice.output


def test_a_slip_in_the_study_of_the_tools_is_said_as_they_start() -> None:
    started = CliRunner().invoke(main, ["mcp", "--study", "tinny"])
    assert started.exit_code == 2
    assert "did you mean tiny?" in started.output


@pytest.mark.parametrize(("command", "line"), [("sweep", "--study mine.toml"), ("logs", "--study mine.toml LOGS...")])
def test_without_a_study_the_line_to_type_names_the_file_that_lies_here(
    command: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").touch()
    words = ["train.log"] if command == "logs" else []
    assert (
        f"lora-tune {command} {line} (here: mine.toml)"
        in CliRunner().invoke(main, [command, *words], prog_name="lora-tune").output
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    printed = CliRunner().invoke(main, ["--completion", shell])
    assert printed.exit_code == 0
    assert f"_LORA_TUNE_COMPLETE={shell}_complete" in printed.output
