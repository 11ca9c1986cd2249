"""The test cluster itself: what the other tests take for granted of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cluster import Cluster, ClusterError, Shape, wait_until
from tests.cluster.cluster import processes_of
from tests.cluster.texts import SOCKET_BYTES, longest_socket

pytestmark = pytest.mark.slurm


def submit(cluster: Cluster, *flags: str, script: str) -> str:
    return cluster.run("sbatch", "--parsable", "-o", os.devnull, *flags, "--wrap", script).strip()


def test_a_job_with_eight_tasks_sees_eight_gpus_on_one_node(slurm: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f"srun -l --ntasks-per-node=8 --gres=gpu:8 sh -c 'echo $CUDA_VISIBLE_DEVICES $SLURMD_NODENAME' > {out}"
    job = submit(slurm, "-N1", "--exclusive", "--gres=gpu:8", script=script)
    wait_until(lambda: slurm.job_state(job) == "COMPLETED", 20, "the job ends")
    lines = sorted(out.read_text().splitlines())
    assert len(lines) == 8
    assert {line.split()[1] for line in lines} == {"0,1,2,3,4,5,6,7"}
    assert len({line.split()[2] for line in lines}) == 1


def test_a_fifth_exclusive_job_waits_for_a_node(slurm: Cluster) -> None:
    jobs = [submit(slurm, "-N1", "--exclusive", script="sleep 60") for _ in range(5)]
    wait_until(lambda: [slurm.job_state(j) for j in jobs].count("RUNNING") == 4, 10, "four run")
    assert slurm.job_state(jobs[4]) == "PENDING"


def test_a_cancelled_job_takes_even_stubborn_and_detached_processes_with_it(slurm: Cluster, tmp_path: Path) -> None:
    if not os.access("/sys/fs/cgroup/freezer", os.W_OK):
        pytest.skip("only cgroup v1's freezer tracks detached processes")
    pid_file = tmp_path / "pid"
    script = (
        f"trap '' TERM; setsid sh -c 'trap \"\" TERM; echo $$ > {pid_file}; while :; do sleep 0.1; done' & sleep 99"
    )
    job = submit(slurm, "-N1", script=script)
    wait_until(lambda: pid_file.exists() and pid_file.read_text().strip() != "", 10, "the stubborn process runs")
    pid = int(pid_file.read_text())
    slurm.run("scancel", job)
    wait_until(lambda: not _alive(pid), 20, "it is gone")


def test_a_restarted_controller_remembers_a_running_job(slurm: Cluster) -> None:
    job = submit(slurm, "-N1", script="sleep 60")
    wait_until(lambda: slurm.job_state(job) == "RUNNING", 10, "it runs")
    slurm.restart_controller()
    assert slurm.job_state(job) == "RUNNING"


def test_a_dead_node_fails_its_job(slurm: Cluster) -> None:
    job = submit(slurm, "-N1", "--no-requeue", script="sleep 600")
    wait_until(lambda: slurm.job_state(job) == "RUNNING", 10, "it runs")
    node = slurm.run("squeue", "-h", "-j", job, "-o", "%N").strip()
    slurm.kill_node(node)
    wait_until(lambda: slurm.job_state(job) == "NODE_FAIL", 60, "Slurm notices")


def test_sacct_knows_an_ended_job_and_its_comment(slurm_accounting: Cluster) -> None:
    job = submit(slurm_accounting, "-N1", "--comment=why", script="exit 3")
    rows = lambda: slurm_accounting.run("sacct", "-X", "-n", "-P", "-j", job, "-o", "State,ExitCode,Comment").strip()  # noqa: E731
    wait_until(lambda: rows() == "FAILED|3:0|why", 20, f"sacct has it: {rows()}")


def folder_of(length: int, above: Path) -> Path:
    """A folder whose path has so many bytes."""
    return above / ("c" * (length - len(os.fsencode(above)) - 1))


def step_runs(cluster: Cluster, job: str) -> bool:
    return f"{job}.0" in cluster.run("squeue", "-h", "-s", "-o", "%i").split()


def test_two_clusters_live_beside_each_other_in_folders_as_deep_as_they_may_be(
    slurm: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Both count their jobs from 1; a step has a socket below the folder, and with it the longest path."""
    above, shape = tmp_path_factory.mktemp("deep"), Shape(nodes=2)
    deepest = SOCKET_BYTES - len(os.fsencode(longest_socket(Path(), shape.nodes))) - 1
    with Cluster(folder_of(deepest, above), shape) as other:
        jobs = {cluster: submit(cluster, "-N2", script="srun sleep 600") for cluster in (slurm, other)}
        wait_until(lambda: all(step_runs(c, job) for c, job in jobs.items()), 20, "the steps of both run")
        daemons = {slurm.pid_of(node) for node in slurm.nodes}
        assert daemons <= processes_of(slurm.folder)
        assert not processes_of(slurm.folder) & processes_of(other.folder)
    assert daemons <= processes_of(slurm.folder), "the end of one takes nothing of the other"
    assert step_runs(slurm, jobs[slurm])


def test_a_folder_too_deep_for_a_jobs_sockets_is_refused(tmp_path: Path) -> None:
    """With ``pytest -n`` a tmp_path is ten bytes longer: slurmd cancelled every job of a rack as it started."""
    deep = tmp_path / ("d" * 80)
    with pytest.raises(ClusterError, match=r"could not make .*/spool/c65535n18/.*path is \d+ shorter"):
        Cluster(deep, Shape(nodes=18)).start()
    assert not deep.exists()


def test_killing_the_owner_ends_the_cluster(tmp_path_factory: pytest.TempPathFactory) -> None:
    """SIGKILL of the process that started a cluster leaves no daemon and no job behind."""
    folder = tmp_path_factory.mktemp("killed") / "c"
    program = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from tests.cluster import Cluster
        cluster = Cluster(Path({str(folder)!r}))
        cluster.start()
        cluster.run("sbatch", "-o", "/dev/null", "--wrap", "sleep 600")
        print("up", flush=True)
        time.sleep(600)
    """)
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        assert processes_of(folder)
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not processes_of(folder), 20, f"nothing is left: {processes_of(folder)}")


def _alive(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
