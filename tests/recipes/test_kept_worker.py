"""The worker that a sweep keeps: there before its imports are done, gone with the last trial, found by a new driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_tune.config.study import load_study
from lora_tune_recipes.kept_worker import kept_worker, socket_path
from lora_tune_recipes.worker_request import VARIABLE
from tests.recipes.served import CLIENT, PER_PROCESS
from tests.waiting import wait_for

PROGRAM = "tests.recipes.worker_trials"
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets of this test's own, and no worker of the environment."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    for name, value in PER_PROCESS.items():
        monkeypatch.setenv(name, value)


def trial(what: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, PROGRAM],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "DO": what, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


def test_trials_share_one_worker_that_ends_with_the_sweep(tmp_path: Path) -> None:
    with kept_worker(tmp_path, PROGRAM):
        (one, first), (two, second) = (result(trial("print hello")) for _ in range(2))
        assert (one, two) == (0, 0)
        assert first == second != "", "the same parent"
        running = trial(f"until {tmp_path / 'go'}")
        assert running.stdout is not None
        assert running.stdout.readline().startswith("started")
    assert VARIABLE not in os.environ
    assert socket_path(tmp_path).exists(), "a trial goes on"
    (tmp_path / "go").touch()
    assert result(running)[0] == 0
    wait_for(lambda: not socket_path(tmp_path).exists(), 60, "the worker ends")


def test_the_next_driver_finds_the_worker_of_one_that_was_killed(tmp_path: Path) -> None:
    with kept_worker(tmp_path, PROGRAM):
        parent = result(trial("print x"))[1].split()[-1]
        environment = os.environ.pop(VARIABLE)
        with kept_worker(tmp_path, PROGRAM):
            assert os.environ[VARIABLE] == environment
            assert result(trial("print x"))[1].split()[-1] == parent
        os.environ[VARIABLE] = environment
    wait_for(lambda: not socket_path(tmp_path).exists(), 60, "the worker ends")


def test_a_worker_that_somebody_named_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/theirs.sock")
    with kept_worker(tmp_path, PROGRAM):
        assert os.environ[VARIABLE] == "/theirs.sock"
    assert not socket_path(tmp_path).exists()


def test_a_folder_of_sockets_that_others_could_write_to_is_not_used(tmp_path: Path) -> None:
    socket_path(tmp_path).parent.mkdir()
    socket_path(tmp_path).parent.chmod(0o777)
    with kept_worker(tmp_path, PROGRAM):
        assert VARIABLE not in os.environ, "trials import by themselves"


def test_the_tiny_study_asks_for_one() -> None:
    study = load_study(REPOSITORY / "studies" / "tiny.toml")
    assert study.workload.model_dump()["warm_worker"] is True
