"""Our own recipe on real Slurm, the ordinary way: submitit, srun, a GPU gres that is named."""

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

STUDY = """
[workload]
kind = "peft"
[site]
launcher = "slurm"
system = "TINY"
[space]
LR = { type = "float", low = 1e-3, high = 1e-2, log = true }
MAX_STEPS = 20
MINIBS = 2
SEQ = 32
VAL_CHECK_INTERVAL = 20
EVAL_SAMPLES = 4
[objective]
target = 9.0
[budget]
trials = 2
parallel = 2
trial_minutes = 5
"""


def test_the_peft_recipe_trains_through_submitit_and_srun(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(STUDY)
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", str(tmp_path / "own.toml"), "--output"]
    done = subprocess.run([*command, str(tmp_path / "sweep")], env=dict(os.environ), capture_output=True, timeout=240)
    said = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, said
    sweep = recorded(tmp_path / "sweep" / "sweep.db", "own")
    assert [trial.verdict for trial in sweep.trials.values()] == [Verdict.REACHED] * 2
    for attempt in sweep.attempts.values():
        assert attempt.exit_code == 0
        assert attempt.nodes
        record = slurm.run("scontrol", "show", "job", attempt.job_id)
        assert "Requeue=0" in record
    assert (tmp_path / "sweep" / "trials" / "0000" / "attempt-0" / "submitit").is_dir()
