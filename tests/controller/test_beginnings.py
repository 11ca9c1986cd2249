"""Runs whose progress does not begin at zero: a program that finds another trial's checkpoint."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from lora_tune.cli.ingest import read_logs
from lora_tune.controller.acceptance import begun_above_zero, why_untrue
from lora_tune.logs.failures import FailureKind
from lora_tune.logs.run import Eval, RunLog, TrainPoint
from tests.controller.test_acceptance import ATTEMPT, ENDED, STUDY_OF, TRIAL

EVALS = (1536, 1920, 2304, 2688)


def run_of(first: float, pace: float = 10.0, eval_seconds: float = 5.0, *, after: float = 0.0) -> RunLog:
    """Train points every 96 samples and evals where MLPerf has them; first: samples that were trained elsewhere.

    after: seconds of compiling before the first step.
    """
    train, evals, now, done = [], [], after, first
    for samples in range(int(first) + 96, 2689, 96):
        now, done = now + (samples - done) / pace, samples
        train.append(TrainPoint(samples, 1.2, now))
        if samples in EVALS:
            now += eval_seconds
            evals.append(Eval(samples, 0.96 - samples / 7e4, now))
    return RunLog(run_start_ms=0, evals=tuple(evals), train=tuple(train))


def blocks(first: float, eval_seconds: float = 5.0) -> RunLog:
    """A run that marks its evals and prints no train loss, at 10 samples/s."""
    run = run_of(first, eval_seconds=eval_seconds)
    at_first = run.evals[0].samples / (run.evals[0].seconds - eval_seconds)
    return replace(run, train=(), throughput=(at_first, *(10.0 for _ in run.evals[1:])))


def test_a_run_that_went_on_from_a_checkpoint_is_measured_again() -> None:
    found = why_untrue(STUDY_OF, TRIAL, ATTEMPT, replace(ENDED, seconds=1e4), run_of(1440), written={}, stamped=True)
    assert found is not None
    assert found.kind is FailureKind.CLOCK
    assert found.line == "the log has 1536 samples after 9.6 s, for which its own pace later needs 153.6 s"
    assert "folder of its own" in found.remedy


@pytest.mark.parametrize("after", [0.0, 20.0])
def test_a_resumed_run_is_noticed_though_it_compiles_first(after: float) -> None:
    assert begun_above_zero(run_of(960, after=after)) is not None


@pytest.mark.parametrize("eval_seconds", [0.0, 3.0, 60.0])
def test_a_log_of_evals_alone_tells_a_first_one_that_came_too_soon(eval_seconds: float) -> None:
    """Whatever an eval takes, ten times the training takes longer than one, or the machine became far slower."""
    later = [(1000 + 100 * k, 10.0 * (k + 1)) for k in range(5)]
    evals = tuple(Eval(n, 1.0, s + eval_seconds * (k + 1)) for k, (n, s) in enumerate(later))
    assert begun_above_zero(RunLog(run_start_ms=0, evals=evals)) is None, "as long as the others: an eval at its start"
    soon = tuple(e._replace(seconds=e.seconds - 6 - eval_seconds) for e in evals)
    found = begun_above_zero(RunLog(run_start_ms=0, evals=soon), "steps")
    assert found is not None
    assert "1000 steps after 4.0 s" in found.line
    whole = tuple(e._replace(seconds=e.seconds + 90) for e in evals)
    assert begun_above_zero(RunLog(run_start_ms=0, evals=whole)) is None


def test_blocks_between_marked_evals_tell_it_as_well() -> None:
    assert begun_above_zero(blocks(1536)) is not None
    assert begun_above_zero(blocks(0)) is None


@pytest.mark.parametrize("after", [0.0, 300.0])
@pytest.mark.parametrize("eval_seconds", [0.0, 5.0, 600.0])
def test_a_run_that_began_at_zero_is_believed(after: float, eval_seconds: float) -> None:
    """The first eval of MLPerf runs comes after four times the samples of the others: long evals make it look fast."""
    run = run_of(0, eval_seconds=eval_seconds, after=after)
    assert begun_above_zero(run) is None
    assert begun_above_zero(replace(run, train=())) is None
    assert begun_above_zero(blocks(0, eval_seconds)) is None


def test_a_machine_that_becomes_slower_after_the_first_points_says_nothing_of_the_beginning() -> None:
    train = tuple(TrainPoint(100 * i, 1.0, 10 * i if i < 4 else 30 + 80 * (i - 3)) for i in range(1, 20))
    assert begun_above_zero(RunLog(run_start_ms=0, train=train)) is None


def test_little_is_missing_of_a_run_whose_start_was_seen_late() -> None:
    train = tuple(TrainPoint(100 * i, 1.0, 0.05 + 0.4 * (i - 5)) for i in range(5, 20))
    assert begun_above_zero(RunLog(run_start_ms=0, train=train)) is None


@pytest.mark.public_data
def test_no_public_run_began_elsewhere(public_data: Path) -> None:
    logs = [log for log in read_logs(sorted(public_data.rglob("result*.gz"))[::9]) if not isinstance(log, str)]
    runs = list(itertools.chain.from_iterable(log.runs for log in logs))
    assert len(runs) > 200
    assert [run.run_start_ms for run in runs if begun_above_zero(run) is not None] == []
