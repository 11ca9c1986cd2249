"""A sweep from the login node of one cluster on another: ``sbatch_args = ["--clusters=other"]``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lora_tune.config.tables import Site
from lora_tune.launchers.base import JobState
from lora_tune.launchers.slurm.launcher import SlurmLauncher
from lora_tune.store.records import Verdict
from tests.cluster import Cluster, Shape, missing
from tests.contracts.launcher import SAY, WAIT, job_of, poll_until, ticket_of
from tests.recorded import recorded
from tests.slurm.test_strange_sites import LONGER, STUDY, command
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

THERE = Site(launcher="slurm", gpus_per_node=0, sbatch_args=("--clusters=other",))
HERE = Site(launcher="slurm", gpus_per_node=0)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Cluster]]:
    """The cluster of the login node, and ``other``, which its accounting knows."""
    if reason := missing(accounting=True):
        pytest.skip(f"no Slurm test cluster: {reason}")
    folder = tmp_path_factory.mktemp("tc")
    with Cluster(folder / "a", Shape(nodes=1, accounting=True)) as here, Cluster(folder / "b", Shape(nodes=2)) as other:
        other.join(here, "other")
        yield here, other


@pytest.fixture
def other(two: tuple[Cluster, Cluster], monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The other cluster; SLURM_CONF names the first."""
    for name, value in two[0].environment.items():
        monkeypatch.setenv(name, value)
    return two[1]


def test_jobs_of_one_number_on_two_clusters_are_told_apart(other: Cluster, tmp_path: Path) -> None:
    here, there = SlurmLauncher(HERE), SlurmLauncher(THERE)
    mine, others = (job_of(tmp_path / name, WAIT, name="study-0000-0") for name in ("mine", "others"))
    ticket, foreign = ticket_of(mine, there.submit(mine)), ticket_of(others, here.submit(others))
    poll_until(there, ticket, JobState.RUNNING)
    assert ticket.job_id == foreign.job_id, "both clusters begin at one"
    assert there.poll([replace(ticket, job_id="")])[ticket.name].job_id == ticket.job_id
    assert [t.folder.name for t in there.jobs_below(tmp_path)] == ["mine"]
    there.cancel(ticket, force=True)
    poll_until(there, ticket, JobState.CANCELLED)
    assert poll_until(here, foreign, JobState.RUNNING).job_id == foreign.job_id
    here.cancel(foreign, force=True)
    said = job_of(tmp_path / "said", SAY, name="study-0001-0", CODE="3")
    ended = poll_until(there, ticket_of(said, there.submit(said)), JobState.ENDED)
    assert ended.exit_code == 3


def test_a_sweep_on_another_cluster_goes_on_after_its_driver_was_killed(other: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LONGER)
    text = STUDY.format(python=sys.executable, folder=tmp_path)
    text = text.replace("gpus_per_node", 'sbatch_args = ["--clusters=other"]\ngpus_per_node')
    (tmp_path / "s.toml").write_text(text + "[pruning]\ncap = false\n")
    sweep = [sys.executable, "-m", "lora_tune.sweep", "--study", "s.toml", "--output", "out"]
    driver = subprocess.Popen(sweep, cwd=tmp_path, stdin=subprocess.DEVNULL)
    logs = tmp_path / "out" / "trials"
    wait_for(lambda: any("step" in log.read_text() for log in logs.rglob("job.log")), 60, "a trial trains")
    driver.kill()
    driver.wait()
    swept = command(tmp_path, "sweep")
    assert swept.returncode == 0, swept.stdout + swept.stderr
    found = recorded(tmp_path / "out" / "sweep.db", "s")
    assert [trial.verdict for trial in found.trials.values()] == [Verdict.REACHED] * 2
    assert len(found.attempts) == 2, "each was submitted once"
    names = other.run("squeue", "--noheader", "--all", "--states=all", "--format=%j").split()
    assert sorted(name for name in names if name.startswith("s-")) == ["s-0000-0", "s-0001-0"]
