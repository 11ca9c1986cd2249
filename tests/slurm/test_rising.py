"""A benchmark whose metric rises, on the test cluster: small real trainings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_tune.store.records import Verdict
from tests.cluster import Cluster
from tests.conftest import REPOSITORY
from tests.recorded import recorded

pytestmark = pytest.mark.slurm

TRAINING = REPOSITORY / "tests" / "mlperf" / "small_training.py"
STUDY = f"""
[workload]
kind = "command"
argv = {json.dumps([sys.executable, str(TRAINING)])}
stop_at_target = false
[workload.environment]
BENCHMARK = "dlrmv4"
MEASURE = "accuracy"
TARGET = "0.92"
[site]
launcher = "slurm"
mpi = "none"
kill_seconds = 5
[space]
LR = {{ type = "categorical", choices = [0.001, 0.3, 1.0] }}
GBS = 16
MAX_STEPS = 200
[objective]
benchmark = "dlrmv4"
target = 0.92
[pruning]
rule = "none"
[search]
sampler = "tpe"
enqueue = [{{ LR = 0.3 }}, {{ LR = 1.0 }}, {{ LR = 0.001 }}]
[budget]
trials = 3
"""


def test_an_accuracy_that_rises_is_tuned_under_slurm(slurm: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "rising.toml"
    file.write_text(STUDY)
    output = tmp_path / "out"
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", str(file), "--output", str(output)]
    done = subprocess.run(command, env={**os.environ, **slurm.environment}, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    sweep = recorded(output / "sweep.db", "rising")
    by_rate = {trial.parameters["LR"]: trial for trial in sweep.trials.values()}
    assert by_rate[1.0].verdict is Verdict.REACHED, done.stdout
    evals = [e.loss for e in sweep.last_evals(by_rate[1.0].number)]
    assert 0 <= evals[-1] <= 1 - 0.92 + 1e-9, "of an accuracy, what it lacks of 1 is kept"
