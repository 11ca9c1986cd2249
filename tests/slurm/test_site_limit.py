"""A centre that limits the jobs of a user by a filter of its own, in words of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_tune.store.records import Verdict
from tests.cluster import Cluster, Shape, missing
from tests.recorded import recorded

pytestmark = [pytest.mark.slurm, pytest.mark.long]

FILTER = """
function slurm_job_submit(d, parts, uid)
  local n = 0
  for id, j in pairs(slurm.jobs) do
    if j.user_id == uid and (j.job_state == 0 or j.job_state == 1) then n = n + 1 end
  end
  if n >= 1 then
    slurm.log_user("[*] Too many simultaneous jobs in queue.")
    slurm.log_user("    --> Max job limits for account and partition normal = 1 jobs")
    return slurm.ERROR
  end
  return slurm.SUCCESS
end
function slurm_job_modify(d, r, parts, uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""

TRAIN = """
import json, os, time
rate = float(os.environ["LR"])
for step in range(1, 6):
    time.sleep(1)
    print(json.dumps({"step": step, "eval_loss": 1 - step / 10 - rate / 1000, "seconds": step * 1.0}), flush=True)
"""

STUDY = """
[workload]
kind = "command"
argv = ["{python}", "{folder}/train.py"]
log = {{ kind = "jsonl" }}
[site]
launcher = "slurm"
gpus_per_node = 1
[space]
LR = {{ type = "float", low = 1e-3, high = 1e-2, log = true }}
[objective]
target = 0.6
[search]
sampler = "random"
[budget]
trials = 3
parallel = 2
trial_minutes = 5
"""


@pytest.fixture
def strict(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster that takes one job of a user at a time."""
    if reason := missing(accounting=False):
        pytest.skip(f"no Slurm test cluster: {reason}")
    shape = Shape(nodes=2, lines="JobSubmitPlugins=lua", files={"job_submit.lua": FILTER})
    with Cluster(tmp_path_factory.mktemp("sl") / "c", shape) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        yield cluster


def test_a_limit_in_the_centres_own_words_is_waited_for_and_said_in_one_sentence(
    strict: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "s.toml").write_text(STUDY.format(python=sys.executable, folder=tmp_path))
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", "s.toml", "--output", "out"]
    swept = subprocess.run(command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, timeout=240)
    printed = swept.stdout + swept.stderr
    assert swept.returncode == 0, printed
    sweep = recorded(tmp_path / "out" / "sweep.db", "s")
    assert [trial.verdict for trial in sweep.trials.values()] == [Verdict.REACHED] * 3
    assert len(sweep.attempts) == 3, "each was submitted once"
    assert "sbatch: error" not in printed, "what tools print stays off the terminal"
    (sentence,) = (line for line in printed.splitlines() if "Too many simultaneous jobs" in line)
    assert "taken for a limit of this site" in sentence
