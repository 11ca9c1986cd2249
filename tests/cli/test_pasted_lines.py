"""Every command that is printed runs when it is pasted: a page's from any folder, a terminal's from where it stood."""

from __future__ import annotations

import html
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune.__main__ import main
from tests.builders import ACTIVE_ENVIRONMENT
from tests.cli.test_api import STUDY
from tests.conftest import REPOSITORY
from tests.own_scripts.rows import SCRIPTS

LINE = re.compile(r"(?:python|\S*/python[\d.]*) -m lora_tune\.(\w+) ([^\n`<;]*)")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study, its script, and a sweep whose folder is not the usual one and has a space in its name."""
    place = tmp_path_factory.mktemp("a place")
    for name in ("descent.py", "plain_step_loss.py"):
        shutil.copy(SCRIPTS / name, place)
    (place / "mine.toml").write_text(STUDY)
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    line = [sys.executable, "-m", "lora_tune.sweep", "--study", "mine.toml", "--output", "the sweep", "--trials", "2"]
    done = subprocess.run(line, cwd=place, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (place / "printed.txt").write_text(done.stdout)
    return place


def pasted(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> str:
    """What the printed line prints when it is run in ``folder``; it must end with exit code 0."""
    found = LINE.search(line)
    assert found is not None, line
    monkeypatch.chdir(folder)
    words = [found[1], *shlex.split(found[2]), *more]
    done = CliRunner(env=ACTIVE_ENVIRONMENT).invoke(main, words, prog_name="lora-tune")
    assert done.exit_code == 0, f"{words}: {done.output}"
    return done.output


def lines(text: str, command: str) -> list[str]:
    return [found[0].strip() for found in LINE.finditer(html.unescape(text)) if found[1] == command]


def filled(line: str) -> str:
    """The line with the words that a person fills in."""
    return line.replace("TRIAL", "1").replace("NAME=VALUE", "LR=0.03")


def test_the_lines_of_the_report_run_from_another_folder(
    swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (swept / "the sweep" / "report.html").read_text(encoding="utf-8")
    (export,) = lines(page, "export")
    assert str(swept / "the sweep" / "best") in pasted(export, tmp_path, monkeypatch)
    (steer,) = lines(page.replace("data-clone=", "\n"), "steer")
    assert "LR=0.03" in pasted(filled(steer).rstrip('">'), tmp_path, monkeypatch)


def test_a_report_that_is_written_elsewhere_names_the_sweep_all_the_same(
    swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(swept)
    words = ["report", "--study", "mine.toml", "--output", "the sweep", "--to", str(tmp_path / "page.html")]
    assert CliRunner().invoke(main, words).exit_code == 0
    (export,) = lines((tmp_path / "page.html").read_text(encoding="utf-8"), "export")
    pasted(export, tmp_path, monkeypatch)


def test_what_a_sweep_prints_at_its_end_runs_where_it_was_printed(swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (review,) = lines((swept / "printed.txt").read_text(), "dashboard")
    for command in ("status", "explain", "verdict", "report", "export", "confirm", "logs"):
        more = {"confirm": ("--dry-run",), "logs": (str(swept / "the sweep/trials/0000/attempt-0/job.log"),)}
        line = review.replace("lora_tune.dashboard", f"lora_tune.{command}")
        line = line.replace(" --output 'the sweep'", "") if command == "logs" else line
        pasted(line, swept, monkeypatch, *more.get(command, ()))


def test_the_line_that_shows_a_log_in_which_nothing_was_found_runs(swept: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nsys.argv[1:]\nprint('step 1 validation loss 0.4')\n")
    (tmp_path / "mine.toml").write_text(STUDY.replace("plain_step_loss.py", "train.py"))
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    line = [sys.executable, "-m", "lora_tune.sweep", "--study", "mine.toml", "--output", "out"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3, done.stdout + done.stderr
    (show,) = lines(done.stderr, "logs")
    words = show.partition(" shows ")[0].split()
    shown = subprocess.run(
        [sys.executable, "-m", *words[words.index("-m") + 1 :]],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert shown.returncode == 4, shown.stderr
    assert "try in its place: kind = " in shown.stdout


def test_a_shell_runs_the_line_as_it_stands(swept: Path, tmp_path: Path) -> None:
    page = (swept / "the sweep" / "report.html").read_text(encoding="utf-8")
    (export,) = lines(page, "export")
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        ["bash", "-c", export], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "run it: source" in done.stdout
