"""The units, scripts and names on docs/service.md are sound: checked by the programs that read them, where they are."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune.cli import serve
from lora_tune.cli.metrics import Metrics
from tests.conftest import REPOSITORY
from tests.waiting import wait_for

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
        assert not os.environ.get("CI"), "nothing may be left out here: install systemd"
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


def test_what_the_unit_starts_serves_and_ends_in_order(tmp_path: Path) -> None:
    """systemd itself does not run here: its words are followed by hand, with this installation and a free port."""
    unit = dict(re.findall(r"^(\w+)=(.*)$", block("systemd"), re.M))
    python, *words = shlex.split(unit["ExecStart"].replace("9464", "0"))
    assert python == f"{unit['WorkingDirectory']}/.venv/bin/python"
    variables = {"LORA_TUNE_STORAGE": f"sqlite:///{tmp_path}/team.db"}
    assert re.findall(rf"^# One line: {next(iter(variables))}=.*\n(\w+)=", block("systemd"), re.M) == [
        "EnvironmentFile"
    ]
    log = tmp_path / "journal"
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, *words], cwd=tmp_path, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
            stdout=out, stderr=out, umask=int(unit["UMask"], 8),
        )  # fmt: skip
    try:
        wait_for(lambda: "serving, 16 nodes at most" in log.read_text(), 60, "the server")
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", log.read_text())
        with urllib.request.urlopen(address, timeout=10) as answer:
            assert answer.status == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(int(unit["TimeoutStopSec"])) == 0
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    made = [file for file in tmp_path.iterdir() if file != log]
    assert made
    assert [file for file in made if file.stat().st_mode & 0o077] == []


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
