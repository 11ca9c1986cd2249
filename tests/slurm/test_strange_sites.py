"""Sites with habits of their own: what their sbatch prints, what their doctor finds, what their plugins change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_tune.store.records import Verdict
from tests.cluster import Cluster
from tests.recorded import recorded

pytestmark = pytest.mark.slurm

TRAIN = """
import json, os
rate = float(os.environ["LR"])
for step in range(1, 6):
    print(json.dumps({"step": step, "eval_loss": 1 - step / 10 - rate / 1000, "seconds": step / 100}), flush=True)
"""

STUDY = """
[workload]
kind = "command"
argv = ["{python}", "{folder}/train.py"]
log = {{ kind = "jsonl" }}
[site]
launcher = "slurm"
system = "OWN"
gpus_per_node = 1
[space]
LR = {{ type = "float", low = 1e-3, high = 1e-2, log = true }}
[objective]
target = 0.6
[search]
sampler = "random"
[budget]
trials = 2
parallel = 2
trial_minutes = 5
"""

BANNER = """#!/bin/sh
echo "Welcome. Your last job 17 ended well; job 18 is the next one"
echo "sbatch: warning: maintenance begins on Tuesday, job 3 will be held" >&2
exec {sbatch} "$@"
"""


@pytest.fixture
def place(slurm: Cluster, tmp_path: Path) -> Path:
    """A folder with a study of one's own script, ``s.toml``."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "s.toml").write_text(STUDY.format(python=sys.executable, folder=tmp_path))
    return tmp_path


def command(place: Path, name: str, *options: str, path: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"lora_tune.{name}", "--study", "s.toml", "--output", "out", *options],
        cwd=place,
        env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_what_a_wrapper_of_sbatch_says_before_the_job_id_costs_no_trial(place: Path, slurm: Cluster) -> None:
    """submitit took 17 for the job's id, and each job waited a minute for files under its own, and failed."""
    (place / "bin").mkdir()
    sbatch = slurm.run("sh", "-c", "command -v sbatch").strip()
    (place / "bin" / "sbatch").write_text(BANNER.format(sbatch=sbatch))
    (place / "bin" / "sbatch").chmod(0o755)
    swept = command(place, "sweep", path=str(place / "bin"))
    assert swept.returncode == 0, swept.stdout + swept.stderr
    sweep = recorded(place / "out" / "sweep.db", "s")
    assert [trial.verdict for trial in sweep.trials.values()] == [Verdict.REACHED] * 2
    assert all(attempt.number == 0 for attempt in sweep.attempts.values()), "none was run again"


def test_doctor_asks_sbatch_about_ones_own_script(place: Path) -> None:
    """It asked about a script called FILE, which is not there, and found a problem in every such study."""
    examined = command(place, "doctor")
    assert "sbatch accepts a trial's options" in examined.stdout, examined.stdout + examined.stderr
