"""The Python API: what docs/own-scripts.md shows runs, and says the same as the command line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import lora_tune
from lora_tune.base.errors import InputError
from lora_tune.store.records import Trial, TrialState, Verdict
from tests.conftest import REPOSITORY
from tests.docs.pages import block, section
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
    page = block(section("own-scripts.md", "From Python"), "python")
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


def test_a_function_is_swept_without_a_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs" / "own-scripts.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"## A function, and no file\n\n```\n(.*?)```", page, re.S)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(code, names)  # the page's own code
    sweep = names["sweep"]
    assert isinstance(sweep, lora_tune.Sweep)
    assert [row["verdict"] for row in sweep.values()] == ["reached"] * 6, [t.sentence for t in sweep.trials]
    assert sweep.recommended is not None
    assert sweep.best is not None
    for trial in sweep.trials:
        loss = (float(trial.parameters["LR"]) - 0.01) ** 2 * int(trial.parameters["WIDTH"]) + 0.2
        assert trial.objective == pytest.approx(loss)
    same = lora_tune.Sweep(str(sweep.folder / "train.toml"), output=sweep.folder)
    assert [row["trial"] for row in same.values()] == [*range(6)], "the command line knows it by its file"


def test_a_study_from_keyword_arguments_alone(place: Path) -> None:
    command = ["python", "plain_step_loss.py", "--lr={LR}", "--seed={SEED}"]
    log = {"kind": "regex", "eval": r"step (?P<step>\d+) loss (?P<loss>\S+)"}
    sweep = lora_tune.Sweep(
        name="mine",
        workload={"kind": "command", "argv": command, "log": log},
        objective={"metric": "loss"},
        space={"LR": (0.02, 0.05)},
        trials=2,
        quiet=True,
    )
    assert sweep.run() == "all 2 trials are proposed"
    assert len(sweep.trials) == 2


def needs_more(LR: float, RANK: int) -> float:
    return LR * RANK


@pytest.mark.parametrize(
    ("study", "settings", "told"),
    [
        (needs_more, {"space": {"LR": (0.1, 1.0)}}, r"needs_more\(\) needs RANK, which space does not hold"),
        (needs_more, {"space": {"LR": (0.1, 1.0), "RANK": [1], "BS": [2]}}, r"does not take BS"),
        (needs_more, {}, "space is missing"),
        (needs_more, {"space": {"LR": (1, 2, 3), "RANK": [1]}}, "a tuple is \\(low, high\\)"),
        ("mine.toml", {"space": {"LR": (0.1, 1.0)}}, "space goes with a function"),
        (None, {"space": {"LR": (0.1, 1.0)}}, "workload"),
    ],
)
def test_what_cannot_be_swept_is_said(study: object, settings: dict[str, object], told: str, place: Path) -> None:
    with pytest.raises(InputError, match=told):
        lora_tune.Sweep(study, **settings)  # type: ignore[arg-type]


def test_mistakes_say_what_to_do(place: Path) -> None:
    with pytest.raises(InputError, match="'trails' is not a key of \\[budget\\]; its keys: trials"):
        lora_tune.Sweep("mine.toml", trails=2)
    with pytest.raises(InputError, match="there is no sweep of mine"):
        _ = lora_tune.Sweep("mine.toml").trials
    with pytest.raises(InputError, match="there is no study"):
        lora_tune.Sweep("no-such-study")
    with pytest.raises(AttributeError):
        _ = lora_tune.Swep


def test_a_trial_without_an_objective_says_so() -> None:
    running = Trial(number=3, state=TrialState.RUNNING, tuned={}, parameters={}, seed=1)
    with pytest.raises(InputError, match=r"trial 3 has no objective: it has not ended; metrics\.objective is None"):
        _ = running.objective
    stopped = replace(running, state=TrialState.FINISHED, verdict=Verdict.PRUNED)
    with pytest.raises(InputError, match="it ended as pruned"):
        _ = stopped.objective


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
    assert re.search(r"^take: .*'WIDTH'.* luckiest: .*'WIDTH'", said, re.MULTILINE)
    curves = names["curves"]
    assert isinstance(curves, dict)
    assert {len(points) for points in curves.values()} == {20}
    assert (tmp_path / "sweeps" / "mine" / "report.html").is_file()
