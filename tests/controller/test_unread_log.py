"""A pattern that matches nothing costs one trial's first lines, never a second trial."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune.cli.commands import logs as logs_main
from lora_tune.config.study import parse_study
from lora_tune.workloads import load
from lora_tune.workloads.base import Proposal

STUDY = """
[objective]
target = 0.5

[workload]
kind = "command"
argv = ["{python}", "-u", "{script}"]
log = {{ kind = "regex", eval = 'LOSS (?P<loss>\\S+) AT (?P<step>\\d+)' }}

[space]
LR = {{ type = "float", low = 0.001, high = 0.01 }}

[budget]
trials = 6
parallel = 2
"""
PRINTS_ON = "import time\nfor n in range(60): print(f'step {n} loss {1 / (n + 1):.4f}')\ntime.sleep(600)\n"
ENDS = "print('step 300 loss 0.5196')\n"


@pytest.mark.parametrize("script", [PRINTS_ON, ENDS], ids=["while it trains", "when it has ended"])
def test_the_sweep_stops_at_once_and_runs_nothing_twice(script: str, tmp_path: Path) -> None:
    train, study = tmp_path / "train.py", tmp_path / "mine.toml"
    reads = "import os\nrate = os.environ['LR']\n"
    train.write_text(f"{reads}open({str(tmp_path / 'starts')!r}, 'a').write('x')\n{script}")
    study.write_text(STUDY.format(python=sys.executable, script=train))
    swept = subprocess.run(
        [sys.executable, "-m", "lora_tune.sweep", "--study", str(study), "--quiet"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert swept.returncode == 3, swept.stdout + swept.stderr
    assert "none matched workload.log; a line that looks like an eval: `step" in swept.stderr
    assert 'try in its place: kind = "named", loss = "loss", step = "step"' in swept.stderr
    assert len((tmp_path / "starts").read_text()) <= 2, "only the trials that had begun together"


def test_the_command_shows_what_each_line_is_read_as(tmp_path: Path) -> None:
    log, study = tmp_path / "train.log", tmp_path / "mine.toml"
    log.write_text("loading\nLOSS 0.9 AT 8\nLOSS 0.7 AT 16\n")
    study.write_text(STUDY.format(python=sys.executable, script="train.py"))
    shown = CliRunner().invoke(logs_main, ["--study", str(study), str(log)])
    assert shown.exit_code == 0, shown.output
    assert "      2  eval: loss 0.9 at 8 steps" in shown.output, "what the log counts in"
    assert "3 lines, 2 evals" in shown.output
    log.write_text("step 300 loss 0.5196\n")
    shown = CliRunner().invoke(logs_main, ["--study", str(study), str(log)])
    assert shown.exit_code == 4
    assert "1 line read, none matched workload.log; a line that looks like an eval" in shown.output


def test_two_data_sets_in_the_same_words_are_told(tmp_path: Path) -> None:
    """The first one's loss was the trial's, and nothing said that there was another."""
    log, study = tmp_path / "train.log", tmp_path / "mine.toml"
    log.write_text("a: LOSS 0.9 AT 8\nb: LOSS 4.2 AT 8\na: LOSS 0.7 AT 16\nb: LOSS 4.1 AT 16\na: LOSS 0.7 AT 16\n")
    study.write_text(STUDY.format(python=sys.executable, script="train.py"))
    shown = CliRunner().invoke(logs_main, ["--study", str(study), str(log)])
    assert "      2  another value of an eval before, passed over" in shown.output
    assert "      5  another value" not in shown.output, "several ranks print the same"
    assert "5 lines, 2 evals" in shown.output
    assert "2 lines with another value where one is known already; the first counts: let the pattern" in shown.output


def test_python_is_the_interpreter_that_runs_the_sweep(tmp_path: Path) -> None:
    text = STUDY.format(python="python", script="train.py")
    here = load(parse_study(text, tmp_path / "mine.toml"), "mine.toml")
    elsewhere = load(parse_study(text + '[site]\nlauncher = "slurm"\n', tmp_path / "mine.toml"), "mine.toml")
    proposal = Proposal(number=0, attempt=0, seed=1, parameters={"LR": 0.01})
    assert here.job(proposal, tmp_path).argv[0] == sys.executable
    assert elsewhere.job(proposal, tmp_path).argv[0] == "python", "another machine has another one"
