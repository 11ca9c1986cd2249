"""The driver is killed with SIGKILL at random moments; nothing is lost and nothing runs twice."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable

import pytest

from lora_tune.store.records import TrialState
from tests.slurm.house import House

pytestmark = pytest.mark.slurm


def test_twenty_kills_lose_no_trial_and_double_none(house: Callable[..., House]) -> None:
    home = house(trials=24, parallel=4, environment={"STANDIN_SECONDS": "4"})
    rng = random.Random(20)
    killed = 0
    for number in range(20):
        driver = home.start()
        # Every other kill falls between the intention of a submission and its record, give or take.
        moment = in_a_submission if number % 2 else at_any_time
        moment(home, driver, rng)
        killed += driver.poll() is None
        driver.kill()
        driver.wait()
    assert killed >= 10, f"only {killed} drivers were killed at work\n{home.said}"
    assert home.finish(300) in (0, 4), home.said

    sweep = home.sweep()
    assert len(sweep.trials) == 24
    assert all(trial.state is TrialState.FINISHED for trial in sweep.trials.values())
    jobs = home.slurm_jobs()
    assert set(jobs) == {attempt.job_name for attempt in home.attempts()}, "records and jobs agree"
    assert set(jobs.values()) == {1}, "no attempt was submitted twice"
    for trial in sweep.trials.values():
        attempts = sweep.attempts_of(trial.number)
        assert len(attempts) == 1, f"a killed driver is no reason for a second attempt: {attempts}"
    assert sum(a.node_hours(0) for a in home.attempts()) == pytest.approx(home.node_hours_by_slurm(), abs=1e-6)


def at_any_time(home: House, driver: subprocess.Popen[bytes], rng: random.Random) -> None:
    try:
        driver.wait(rng.uniform(0.8, 4.0))
    except subprocess.TimeoutExpired:
        return


def in_a_submission(home: House, driver: subprocess.Popen[bytes], rng: random.Random) -> None:
    """Wait until the driver writes down its next submission, then a little: sbatch takes about 10 ms."""

    def begun() -> int:
        return len(list(home.paths.trials.glob("*/*/slurm.json")))

    before, end = begun(), time.monotonic() + 15
    while begun() == before and driver.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    time.sleep(rng.uniform(0.0, 0.06))
