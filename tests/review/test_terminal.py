"""Terminals as they are: narrow, dumb, of another locale. No number is cut in half, and no picture ends a sweep."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from lora_tune.cli import interrupts, options, status
from lora_tune.config.study import Study
from lora_tune.review import screen
from lora_tune.store.records import StudyRecords
from tests.builders import BEGAN, STUDY, stored, study_of, sweep_of

NOW = BEGAN + 3600


def printed(study: Study, sweep: StudyRecords, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(screen.trials_table(study, sweep, list(sweep.trials.values()), NOW, "all trials"))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    return text.splitlines()


@pytest.mark.parametrize("width", [34, 40, 60, 80, 100, 160])
def test_a_narrow_table_leaves_columns_out_and_cuts_no_number(width: int) -> None:
    study = study_of()
    _, head, *rows = printed(study, sweep_of(study, trials=24, running=2), width)
    assert max(len(row.rstrip()) for row in rows) <= width
    for row in rows:
        before_parameters = row[: head.index("parameters")] if "parameters" in head else row
        assert "…" not in before_parameters
    assert head.split()[:3] == ["trial", "state", "time"]
    assert ("to target" in head) == (width >= 60)
    assert ("parameters" in head) == (width >= 80)


def test_a_wide_table_shows_long_curves() -> None:
    study = study_of()
    sweep = sweep_of(study, trials=24, evals=20)
    longest = {w: max(len(c) for row in printed(study, sweep, w) for c in re.findall("[▁-█]+", row)) for w in (80, 160)}
    assert longest == {80: 8, 160: 16}


def test_a_throughput_study_has_no_distance_to_a_target() -> None:
    study = study_of(STUDY.replace("target = 0.925", 'score = "throughput"'))
    sweep = sweep_of(study)
    _, head, *rows = printed(study, sweep, 120)
    assert not {"to target", "ETA", "eval loss", "curve"} & set(re.split(r"\s{2,}", head.strip()))
    best = sweep.best(maximise=True)
    assert best is not None
    assert f"{best.objective:.4g}" in rows[best.number]


@pytest.mark.parametrize("encoding", ["ascii", "koi8-r", "iso8859-9"])
def test_any_locale_can_print_the_status(tmp_path: Path, encoding: str) -> None:
    stored(tmp_path, sweep_of(study_of(), trials=24, running=2))
    command = [sys.executable, "-m", "lora_tune.status", "--study", "built", "--output", str(tmp_path), "--all"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "100"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)
    assert done.returncode == 3, done.stderr.decode()  # the driver is gone
    text = done.stdout.decode(encoding)
    assert not done.stderr
    assert re.search(r"[█▄#*+=\-,._]{6}", text)  # KOI8-R has two of the bars
    assert "?" not in text


@pytest.mark.parametrize(
    ("term", "kind"), [("xterm-256color", screen.Screen), ("dumb", screen.Plain), ("", screen.Screen)]
)
def test_a_terminal_that_cannot_redraw_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch, term: str, kind: type[screen.Quiet]
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    made = interrupts.make_view(False, False)
    made.close()
    assert type(made) is kind


def test_the_owner_is_shown_as_people_know_it() -> None:
    study = study_of()
    sweep = sweep_of(study, trials=6, running=1)
    console = Console(file=io.StringIO(), width=100)
    console.print(status.picture(study, sweep, ("host7 pid 42 start 99", BEGAN), BEGAN, every=False))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert "driven by host7 pid 42, last sign 0 s ago" in text


def test_ctrl_c_while_libraries_are_loaded_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "lora_tune.status", "--study", "x"]
    done = subprocess.run(command, capture_output=True, env=environment, cwd=tmp_path, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_ctrl_c_at_any_other_moment_is_130() -> None:
    @click.command()
    @options.guarded
    def command() -> None:
        raise KeyboardInterrupt

    result = CliRunner().invoke(command)
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
