"""A best time that no other trial comes near is confirmed before it counts: checkpoints that trials share, restarts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from lora_tune.config.study import parse_study
from lora_tune.controller.acceptance import implausibility
from lora_tune.launchers.base import JobState, JobStatus
from lora_tune.logs.failures import FailureKind
from lora_tune.logs.run import Eval, RunLog
from lora_tune.search.pace import NO_PROGRESS_SLOWDOWN
from lora_tune.store.records import StudyRecords, Verdict
from tests.controller.test_driver import House
from tests.fakes import FakeClock, FakeCluster, Script, command_study, record
from tests.search.test_pace import STUDY, beside, paced, running

ENDED = JobStatus(state=JobState.ENDED, exit_code=0)
Run = tuple[float, float, float]
"""Seconds before the run begins, seconds an eval, and how far down (in evals) its first eval is."""


def scripted(*runs: Run) -> Callable[[Mapping[str, str], float], Script]:
    """Jobs that come down by 0.25 an eval from 2.0 to the target, 0.5; the last of ``runs`` is that of all later."""
    numbers = itertools.count()

    def script(environment: Mapping[str, str], start: float) -> Script:
        before, pace, ahead = runs[min(next(numbers), len(runs) - 1)]
        yield before, record(start + before, "run_start", None)
        for number in range(1, 10):
            at, loss = before + pace * number, 2.0 - 0.25 * (number + ahead)
            yield at, record(start + at, "eval_accuracy", loss, samples_count=100 * number)
            if loss <= float(environment["TARGET"]):
                yield at, record(start + at, "run_stop", None, status="success")
                return

    return script


def swept(tmp_path: Path, *runs: Run, attempts: int = 3, trials: int = 3) -> StudyRecords:
    study = command_study(trials=trials, parallel=1, attempts=attempts).replace("target = 0.0", "target = 0.5")
    there = House(tmp_path, FakeCluster(FakeClock(), scripted(*runs)), study)
    assert there.study.target == 0.5
    there.driver().run()
    return there.sweep()


USUAL = (1.0, 10.0, 0.0)


def test_trials_that_go_on_from_a_shared_folder_are_not_the_best(tmp_path: Path) -> None:
    """Each job begins where the one before ended: 10 s are all that it needs. The first alone began at zero."""
    sweep = swept(tmp_path, USUAL, *((1.0, 10.0, 6.0 + 0.5 * k) for k in range(4)))
    assert [t.verdict for t in sweep.trials.values()] == [Verdict.REACHED, Verdict.FAILED, Verdict.FAILED]
    best = sweep.best()
    assert best is not None
    assert best.number == 0
    first, second = sweep.attempts_of(1)
    assert first.failure == "clock"
    assert "no other trial was there after 3 times as much training" in first.line
    assert second.failure == "configuration"
    assert second.line.startswith("its first eval goes on where its attempt before ended")
    assert "{folder}" in second.remedy


def test_one_that_reaches_the_target_with_its_first_eval_each_time_still_goes_further(tmp_path: Path) -> None:
    """As it does from another trial's checkpoint: each epoch takes two fifths of what is left."""
    sweep = swept(tmp_path, USUAL, *((1.0, 10.0, 6.0 + 0.2 * k) for k in range(4)))
    assert [t.verdict for t in sweep.trials.values()] == [Verdict.REACHED, Verdict.FAILED, Verdict.FAILED]


def test_a_configuration_that_is_so_good_is_confirmed_by_its_second_run(tmp_path: Path) -> None:
    sweep = swept(tmp_path, USUAL, (1.0, 10.0, 5.0))
    best = sweep.trials[1]
    assert (best.verdict, best.seconds) == (Verdict.REACHED, 10.0)
    assert [a.failure for a in sweep.attempts_of(1)] == ["clock", ""]
    assert len(sweep.attempts_of(2)) == 1, "as good as a confirmed one is no wonder"


