"""The Python API: what docs/python.md shows runs, and says the same as the command line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lora_tune
from lora_tune.base.errors import InputError
from tests.conftest import REPOSITORY
from tests.own_scripts.rows import SCRIPTS

STUDY = """
[objective]
metric = "loss"
[workload]
kind = "command"
argv = ["python", "plain_step_loss.py", "--lr={LR}", "--seed={SEED}"]
log = { kind = "regex", eval = 'step (?P<step>\\d+) loss (?P<loss>\\S+)' }
[space]
LR = { type = "float", low = 0.02, high = 0.05, log = true }
[budget]
trials = 9
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("descent.py", "plain_step_loss.py"):
        shutil.copy(SCRIPTS / name, tmp_path)
    (tmp_path / "mine.toml").write_text(STUDY)
    return tmp_path


def test_the_page_runs_and_goes_on_where_it_ended(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (page,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "python.md").read_text(encoding="utf-8"), re.S)
    assert len(page.strip().splitlines()) <= 10
    names: dict[str, object] = {}
    exec(page, names)  # the page's own code
    said = capsys.readouterr().out
    assert "all 2 trials are proposed" in said
    sweep = names["sweep"]
    assert isinstance(sweep, lora_tune.Sweep)
    assert [row["verdict"] for row in sweep.values()] == ["reached", "reached"]
    assert (sweep.folder / "report.html").is_file()
    again = lora_tune.Sweep("mine.toml", trials=2, quiet=True)
    assert again.run() == "all 2 trials are proposed"
    assert len(again.trials) == 2


def test_mistakes_say_what_to_do(place: Path) -> None:
    with pytest.raises(InputError, match="'trails' is not a key of \\[budget\\]; its keys: trials"):
        lora_tune.Sweep("mine.toml", trails=2)
    with pytest.raises(InputError, match="there is no sweep of mine"):
        _ = lora_tune.Sweep("mine.toml").trials
    with pytest.raises(InputError, match="there is no study"):
        lora_tune.Sweep("no-such-study")
    with pytest.raises(AttributeError):
        _ = lora_tune.Swep


def test_importing_the_package_loads_none_of_it(place: Path) -> None:
    script = (
        "import sys, lora_tune; print([n for n in ('optuna', 'sqlalchemy', 'pydantic', 'click') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_notebook_runs_from_its_first_cell_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Jupyter: the cells are plain Python, run in one namespace as a kernel does."""
    monkeypatch.chdir(tmp_path)
    book = json.loads((REPOSITORY / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))
    assert (book["nbformat"], book["metadata"]["kernelspec"]["language"]) == (4, "python")
    names: dict[str, object] = {}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "what it prints differs from machine to machine"
            exec("".join(cell["source"]), names)  # the notebook's own code
    said = capsys.readouterr().out
    assert re.search(r"^best: trial \d, val_loss \d\.\d{4} with LR = 0\.\d+$", said, re.MULTILINE)
    curves = names["curves"]
    assert isinstance(curves, dict)
    assert {len(points) for points in curves.values()} == {20}
    assert (tmp_path / "sweeps" / "mine" / "report.html").is_file()
