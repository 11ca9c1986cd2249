"""A warm worker runs trial after trial from one set of imports, and nothing passes from one to the next."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_tune_recipes.warm_worker import gpus
from lora_tune_recipes.worker_request import VARIABLE
from tests.waiting import wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
TRIAL = "tests.recipes.worker_trials"
CLIENT = (
    "import sys; from lora_tune_recipes.worker_request import submit_to_worker; "
    f"sys.exit(submit_to_worker({TRIAL!r}) or 0)"
)
BOUND = 20.0


class Client:
    """A recipe's process that hands itself over; started at once."""

    def __init__(self, worker: Path, do: str, cwd: Path, **variables: str) -> None:
        environment = {**os.environ, VARIABLE: str(worker), "DO": do, "PYTHONPATH": str(REPOSITORY), **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout
        assert select.select([self.process.stdout], [], [], BOUND)[0], "no line from the trial"
        return self.process.stdout.readline()

    def result(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=BOUND)
        return self.process.returncode, out


@contextlib.contextmanager
def started(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A worker at ``path``, which outlives its trials."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lora_tune_recipes.warm_worker", "--socket", str(path), TRIAL],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    assert "ready" in process.stdout.readline()
    yield process
    assert process.poll() is None, "the worker outlives its trials"
    process.terminate()
    assert process.wait(BOUND) == 0
    assert not path.exists()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "worker.sock"
    with started(path):
        yield path


def test_a_trial_has_the_jobs_output_folder_and_exit_code(worker: Path, tmp_path: Path) -> None:
    code, out = Client(worker, "print hello", tmp_path).result()
    assert code == 0
    assert out.split()[:2] == ["hello", str(tmp_path)]
    assert Client(worker, "exit 3", tmp_path).result()[0] == 3


def test_every_trial_starts_from_the_state_after_the_imports(worker: Path, tmp_path: Path) -> None:
    first, second = (Client(worker, "print x", tmp_path).result()[1].split() for _ in range(2))
    assert first[2] == second[2] == "1", "what one trial appended to a module's list, the next did not see"
    assert first[3] == second[3], "both came from one worker"


def test_a_trial_finds_the_file_that_logs_a_line_without_going_through_all_modules(
    worker: Path, tmp_path: Path
) -> None:
    looked_up, modules = map(int, Client(worker, "log", tmp_path).result()[1].split())
    assert looked_up < 5 < modules


def test_a_trials_garbage_collector_does_not_go_through_what_was_imported(worker: Path, tmp_path: Path) -> None:
    """Each full collection took as long as several steps of a small trial, and copied the pages of all modules."""
    imported, own = map(int, Client(worker, "collect", tmp_path).result()[1].split())
    assert own < imported / 5


def test_imports_see_no_gpu_and_the_trial_sees_its_own(worker: Path, tmp_path: Path) -> None:
    """What starts CUDA before the fork makes it unusable after."""
    assert Client(worker, "gpus", tmp_path, CUDA_VISIBLE_DEVICES="3").result()[1].split() == ["''", "'3'"]


def test_a_crash_ends_its_trial_only(worker: Path, tmp_path: Path) -> None:
    assert Client(worker, "segfault", tmp_path).result()[0] == 128 + signal.SIGSEGV
    code, out = Client(worker, "raise trouble", tmp_path).result()
    assert code == 1
    assert "RuntimeError: trouble" in out
    assert Client(worker, "exit 0", tmp_path).result()[0] == 0


def test_signals_reach_the_trial(worker: Path, tmp_path: Path) -> None:
    client = Client(worker, f"until {tmp_path / 'never'}", tmp_path)
    assert client.line().startswith("started")
    client.process.send_signal(signal.SIGTERM)
    assert client.result()[0] == 7


def test_a_killed_job_takes_its_trial_along(worker: Path, tmp_path: Path) -> None:
    client = Client(worker, f"until {tmp_path / 'never'}", tmp_path)
    pid = int(client.line().split()[2])
    client.process.kill()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), BOUND, "the trial runs on without its job")
    client.process.communicate(timeout=BOUND)


def test_jobs_share_no_gpu_and_ranks_of_one_job_run_together(worker: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = Client(worker, f"until {go}", tmp_path, CUDA_VISIBLE_DEVICES="0,1", SLURM_JOB_ID="1")
    assert first.line().startswith("started")
    later = Client(worker, f"until {go}", tmp_path, CUDA_VISIBLE_DEVICES="1", SLURM_JOB_ID="3")
    rank = Client(worker, f"until {go}", tmp_path, CUDA_VISIBLE_DEVICES="0,1", SLURM_JOB_ID="1")
    elsewhere = Client(worker, f"until {go}", tmp_path, CUDA_VISIBLE_DEVICES="2", SLURM_JOB_ID="2")
    assert rank.line().startswith("started")
    assert elsewhere.line().startswith("started")
    go.touch()
    ended = float(first.result()[1].split()[1])
    started = float(later.result()[1].split()[1])
    assert started > ended
    rank.result()
    elsewhere.result()


def test_without_a_worker_the_trial_imports_by_itself(tmp_path: Path) -> None:
    code, out = Client(tmp_path / "none.sock", "exit 3", tmp_path).result()
    assert code == 0, "submit_to_worker returned None"
    assert "no worker answers" in out


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, {"*"}), ({"CUDA_VISIBLE_DEVICES": ""}, set()), ({"CUDA_VISIBLE_DEVICES": "0, 3"}, {"0", "3"})],
)
def test_the_gpus_of_an_environment(environment: dict[str, str], expected: set[str]) -> None:
    assert gpus(environment) == expected
