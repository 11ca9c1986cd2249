"""Nodes that a cloud makes when a job wants them, and has none to make: the trials wait, and nothing is spent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_tune.store.records import Verdict
from tests.cluster import Cluster, Shape, missing, wait_until
from tests.recorded import recorded
from tests.slurm.test_strange_sites import STUDY as OWN_STUDY
from tests.slurm.test_strange_sites import TRAIN

pytestmark = [pytest.mark.slurm, pytest.mark.long]

RESUME = """#!/bin/bash
# As AWS ParallelCluster does: nodes that cannot be launched are set down, and a while later they may be had again.
# -b: or slurmctld waits for a node that was rebooted.
here=$(cd "$(dirname "$0")" && pwd)
export SLURM_CONF=$here/slurm.conf LORA_TUNE_TEST_CLUSTER=$here
for node in $(scontrol show hostnames "$1"); do
    if [ -e "$here/capacity" ]; then
        slurmd -D -b -N "$node" </dev/null >"$here/log/slurmd.$node.out" 2>&1 &
    else
        (
            sleep 1
            scontrol update nodename="$node" state=down reason="(Code:InsufficientInstanceCapacity)"
            sleep 5
            scontrol update nodename="$node" state=idle
        ) >>"$here/log/resume.out" 2>&1 &
    fi
done
"""

STUDY = OWN_STUDY.replace('system = "OWN"\ngpus_per_node = 1', 'partition = "cloud"\ngpus_per_node = 0').replace(
    "parallel = 2\n", "parallel = 2\nattempts = 1\n"
)


@pytest.fixture
def cloud(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster whose partition ``cloud`` has two nodes once the file ``capacity`` is in its folder."""
    if reason := missing(accounting=False):
        pytest.skip(f"no Slurm test cluster: {reason}")
    with Cluster(tmp_path_factory.mktemp("cl") / "c", Shape(nodes=1, cloud=2, files={"resume": RESUME})) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        yield cluster


def test_without_capacity_trials_wait_and_spend_no_attempt(cloud: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "s.toml").write_text(STUDY.format(python=sys.executable, folder=tmp_path))
    output = tmp_path / "printed"
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", "s.toml", "--output", "out"]
    with output.open("wb") as file:
        driver = subprocess.Popen(command, cwd=tmp_path, env={**os.environ}, stdout=file, stderr=subprocess.STDOUT)
    try:
        ended = lambda: [line for line in failed(cloud) if line.endswith("NODE_FAIL")]  # noqa: E731
        wait_until(lambda: len(ended()) >= 2, 60, "both first jobs fail for want of nodes", output.read_text)
        (cloud.folder / "capacity").touch()
        assert driver.wait(120) == 0, output.read_text()
    finally:
        driver.kill()
        driver.wait()

    sweep = recorded(tmp_path / "out" / "sweep.db", "s")
    assert [trial.verdict for trial in sweep.trials.values()] == [Verdict.REACHED] * 2, output.read_text()
    waited = [attempt for attempt in sweep.attempts.values() if attempt.number == 0]
    assert [attempt.failure for attempt in waited] == ["capacity"] * 2
    assert all("did not come up before it began" in attempt.line for attempt in waited)
    assert [a.node_hours(0.0) for a in waited] == [0.0, 0.0], "they had no machine"
    assert not [a.exclude_nodes for a in sweep.attempts.values() if a.exclude_nodes], "no node is to blame"
    assert output.read_text().count("no nodes can be had") == 1, "what all of them wait for is said once"


def failed(cluster: Cluster) -> list[str]:
    return cluster.run("squeue", "--noheader", "--all", "--states=all", "--format=%A %T").splitlines()
