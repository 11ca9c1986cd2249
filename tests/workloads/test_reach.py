"""Whether a study's parameters reach the script that its command runs: told from the script's text."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune.base.errors import StudyError
from lora_tune.config.study import parse_study
from lora_tune.doctor import main as doctor
from lora_tune.sweep import main as sweep
from lora_tune.workloads import load
from lora_tune.workloads.reach import Reach, reach, script_text

CONSTANTS = "LR = 0.003\nfor epoch in range(5):\n    print(f'epoch {epoch} val_loss {1 / (epoch + 1)}')\n"
HELPER = "import os\ndef setting(name, default):\n    return os.environ.get(name, default)\n"


def told(folder: Path, text: str, name: str = "LR", *words: str) -> Reach:
    (folder / "train.py").write_text(text)
    argv = ("python3", "train.py", *words)
    return reach(name, argv, {}, script_text(argv, folder))


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        (CONSTANTS, (), Reach.NO),
        ("import torch, numpy as np\n" + CONSTANTS, (), Reach.NO),
        ("import os\nrate = os.environ['LR']", (), Reach.YES),
        ("from os import getenv\nrate = getenv('LR', '1')", (), Reach.YES),
        ("import os\nif 'LR' in os.environ:\n    pass", (), Reach.YES),
        ("import os\nrate = os.environ['LEARNING_RATE']", (), Reach.NO),
        ("import os\nos.environ['LR'] = '3'", (), Reach.NO),
        ("import os\nfor k, v in os.environ.items():\n    globals()[k] = v", (), Reach.UNKNOWN),
        (HELPER + "rate = setting('LR', 1)", (), Reach.YES),
        (HELPER + "rate = setting('RATE', 1)", (), Reach.UNKNOWN),
        ("import mine_alone\n", (), Reach.UNKNOWN),
        ("import subprocess\nsubprocess.run(['./train'])", (), Reach.UNKNOWN),
        ("print 'of another Python'", (), Reach.UNKNOWN),
        ("import click\n@click.command()\n@click.option('--lr', envvar='LR')\ndef main(lr): pass", (), Reach.YES),
        ("import argparse\n", ("--lr", "{LR}"), Reach.YES),
        ("import sys\nrate = sys.argv[1]", ("{LR}",), Reach.YES),
        ("from transformers import HfArgumentParser", ("--lr={LR}",), Reach.YES),
        ("import fire\nfire.Fire(main)", ("--lr={LR}",), Reach.YES),
        (CONSTANTS, ("--lr", "{LR}"), Reach.NO),
        ("import argparse, platform\nplatform.system()\n", (), Reach.NO),
    ],
)
def test_a_parameter_reaches_a_script_by_its_command_or_by_a_variable_that_its_text_reads(
    text: str, words: tuple[str, ...], expected: Reach, tmp_path: Path
) -> None:
    assert told(tmp_path, text, "LR", *words) is expected


def test_modules_beside_the_script_are_read_as_well(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "settings.py").write_text("from .deep import rate")
    (package / "deep.py").write_text("import os\nrate = os.environ['LR']")
    assert told(tmp_path, "from mine.settings import rate") is Reach.YES
    assert told(tmp_path, "from mine import settings", "BATCH_SIZE") is Reach.NO


def test_a_variable_may_stand_in_a_config_file_that_the_command_names(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("lr: ${oc.env:LR}\n")
    script = "from omegaconf import OmegaConf"
    assert told(tmp_path, script, "LR", "--config", "c.yaml") is Reach.YES
    (tmp_path / "c.yaml").write_text("lr: 0.1\n")
    assert told(tmp_path, "import argparse, yaml", "LR", "--config", "c.yaml") is Reach.NO


def test_a_changed_copy_of_a_config_file_that_the_command_names_holds_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("lr: 0.1\n")
    config = '[workload.config]\nfile = "c.yaml"\nvalues = { lr = "{LR}" }\n[space]'
    file = study_file(tmp_path, "import argparse, yaml", words=', "--config", "{config}"')
    file.write_text(file.read_text().replace("[space]", config))
    assert remarks(file) == []


def test_what_libraries_read_whatever_the_script_says_is_not_known(tmp_path: Path) -> None:
    for name in ("NCCL_ALGO", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF"):
        assert told(tmp_path, CONSTANTS, name) is Reach.UNKNOWN


@pytest.mark.parametrize("argv", [("./train",), ("bash", "-c", "python train.py"), ("python", "-m", "mine")])
def test_another_program_may_read_anything(argv: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CONSTANTS)
    assert reach("LR", argv, {}, script_text(argv, tmp_path)) is Reach.UNKNOWN


@pytest.mark.parametrize(
    "argv",
    [
        ("torchrun", "--nproc-per-node", "2", "train.py"),
        ("python3.11", "-u", "train.py"),
        ("accelerate", "launch", "train.py"),
        ("python", "-m", "lora_tune.logs.relay", "out", "--", "python", "train.py"),
        ("python", "-c", CONSTANTS),
    ],
)
def test_the_script_is_known_behind_its_launcher(argv: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CONSTANTS)
    assert reach("LR", argv, {}, script_text(argv, tmp_path)) is Reach.NO


STUDY = """
[workload]
kind = "command"
argv = ["python3", "train.py"WORDS]
[workload.log]
kind = "regex"
eval = 'epoch (?P<epoch>\\d+) val_loss (?P<loss>[\\d.]+)'
[space]
LR = { type = "float", low = 1e-5, high = 1e-2, log = true }
SPACE
[objective]
metric = "loss"
[budget]
trials = 20
"""


def study_file(folder: Path, text: str, *, words: str = "", space: str = "") -> Path:
    (folder / "train.py").write_text(text)
    file = folder / "mine.toml"
    file.write_text(STUDY.replace("WORDS", words).replace("SPACE", space))
    return file


def test_a_study_whose_parameters_reach_nothing_is_refused_before_the_first_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study_file(tmp_path, CONSTANTS)
    refused = CliRunner().invoke(sweep, ["--study", "mine.toml"])
    assert refused.exit_code == 2
    assert "space: LR reaches nothing: train.py reads no variable LR, and no word of argv holds it" in refused.output
    assert "write {LR} in workload.argv" in refused.output
    assert not (tmp_path / "sweeps").exists()
    dry = CliRunner().invoke(sweep, ["--study", "mine.toml", "--dry-run"])
    assert "# no trial would run: study mine: space: LR reaches nothing" in dry.output
    checked = CliRunner().invoke(doctor, ["--study", "mine.toml"])
    assert checked.exit_code == 3
    assert "PROBLEM  study mine: space: LR reaches nothing" in checked.output


def remarks(file: Path) -> list[str]:
    workload = load(parse_study(file.read_text(), file), file)
    return [*workload.check()]  # type: ignore[attr-defined]


def test_one_idle_parameter_among_others_is_said_and_the_others_are_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    idle = 'DROPOUT = { type = "float", low = 0.0, high = 0.3 }'
    (said,) = remarks(study_file(tmp_path, "import argparse", words=', "--lr", "{LR}"', space=idle))
    assert said.startswith("space: DROPOUT reaches nothing: train.py reads no variable DROPOUT")


def test_what_cannot_be_known_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    idle = 'DROPOUT = { type = "float", low = 0.0, high = 0.3 }'
    (said,) = remarks(study_file(tmp_path, "import mine_alone", space=idle))
    assert said.startswith("whether the script reads the variables LR, DROPOUT")


def test_a_parameter_reaches_the_script_by_what_is_derived_from_it_or_depends_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    derived = 'TEN_TIMES = { type = "derived", formula = "10 * LR" }'
    assert remarks(study_file(tmp_path, "import argparse", words=', "{TEN_TIMES}"', space=derived)) == []
    dependent = """
OPTIMIZER = { type = "categorical", choices = ["sgd", "adam"] }
MOMENTUM = { type = "float", low = 0.5, high = 0.99, when = { OPTIMIZER = ["sgd"] } }
"""
    words = ', "--lr", "{LR}", "--momentum", "{MOMENTUM}"'
    assert remarks(study_file(tmp_path, "import argparse", words=words, space=dependent)) == []


@pytest.mark.parametrize("trials", [1, 4])
def test_a_few_trials_try_a_machine_and_may_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: int) -> None:
    monkeypatch.chdir(tmp_path)
    file = study_file(tmp_path, CONSTANTS)
    with pytest.raises(StudyError, match="LR reaches nothing"):
        remarks(file)
    file.write_text(file.read_text().replace("trials = 20", f"trials = {trials}"))
    (said,) = remarks(file)
    assert said.startswith("space: LR reaches nothing")
