"""``gpu_node.sh`` starts real Slurm with gres on one machine, without network or systemd, and leaves nothing behind."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import missing
from tests.waiting import wait_for

SCRIPT = Path(__file__).with_name("gpu_node.sh")

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(missing(accounting=False)), reason=missing(accounting=False) or "-"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A running cluster with two devices that Slurm takes for GPUs."""
    root = tmp_path_factory.mktemp("gpu_node")
    devices = [root / "gpu0", root / "gpu1"]
    for device in devices:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    environment = {**os.environ, "GPUS": " ".join(map(str, devices))}
    folder = root / "slurm"
    done = subprocess.run(
        ["bash", str(SCRIPT), "start", str(folder)], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    yield folder
    pids = [int((folder / "run" / f"{daemon}.pid").read_text()) for daemon in ("slurmctld", "slurmd")]
    subprocess.run(["bash", str(SCRIPT), "stop", str(folder)], check=True, timeout=60)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what="the daemons are gone")


def shell(folder: Path, command: str) -> str:
    script = f"source {folder}/environment; {command}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=True).stdout.strip()


def test_a_job_gets_exactly_the_gpus_it_asks_for(folder: Path) -> None:
    assert shell(folder, "srun --gres=gpu:1 printenv CUDA_VISIBLE_DEVICES") in ("0", "1")
    assert shell(folder, "srun --gres=gpu:2 printenv CUDA_VISIBLE_DEVICES") == "0,1"


def test_jobs_side_by_side_get_different_gpus_and_give_them_back(folder: Path) -> None:
    wait = "--gres=gpu:1 --wrap='printenv CUDA_VISIBLE_DEVICES; sleep 600'"
    ids = [shell(folder, f"sbatch --parsable -o {folder}/%j.out {wait}") for _ in range(2)]
    logs = [folder / f"{number}.out" for number in ids]
    try:
        end = time.monotonic() + 60
        while not all(log.exists() and log.read_text().strip() for log in logs):
            assert time.monotonic() < end, shell(folder, "squeue -t all -o '%A %j %T %r'; sinfo -N -o '%N %T %E'")
            time.sleep(0.1)
        assert {log.read_text().strip() for log in logs} == {"0", "1"}
    finally:
        shell(folder, "scancel " + " ".join(ids))
    assert shell(folder, "srun --immediate=20 --gres=gpu:2 printenv CUDA_VISIBLE_DEVICES") == "0,1"


def test_a_machine_without_gpus_is_told_so(tmp_path: Path) -> None:
    if list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has GPUs")
    command = ["bash", str(SCRIPT), "start", str(tmp_path / "slurm")]
    done = subprocess.run(command, env={**os.environ, "GPUS": ""}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "no GPU" in done.stderr
