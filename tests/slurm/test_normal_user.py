"""A normal user on a cluster where root's view does not help: a hidden partition, private jobs, limited partitions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_tune.store.records import Verdict
from tests.cluster import Cluster, Shape, missing
from tests.reachable import reachable
from tests.recorded import recorded

pytestmark = [pytest.mark.slurm, pytest.mark.long]

NOBODY = 65534
LINES = """PrivateData=jobs
PartitionName=owner Nodes=ALL MaxTime=INFINITE State=UP DefMemPerCPU=500 Hidden=YES
PartitionName=short Nodes=ALL MaxTime=30 State=UP DefMemPerCPU=500
"""

TRAIN = """#!/bin/bash
#SBATCH --error={folder}/elsewhere.err
#SBATCH --job-name=mine
#SBATCH -n 4 --ntasks-per-node=4
#SBATCH --comment="a 'b' c" --output={folder}/elsewhere.out
#SBATCH {header}
#BSUB -e {folder}/elsewhere.err
echo "lr $LR" >&2
for step in 1 2 3 4; do
    sleep 0.5
    echo "{{\\"step\\": $step, \\"eval_loss\\": 0.$((9 - step)), \\"seconds\\": $step.0}}"
done
"""

STUDY = """
[workload]
kind = "command"
script = true
argv = ["{folder}/train.sub"]
log = {{ kind = "jsonl" }}
[site]
launcher = "slurm"
{partition}
gpus_per_node = 1
gres = "gpu:1"
[space]
LR = {{ type = "float", low = 1e-3, high = 1e-2, log = true }}
[objective]
target = 0.6
[search]
sampler = "random"
[budget]
trials = 2
parallel = 2
trial_minutes = 60
"""


@pytest.fixture
def private(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with a hidden partition ``owner`` and one of half an hour, ``short``."""
    if reason := missing(accounting=False):
        pytest.skip(f"no Slurm test cluster: {reason}")
    with Cluster(tmp_path_factory.mktemp("nu") / "c", Shape(nodes=2, lines=LINES)) as cluster:
        reachable(cluster.folder)
        yield cluster


def sweep_of_nobody(
    cluster: Cluster, folder: Path, partition: str, header: str = "--nodes=1"
) -> subprocess.CompletedProcess[str]:
    """A sweep driven by another user than root; who may read this checkout, wherever it lies."""
    folder.mkdir()
    (folder / "train.sub").write_text(TRAIN.format(folder=folder, header=header))
    (folder / "s.toml").write_text(STUDY.format(folder=folder, partition=partition))
    for path in (folder, *folder.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    reachable(folder.parent)
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    reads = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", "s.toml", "--output", "out"]
    environment = {**os.environ, **cluster.environment, "HOME": str(folder), "USER": "nobody"}
    return subprocess.run(
        [*user, *reads, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("partition", ['partition = "owner"', 'sbatch_args = ["--partition=owner"]'])
def test_a_hidden_partition_runs_each_trial_once_and_its_log_holds_all_that_it_says(
    private: Cluster, tmp_path: Path, partition: str
) -> None:
    folder = tmp_path / "u"
    swept = sweep_of_nobody(private, folder, partition)
    assert swept.returncode == 0, swept.stdout + swept.stderr
    sweep = recorded(folder / "out" / "sweep.db", "s")
    assert [trial.verdict for trial in sweep.trials.values()] == [Verdict.REACHED] * 2
    assert len(sweep.attempts) == 2, "each was submitted once"
    assert "lr 0.00" in (folder / "out" / "trials" / "0000" / "attempt-0" / "job.log").read_text()
    assert not list(folder.glob("elsewhere.*")), "the header's --error and --output would split the log"
    logs = [log.read_text() for log in (folder / "out" / "trials").rglob("job.log")]
    assert [log.count("lr ") for log in logs] == [1, 1], "four tasks, and one runner"


@pytest.mark.parametrize(("partition", "header"), [('partition = "short"', "--nodes=1"), ("", "-p short")])
def test_a_partition_that_allows_less_time_is_said_at_the_start(
    private: Cluster, tmp_path: Path, partition: str, header: str
) -> None:
    """Slurm takes such a job and lets it wait for ever; each attempt waited ten minutes."""
    swept = sweep_of_nobody(private, tmp_path / "u", partition, header)
    assert swept.returncode == 3
    assert "asks for 60 minutes, and its partition allows less (short: 30:00)" in swept.stdout + swept.stderr
    assert "lower budget.trial_minutes" in swept.stdout + swept.stderr
    assert private.run("squeue", "--noheader", "--all", "--states=all") == "", "nothing was submitted"
