"""Twenty kinds of scripts that people have: from ``init`` to a swept trial, without a line of the study edited.

Each script under ``scripts/`` prints exactly what its library prints. It runs once by hand, ``init`` gets that log and
the command line, and two trials are swept. Of the one that prints no eval the mark on its training loss is
deleted. docs/own-scripts.md is made of the same rows.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune import Sweep
from lora_tune.config.study import load_study
from lora_tune.init import main as init
from lora_tune.sweep import main as sweep
from lora_tune.workloads import load as load_workload
from tests.conftest import REPOSITORY
from tests.own_scripts.rows import ROWS, SCRIPTS, Row, page


def prepared(row: Row, folder: Path) -> Path:
    """A folder as a user has it: the script (compiled, where it is C), and what one run of it left."""
    for file in SCRIPTS.iterdir():
        if file.suffix in (".py", ".c"):
            shutil.copy(file, folder)
    for command in (*row.before, row.command):
        words = [sys.executable, "-u"] if command[0] == "python" else [command[0]]
        with (folder / "run.log").open("wb") as log:
            subprocess.run([*words, *command[1:]], cwd=folder, stdout=log, stderr=log, check=True, timeout=120)
    return folder


ONE_OF_EACH_KIND = ("hf_trainer", "json_lines", "plain_step_loss", "csv_file")
"""Of each kind of log, and of the relay, what ``make test`` runs; the others are swept by ``make test-all``."""


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=[] if row.name in ONE_OF_EACH_KIND else pytest.mark.long) for row in ROWS],
)
def test_a_script_is_swept_as_init_wrote_it(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(prepared(row, tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    began = CliRunner().invoke(init, ["--log", row.log, *row.command])
    assert began.exit_code == 0, began.output
    study = load_study(Path("mine.toml"))
    text = Path("mine.toml").read_text(encoding="utf-8")
    assert ("EDIT: this looks like a training loss" in text) == (row.name == "plain_step_loss")
    Path("mine.toml").write_text(text.replace("EDIT: this", "this"), encoding="utf-8")
    assert {"LR", "BATCH_SIZE"} <= study.space.keys()
    settings = load_workload(study, "mine.toml")._settings.log
    assert settings["kind"] == row.kind, settings
    swept = CliRunner().invoke(sweep, ["--study", "mine.toml", "--trials", "2", "--parallel", "2"])
    assert swept.exit_code in (0, 4), swept.output
    # On a machine that stands still for seconds all lines of a short run arrive at once, which is no measurement.
    failed = [
        line
        for line in swept.output.splitlines()
        if re.match(r"trial \d+ +failed", line) and "its run began" not in line
    ]
    assert failed == [], swept.output
    losses = [point.loss for evals in Sweep("mine.toml").records.evals.values() for point in evals]
    assert losses, "evals are read"
    highest = 100 if study.objective.direction == "maximize" else 9
    assert all(0.09 < abs(loss) < highest for loss in losses), losses  # an accuracy is kept as what it lacks


def test_the_page_is_made_of_these_rows() -> None:
    made = page((REPOSITORY / "docs" / "own-scripts.md").read_text(encoding="utf-8"))
    assert made == (REPOSITORY / "docs" / "own-scripts.md").read_text(encoding="utf-8"), (
        "run: python -m tests.own_scripts.rows"
    )
