"""The Slurm job of docs/service.md as a real job: it serves, outlives its server's death, and queues itself again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_tune.cli.serve import SERVER
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import Verdict
from tests.docs.test_service_page import block
from tests.slurm.house import House
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm


def test_the_job_serves_a_registered_study_and_is_queued_again(house: Callable[..., House], tmp_path: Path) -> None:
    home = house(trials=2, parallel=1, target=0.99, environment={"STANDIN_SECONDS": "1", "NCCL_TEST": "0"})
    url = sqlite_url(tmp_path / "team.db")
    shell = {**os.environ, **home.cluster.environment, "LORA_TUNE_IMPLEMENTATION": "", "HOME": str(tmp_path)}
    (tmp_path / ".config").mkdir()
    (tmp_path / ".config" / "lora-tune.env").write_text(f"export LORA_TUNE_STORAGE={url}\n")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    script = tmp_path / "serve.sbatch"
    script.write_text(block("sbatch").replace("/opt/lora-tune", str(tmp_path)))
    register = [sys.executable, "-m", "lora_tune.sweep", "--study", str(home.study), "--register"]
    subprocess.run(
        [*register, "--output", str(home.paths.root)], cwd=tmp_path, env={**shell, "LORA_TUNE_STORAGE": url},
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    log = tmp_path / "serve.log"
    job = home.cluster.run("sbatch", "--parsable", f"--output={log}", str(script), environment=shell).strip()
    store = Store(url, read_only=True)

    def said() -> str:
        return log.read_text() if log.exists() else ""

    def started(trial: int) -> bool:
        return "run_start" in home.paths.attempt(trial, 0).log.read_text() if home.paths.trials.exists() else False

    try:
        wait_for(lambda: home.paths.attempt(0, 0).log.exists() and started(0), 60, "the first trial trains")
        first = store.held(SERVER).owner
        os.kill(int(first.split()[2]), signal.SIGKILL)
        wait_for(lambda: store.registered()[0].ended != "", 90, "another server drives the study to its end")
        sweep = store.load(home.name)
        assert sweep is not None
        assert {t.verdict for t in sweep.trials.values()} == {Verdict.REACHED}, said()
        assert [len(sweep.attempts_of(n)) for n in (0, 1)] == [1, 1], "the job of the first trial was adopted"
        assert store.held(SERVER).owner not in ("", first)
        assert home.cluster.job_state(job) == "RUNNING"
        home.cluster.run("scancel", "--batch", "--signal=TERM", job)  # as --signal=B:TERM@120 does near its limit
        wait_for(lambda: "Restarts=1" in home.cluster.run("scontrol", "show", "job", job), 30, "it is queued again")
        assert "stopped; the jobs keep running" in said()
        assert store.held(SERVER).owner == "", "its lease is free for a server elsewhere"
    finally:
        store.close()
        home.cluster.run("scancel", job)
