"""Scripts that read their settings from variables of the environment: init proposes them, and a change arrives."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune import Sweep
from lora_tune.config.study import load_study
from lora_tune.init import main as init
from lora_tune.workloads import load

TRAIN = """
import json, os
lr, size = float(os.environ.get("LR", 3e-4)), int(os.environ.get("BATCH_SIZE", "8"))
for step in (1, 2):
    print(json.dumps({"step": step, "val_loss": 1 / step + lr, "lr": lr, "size": size}))
"""
SHELL = "#!/bin/bash\nset -eu\nexport LR=${LR:-3e-4}\nBATCH_SIZE=${BATCH_SIZE:-8} python3 train.py\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("LR", "LEARNING_RATE", "BATCH_SIZE", "OUTPUT_DIR", "SEED"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def begun(*command: str) -> dict[str, object]:
    done = CliRunner().invoke(init, list(command))
    assert done.exit_code == 0, done.output
    return tomllib.loads(Path("mine.toml").read_text())


@pytest.mark.parametrize(
    ("text", "today"),
    [
        ('LR = float(os.environ.get("LEARNING_RATE", 3e-4))', 3e-4),
        ('LR = float(os.getenv("LEARNING_RATE", "3e-4"))', 3e-4),
        ('LR = float(os.environ.get("LEARNING_RATE", str(3e-4)))', 3e-4),
        ('LR = float(os.environ.get("LEARNING_RATE") or 3e-4)', 3e-4),
        ('LR = float(os.environ["LEARNING_RATE"]) if "LEARNING_RATE" in os.environ else 3e-4', 3e-4),
        ('os.environ.setdefault("LEARNING_RATE", "3e-4")\nLR = float(os.environ["LEARNING_RATE"])', 3e-4),
        ('DEFAULT = 3e-4\nLR = float(os.getenv("LEARNING_RATE", DEFAULT))', 3e-4),
        ('def env(name, default, kind=float):\n    return kind(os.environ.get(name, default))\n'
         'LR = env("LEARNING_RATE", 3e-4)', 3e-4),
        ('def env(name, kind, default):\n    return kind(os.environ[name]) if name in os.environ else default\n'
         'LR = env("LEARNING_RATE", float, default=3e-4)', 3e-4),
        ('from os import getenv as _unused, environ\nLR = float(environ.get("LEARNING_RATE", 3e-4))', 3e-4),
        ('LR = float(os.environ["LEARNING_RATE"])', None),
        ('LR = float(os.environ.get("LEARNING_RATE", 1 / base()))', None),
    ],
)  # fmt: skip
def test_a_variable_is_proposed_with_the_default_that_the_script_shows(
    text: str, today: float | None, folder: Path
) -> None:
    (folder / "train.py").write_text(f"import os\n{text}\nopen('trained', 'w')\n")
    study = begun("python", "train.py")
    if today is None:
        assert "LR of LEARNING_RATE: not searched, as nothing states what it is today; export today's value" in (
            Path("mine.toml").read_text()
        )
        return
    assert study["workload"]["environment"] == {"LEARNING_RATE": "{LR}"}  # type: ignore[index]
    assert study["workload"]["argv"] == ["python", "train.py"]  # type: ignore[index]
    assert study["search"]["enqueue"] == [{"LR": today}]  # type: ignore[index]
    assert not (folder / "trained").exists(), "nothing of it was run"


def test_what_is_exported_today_counts_for_more_than_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LR", "0.01")
    assert begun("python", "train.py")["search"] == {"enqueue": [{"LR": 0.01, "BATCH_SIZE": 8}]}


def test_an_option_is_filled_where_the_command_has_one(folder: Path) -> None:
    study = begun("env", "LR=1e-3", "python3", "train.py")
    assert study["workload"]["argv"] == ["env", "LR={LR}", "python3", "train.py"]  # type: ignore[index]
    assert study["workload"]["environment"] == {"BATCH_SIZE": "{BATCH_SIZE}"}  # type: ignore[index]


@pytest.mark.parametrize("command", [("bash", "run.sh"), ("bash", "-c", SHELL.partition("set -eu\n")[2])])
def test_a_shell_that_passes_variables_on(command: tuple[str, ...], folder: Path) -> None:
    (folder / "run.sh").write_text(SHELL)
    study = begun(*command)
    assert study["workload"]["argv"] == [*command]  # type: ignore[index]
    assert study["search"]["enqueue"] == [{"LR": 3e-4, "BATCH_SIZE": 8}]  # type: ignore[index]


def test_a_variable_that_the_shell_sets_itself_is_none(folder: Path) -> None:
    (folder / "run.sh").write_text("LR=1e-3\npython train_lm.py --lr ${LR:-1} --batch-size ${BATCH_SIZE:-4}\n")
    study = begun("bash", "run.sh")
    assert study["search"]["enqueue"] == [{"BATCH_SIZE": 4}]  # type: ignore[index]


def test_trials_run_with_their_values_and_trial_0_with_today_s(folder: Path) -> None:
    (folder / "run.log").write_text('{"step": 1, "val_loss": 1.0}\n{"step": 2, "val_loss": 0.5}\n')
    begun("--log", "run.log", "python", "train.py")
    mine = Path("mine.toml")
    mine.write_text(mine.read_text().replace("trials = 20", "trials = 3"))
    Sweep("mine.toml", quiet=True).run()
    printed = [
        json.loads(log.read_text().splitlines()[-1]) for log in sorted(folder.rglob("*.log")) if "sweep" in str(log)
    ]
    values = {(row["lr"], row["size"]) for row in printed if "lr" in row}
    assert (3e-4, 8) in values
    assert len(values) == 3


def test_a_variable_that_nothing_reads_is_refused(folder: Path) -> None:
    begun("python", "train.py")
    text = (
        Path("mine.toml").read_text().replace('LR = "{LR}"', 'RATE = "{LR}"').replace('BATCH_SIZE = "{B', 'SIZE = "{B')
    )
    text = text.replace("LR = {", "STEP_SIZE = {").replace("{LR}", "{STEP_SIZE}").replace("LR = 0", "STEP_SIZE = 0")
    Path("mine.toml").write_text(text)
    study = load_study(Path("mine.toml"))
    warnings = load(study, Path("mine.toml")).check()
    assert any("STEP_SIZE reaches nothing: train.py reads no variable STEP_SIZE or RATE" in w for w in warnings), (
        warnings
    )
