"""The driver is killed with SIGKILL at random moments; nothing is lost and nothing runs twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from subprocess import TimeoutExpired

import pytest

from lora_tune.records import TrialState
from tests.slurm.house import House

pytestmark = pytest.mark.slurm


def test_twenty_kills_lose_no_trial_and_double_none(house: Callable[..., House]) -> None:
    home = house(trials=24, parallel=4, environment={"STANDIN_SECONDS": "4"})
    rng = random.Random(20)
    survived = []
    for _ in range(20):
        driver = home.start()
        try:
            driver.wait(rng.uniform(0.8, 4.0))
            survived.append(driver.returncode)
        except TimeoutExpired:
            driver.kill()
            driver.wait()
    assert len(survived) < 10, "most drivers were to be killed at work"
    assert home.finish(300) in (0, 4), home.said

    sweep = home.sweep()
    assert sorted(sweep.trials) == list(range(24))
    assert all(trial.state is TrialState.FINISHED for trial in sweep.trials.values())
    names = {attempt.job_name for attempt in home.attempts()}
    jobs = home.slurm_jobs()
    assert set(jobs) == names, "every job of the cluster is on record, and every record has its job"
    assert set(jobs.values()) == {1}, "no attempt was submitted twice"
    for trial in sweep.trials.values():
        attempts = sweep.attempts_of(trial.number)
        assert len(attempts) == 1, f"a killed driver is no reason for a second attempt: {attempts}"
    assert sum(a.node_hours(0) for a in home.attempts()) == pytest.approx(home.node_hours_by_slurm(), abs=1e-6)