def test_one_attempt_is_believed_as_it_is(tmp_path: Path) -> None:
    sweep = swept(tmp_path, USUAL, (1.0, 10.0, 5.0), attempts=1)
    assert {t.verdict for t in sweep.trials.values()} == {Verdict.REACHED}


def test_a_program_that_started_again_where_the_log_does_not_show_it_is_measured_again(tmp_path: Path) -> None:
    """15 minutes of training before the last start, of which nothing is in the log; the others begin at once."""
    sweep = swept(tmp_path, USUAL, (900.0, 8.0, 0.0), USUAL)
    first, _ = sweep.attempts_of(1)
    assert first.failure == "clock"
    assert "of which its log accounts for 48.0 s" in first.line
    assert sweep.trials[1].seconds == 60.0


def test_a_pace_that_no_trial_of_equal_work_has_is_doubted() -> None:
    known, trial = beside(paced(1.0, 10)), running(LR=3e-4)
    quick = paced(0.1, 20)
    doubt = implausibility(STUDY, known, trial, ENDED, quick, 0)
    assert doubt is not None
    assert doubt.kind is FailureKind.CLOCK
    assert "came after 1.0 s, which took 10.0 s or more in every trial of equal work" in doubt.line
    assert implausibility(STUDY, known, running(LR=3e-4, HIDDEN=8), ENDED, quick, 0) is None, "another work"
    assert implausibility(STUDY, known, trial, ENDED, paced(0.4, 20), 0) is None, "twice is no wonder"
    assert implausibility(STUDY, known, trial, ENDED, paced(NO_PROGRESS_SLOWDOWN, 20), 0) is None, "not the best"


def test_a_program_that_starts_again_and_does_not_say_so_is_named(tmp_path: Path) -> None:
    """It counts from zero and has the weights: all that it printed then was passed over, and nobody said so."""

    def script(environment: Mapping[str, str], start: float) -> Script:
        yield 1.0, record(start + 1, "run_start", None)
        for number in range(1, 7):
            at, samples = 1.0 + 10 * number, 100 * ((number - 1) % 3 + 1)
            yield at, record(start + at, "eval_accuracy", 2.0 - 0.25 * number, samples_count=samples)

    study = command_study(trials=1, parallel=1).replace("target = 0.0", "target = 0.5")
    there = House(tmp_path, FakeCluster(FakeClock(), script), study)
    there.driver().run()
    (trial,) = there.sweep().trials.values()
    assert trial.verdict is Verdict.CENSORED
    assert "goes back to progress that it had passed" in trial.sentence
    assert "3 of its evals, the lowest 0.5, do not count" in trial.sentence


@pytest.mark.parametrize(("resumed", "kind"), [("", FailureKind.CLOCK), ("resuming at 6", FailureKind.CONFIGURATION)])
def test_a_log_that_says_that_it_goes_on_is_not_run_in_vain(resumed: str, kind: FailureKind) -> None:
    low = RunLog(run_start_ms=0, resumed=resumed, evals=(Eval(100.0, -0.5, 10.0),))
    doubt = implausibility(STUDY, beside(paced(1.0, 30)), running(LR=3e-4), ENDED, low, 0)
    assert doubt is not None
    assert doubt.kind is kind


def test_what_has_no_target_is_compared_by_its_lowest_eval() -> None:
    text = command_study(trials=5, attempts=3).replace("target = 0.0", 'metric = "eval_loss"')
    study = parse_study(text, Path("x.toml"))
    low = RunLog(run_start_ms=0, evals=(Eval(100.0, -5.0, 10.0),))
    assert implausibility(study, beside(paced(1.0, 30)), running(LR=3e-4), ENDED, low, 0) is not None
    high = replace(low, evals=(Eval(100.0, 1.9, 10.0),))
    assert implausibility(study, beside(paced(1.0, 30)), running(LR=3e-4), ENDED, high, 0) is None
