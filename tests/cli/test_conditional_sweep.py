"""A sweep over parameters that exist only at times, from the dry run to the export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune.cli.api import Sweep
from lora_tune.explain import main as explain
from lora_tune.export import main as export
from lora_tune.report import main as report
from lora_tune.store.records import Verdict
from lora_tune.sweep import main as sweep

SCRIPT = """
import os, sys
momentum = "--momentum" in sys.argv
assert momentum == ("MOMENTUM" in os.environ) == (os.environ["OPTIMIZER"] == "sgd")
assert any(word.startswith("--beta2=") for word in sys.argv) == ("BETA2" in os.environ) != momentum
print(f"step 1 loss {0.4 if momentum else 0.3}", flush=True)
"""

STUDY = """
[workload]
kind = "command"
argv = ["{python}", "{script}", "--momentum", "{MOMENTUM}", "--beta2={BETA2}", "--seed", "{SEED}"]
[workload.log]
kind = "regex"
eval = 'step (?P<samples>[0-9]+) loss (?P<loss>[0-9.]+)'
[site]
launcher = "local"
[space]
MOMENTUM = { type = "float", low = 0.5, high = 0.99, when = { OPTIMIZER = "sgd" } }
OPTIMIZER = { type = "categorical", choices = ["adam", "sgd"] }
BETA2 = { type = "float", low = 0.9, high = 0.999, when = { OPTIMIZER = "adam" } }
[objective]
metric = "loss"
[search]
sampler = "tpe"
enqueue = [{ OPTIMIZER = "sgd", MOMENTUM = 0.9 }, { OPTIMIZER = "adam", BETA2 = 0.95 }]
[budget]
trials = 3
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    script, file = tmp_path / "train.py", tmp_path / "opt.toml"
    script.write_text(SCRIPT)
    file.write_text(STUDY.replace("{python}", sys.executable).replace("{script}", str(script)))
    return file


def test_the_dry_run_shows_only_what_each_trial_has(study: Path) -> None:
    said = CliRunner().invoke(sweep, ["--study", str(study), "--dry-run"]).output
    sgd, adam = said.split("# trial 0: ")[1].split("# trial 1: ")
    assert sgd.startswith("MOMENTUM=0.9 OPTIMIZER=sgd\n")
    assert "--momentum 0.9 --seed" in sgd
    assert "beta2" not in sgd.lower()
    assert adam.startswith("OPTIMIZER=adam BETA2=0.95\n")
    assert "--beta2=0.95" in adam
    assert "momentum" not in adam.split("# trial")[0].lower()


def test_a_sweep_hands_a_script_what_exists_and_every_page_follows(study: Path, tmp_path: Path) -> None:
    swept = CliRunner().invoke(sweep, ["--study", str(study)])
    assert swept.exit_code == 0, swept.output
    trials = Sweep(study).records.trials
    assert [t.verdict for t in trials.values()] == [Verdict.REACHED] * 3, swept.output
    assert trials[0].tuned == {"MOMENTUM": 0.9, "OPTIMIZER": "sgd"}
    assert trials[1].tuned == {"OPTIMIZER": "adam", "BETA2": 0.95}
    assert ("MOMENTUM" in trials[2].tuned) != ("BETA2" in trials[2].tuned)
    options = ["--study", str(study)]
    for command, more in ((report, []), (explain, []), (explain, ["--trial", "1"])):
        done = CliRunner().invoke(command, [*options, *more])
        assert done.exit_code == 0, done.output
    made = CliRunner().invoke(export, [*options, "--trial", "0", "--to", str(tmp_path / "best")])
    assert made.exit_code == 0, made.output
    (config,) = (tmp_path / "best").glob("config_*.sh")
    sidecar = json.loads(config.with_suffix(".json").read_text())
    assert sidecar["tuned"] == {"MOMENTUM": 0.9, "OPTIMIZER": "sgd"}
    usage = next(line.removeprefix("# Run: ") for line in config.read_text().splitlines() if line.startswith("# Run: "))
    clean = {n: v for n, v in os.environ.items() if n not in ("MOMENTUM", "BETA2", "OPTIMIZER")}
    ran = subprocess.run(["bash", "-c", usage], cwd=config.parent, env=clean, capture_output=True, text=True)
    assert ran.stdout == "step 1 loss 0.4\n", ran.stderr
