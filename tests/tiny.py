"""Real LoRA trials on the CPU: one tiny sweep for all tests that need one, and one process that imports for many."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_tune.base.errors import EXIT_NOTHING_REACHED
from lora_tune_recipes.worker_request import VARIABLE
from tests.recipes.served import warm_worker
from tests.waiting import wait_for

REPOSITORY = Path(__file__).resolve().parent.parent
STUDY = REPOSITORY / "studies" / "tiny.toml"


@pytest.fixture(scope="session")
def peft_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables with which a PEFT trial begins in a process that has its libraries: importing them takes longer than
    most trials of the tests."""
    socket = tmp_path_factory.mktemp("peft") / "worker.sock"
    with warm_worker(sys.executable, socket, ["lora_tune_recipes.training"]):
        # Trials that may use the same GPUs would wait for each other.
        yield {VARIABLE: str(socket), "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session")
def tiny_sweep(tmp_path_factory: pytest.TempPathFactory, peft_worker: dict[str, str]) -> Path:
    """The folder of a tiny sweep of four real trials that ended, or of some more where none reached the target;
    or the folder that LORA_TUNE_TINY_SWEEP names. What is proposed after the kill depends on which trials had ended.

    Its driver is killed in the middle, and the same command goes on: what is tested on it holds after that.
    """
    if there := os.environ.get("LORA_TUNE_TINY_SWEEP"):
        return Path(there).resolve()
    folder = tmp_path_factory.mktemp("tiny") / "sweep"
    command = [sys.executable, "-m", "lora_tune.sweep", "--study", str(STUDY), "--output", str(folder)]
    environment = {**os.environ, **peft_worker}
    first = subprocess.Popen([*command, "--trials", "4", "--quiet"], cwd=REPOSITORY, env=environment)
    wait_for(lambda: len(list(folder.glob("trials/*/attempt-0/started.json"))) >= 3, 200, "the third trial")
    first.kill()
    first.wait()
    for trials in ("4", "8", "12"):
        done = subprocess.run(
            [*command, "--trials", trials],
            capture_output=True,
            text=True,
            timeout=400,
            cwd=REPOSITORY,
            env=environment,
        )
        if done.returncode != EXIT_NOTHING_REACHED:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
