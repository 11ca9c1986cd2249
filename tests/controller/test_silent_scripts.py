"""Scripts that print nothing for long, or whose lines lie in a buffer: found, said, with the remedy."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_tune.controller import policy
from lora_tune.controller.policy import SILENCE_SECONDS
from lora_tune.launchers.base import JobState, JobStatus
from lora_tune.logs.run import Eval, RunLog, TrainPoint
from lora_tune.review.screen import Plain
from lora_tune.store.records import Attempt, Trial, Verdict
from tests.builders import study_of
from tests.controller.test_driver import House
from tests.fakes import FakeClock, FakeCluster, command_study, record

STARTED = 1_000_000.0


def look(silent: float, run: RunLog | None = None, state: JobState = JobState.RUNNING) -> policy.JobSnapshot:
    """A running attempt whose log has not grown since its start."""
    attempt = Attempt(trial=0, number=0, job_name="j", folder="f", intended_at=STARTED, started_at=STARTED)
    trial = Trial(number=0, seed=1, tuned={}, parameters={})
    return policy.JobSnapshot(
        attempt=attempt,
        status=JobStatus(state=state),
        run=run or RunLog(),
        grew_at=STARTED,
        ran_at=STARTED,
        trial=trial,
    )


@pytest.mark.parametrize("seconds", [0.0, SILENCE_SECONDS])
def test_a_start_may_be_silent_for_a_while(seconds: float) -> None:
    assert policy.silence_warning(study_of(), look(seconds), STARTED + seconds) == ""


def test_then_a_person_is_told_why_it_may_be_and_what_to_do() -> None:
    words = policy.silence_warning(study_of(), look(0), STARTED + SILENCE_SECONDS + 1)
    for part in ("flush=True", "python -u", "stdbuf -oL", "site.stall_minutes"):
        assert part in words
    later = policy.silence_warning(study_of(), look(0), STARTED + 5 * SILENCE_SECONDS)
    assert later == words, "said once, not anew with each minute"


@pytest.mark.parametrize(
    "run", [RunLog(evals=(Eval(8.0, 1.0, 1.0),)), RunLog(train=(TrainPoint(8.0, 1.0, 1.0),))], ids=["evals", "train"]
)
def test_a_run_that_was_read_may_take_its_time_between_evals(run: RunLog) -> None:
    assert policy.silence_warning(study_of(), look(0, run), STARTED + 5 * SILENCE_SECONDS) == ""


def test_a_job_that_waits_is_not_silent() -> None:
    assert policy.silence_warning(study_of(), look(0, state=JobState.QUEUED), STARTED + 5 * SILENCE_SECONDS) == ""


def test_in_a_sweep_it_is_said_once_and_gone_when_the_script_prints(tmp_path: Path) -> None:
    def late(*_: object) -> Iterator[tuple[float, str]]:
        start = clock.true
        yield 400.0, record(start + 400, "run_start", None)
        yield 401.0, record(start + 401, "eval_accuracy", -0.1, samples_count=24000)
        yield 402.0, record(start + 402, "run_stop", None, status="success")

    clock = FakeClock()
    there = House(tmp_path, FakeCluster(clock, late), command_study(trials=1, parallel=1))
    out = io.StringIO()
    there.driver(view=Plain(out)).run()
    told = [line for line in out.getvalue().splitlines() if "nothing at all for" in line]
    assert len(told) == 1
    (trial,) = there.sweep().trials.values()
    assert trial.verdict is Verdict.REACHED
    assert "nothing" not in trial.sentence
