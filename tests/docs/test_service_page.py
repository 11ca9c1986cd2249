"""The units, scripts and names on docs/service.md are sound: checked by the programs that read them, where they are."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune.__main__ import main
from lora_tune.cli import commands
from lora_tune.cli.metrics import Metrics
from tests.cli.test_api import STUDY
from tests.conftest import REPOSITORY
from tests.own_scripts.rows import SCRIPTS

PAGE = (REPOSITORY / "docs" / "service.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    return str(found)


def sweep_options(line: str) -> list[str]:
    words = shlex.split(line.rstrip("&"))
    return words[words.index("lora_tune.sweep") + 1 :]


def test_the_systemd_unit(tmp_path: Path) -> None:
    unit = block("systemd")
    start = re.findall(r"^ExecStart=(.*)$", unit, re.M)[0]
    commands.sweep.make_context("sweep", sweep_options(start), resilient_parsing=False)
    sections = re.findall(r"^\[(\w+)\]$", unit, re.M)
    assert sections == ["Unit", "Service", "Install"]
    assert all(re.match(r"\[\w+\]$|\w+=|#|$", line) for line in unit.splitlines())
    if shutil.which("systemd-analyze") is None:
        assert not os.environ.get("CI"), "nothing may be left out here: install systemd"
        return
    # What the unit names is not on this machine; what is checked is the unit.
    here = unit.replace("User=tuner", "User=root").replace(
        "WorkingDirectory=/opt/lora-tune", f"WorkingDirectory={tmp_path}"
    )
    here = here.replace("/opt/lora-tune/.venv/bin/python", shutil.which("true") or "/bin/true")
    (tmp_path / "lora-tune@.service").write_text(here)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "lora-tune@.service"], capture_output=True, text=True
    )
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if "lora-tune@.service" in line]
    assert complaints == []


def test_what_the_unit_starts_ends_in_order_and_is_done_at_the_end(tmp_path: Path) -> None:
    """systemd itself does not run here: its words are followed by hand, with this installation."""
    unit = dict(re.findall(r"^(\w+)=(.*)$", block("systemd"), re.M))
    python, *words = shlex.split(unit["ExecStart"].replace("%i", "toy"))
    assert python == f"{unit['WorkingDirectory']}/.venv/bin/python"
    (tmp_path / "studies").mkdir()
    for name in ("descent.py", "plain_step_loss.py"):
        shutil.copy(SCRIPTS / name, tmp_path)
    (tmp_path / "studies" / "toy.toml").write_text(STUDY)
    variables = {"LORA_TUNE_STORAGE": f"sqlite:///{tmp_path}/team.db"}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, umask=int(unit["UMask"], 8), timeout=200,
    )  # fmt: skip
    assert str(done.returncode) in ("0", *unit["RestartPreventExitStatus"].split()), done.stderr
    made = [tmp_path / "team.db", tmp_path / "sweeps"]
    assert [file for file in made if file.stat().st_mode & 0o077] == []


def test_the_slurm_job() -> None:
    script = block("sbatch")
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    start = next(line for line in script.splitlines() if "lora_tune.sweep" in line)
    commands.sweep.make_context("sweep", sweep_options(start), resilient_parsing=False)


@pytest.mark.slurm
def test_slurm_takes_the_job(slurm: object, tmp_path: Path) -> None:
    (tmp_path / "sweep.sbatch").write_text(block("sbatch"))
    done = subprocess.run(
        ["sbatch", "--test-only", tmp_path / "sweep.sbatch"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr


def test_the_page_names_every_metric() -> None:
    found = {f"lora_tune_{name}" for name in re.findall(r"`lora_tune_(\w+?)(?:\{|`)", PAGE)}
    metrics = Metrics()
    served = {family.name + ("_total" if family.type == "counter" else "") for family in metrics.collect()}
    assert found == served


@pytest.mark.parametrize("words", [["serve"], ["sweep", "--study", "x", "--register"], ["sweep", "--signing-key", "f"]])
def test_what_left_is_refused_with_what_replaced_it(words: list[str]) -> None:
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2
    assert "has left" in refused.output
