"""A campaign on the test cluster: two benchmarks in turn, small real trainings, one of a metric that rises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_tune.store.records import Verdict
from tests.cluster import Cluster
from tests.commands.two_benchmarks import write
from tests.recorded import recorded

pytestmark = pytest.mark.slurm


def test_two_benchmarks_are_swept_in_turn_under_slurm(slurm: Cluster, tmp_path: Path) -> None:
    file = write(tmp_path, site='launcher = "slurm"\nmpi = "none"')
    output = tmp_path / "out"
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", str(file), "--output", str(output)]
    done = subprocess.run(command, env={**os.environ, **slurm.environment}, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    begun = []
    for name, target in (("falling", 0.25), ("rising", 1 - 0.92)):
        sweep = recorded(output / name / "sweep.db", name)
        by_rate = {trial.parameters["LR"]: trial for trial in sweep.trials.values()}
        assert by_rate[1.0].verdict is Verdict.REACHED, done.stdout
        begun.append([attempt.intended_at for attempt in sweep.attempts.values()])
        evals = [e.loss for e in sweep.last_evals(by_rate[1.0].number)]
        assert 0 <= evals[-1] <= target + 1e-9, "of an accuracy, what it lacks of 1 is kept"
    assert max(begun[0]) < min(begun[1]), "one sweep after the other"
