"""The units, scripts and names on docs/service.md are sound: checked by the programs that read them, where they are."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune import serve
from lora_tune.metrics import Metrics
from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs" / "service.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    return str(found)


def serve_options(line: str) -> list[str]:
    words = shlex.split(line.rstrip("&"))
    return words[words.index("lora_tune.serve") + 1 :]


def test_the_systemd_unit(tmp_path: Path) -> None:
    unit = block("systemd")
    start = re.findall(r"^ExecStart=(.*)$", unit, re.M)[0]
    serve.main.make_context("serve", serve_options(start), resilient_parsing=False)
    sections = re.findall(r"^\[(\w+)\]$", unit, re.M)
    assert sections == ["Unit", "Service", "Install"]
    assert all(re.match(r"\[\w+\]$|\w+=|#|$", line) for line in unit.splitlines())
    if shutil.which("systemd-analyze") is None:
        return
    # What the unit names is not on this machine; what is checked is the unit.
    here = unit.replace("User=tuner", "User=root").replace(
        "WorkingDirectory=/opt/lora-tune", f"WorkingDirectory={tmp_path}"
    )
    here = here.replace("/opt/lora-tune/.venv/bin/python", shutil.which("true") or "/bin/true")
    (tmp_path / "lora-tune.service").write_text(here)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "lora-tune.service"], capture_output=True, text=True
    )
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if "lora-tune.service" in line]
    assert complaints == []


def test_the_slurm_job() -> None:
    script = block("sbatch")
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    start = next(line for line in script.splitlines() if "lora_tune.serve" in line)
    serve.main.make_context("serve", serve_options(start), resilient_parsing=False)


@pytest.mark.slurm
def test_slurm_takes_the_job(slurm: object, tmp_path: Path) -> None:
    (tmp_path / "serve.sbatch").write_text(block("sbatch"))
    done = subprocess.run(
        ["sbatch", "--test-only", tmp_path / "serve.sbatch"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr


def test_the_page_names_every_metric() -> None:
    found = {f"lora_tune_{name}" for name in re.findall(r"`lora_tune_(\w+?)(?:\{|`)", PAGE)}
    metrics = Metrics()
    served = {family.name + ("_total" if family.type == "counter" else "") for family in metrics.collect()}
    assert found == served


def test_a_server_without_a_database_says_which_are_possible() -> None:
    result = CliRunner().invoke(serve.main, [], env={"LORA_TUNE_STORAGE": ""})
    assert result.exit_code == 2
    assert "LORA_TUNE_STORAGE" in result.output
