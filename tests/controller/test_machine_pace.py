"""A machine that becomes slower is no fault of a configuration: who is capped when others did the same work a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.cli.explain import trial_story
from lora_tune.config.study import parse_study
from lora_tune.controller import pruning
from lora_tune.controller.machine_pace import references, seconds_at, slowdown
from lora_tune.controller.policy import Stop
from lora_tune.logs.failures import Diagnosis, FailureKind
from lora_tune.logs.run import Eval, RunLog, TrainPoint
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Attempt, StopKind, StudyRecords, Trial, TrialState, Value, Verdict
from tests.fakes import command_study

STUDY = parse_study(command_study(trials=5, parallel=2, trial_minutes=10), Path("x.toml"))
LIKE: Mapping[str, Value] = MappingProxyType({"LR": 1e-4})


def paced(slower: float, count: int, *, loss: float = 2.0) -> RunLog:
    """The first ``count`` evals of a run, on a machine so many times slower than one that makes an eval in 10 s."""
    evals = tuple(Eval(100.0 * k, loss - 0.1 * k, 10 * slower * k) for k in range(1, count + 1))
    return RunLog(evals=evals, run_start_ms=0, last_ms=int(10_000 * slower * (count + 0.9)))


def beside(leader: RunLog, *, parameters: Mapping[str, Value] = LIKE) -> StudyRecords:
    """A sweep whose first trial reached the target with ``leader``."""
    seconds = leader.evals[-1].seconds
    best = Trial(
        number=1, seed=1, tuned={}, parameters=dict(parameters), seconds=seconds,
        metrics=TrialMetrics(objective=seconds), state=TrialState.FINISHED, verdict=Verdict.REACHED, finished_at=1.0,
    )  # fmt: skip
    return StudyRecords(
        name="x", digest="d", study_toml="", began_at=0.0, trials={1: best},
        attempts={(1, 0): Attempt(trial=1, number=0, job_name="x-0001-0", folder="")}, evals={(1, 0): leader.evals},
    )  # fmt: skip


def running(**parameters: Value) -> Trial:
    return Trial(number=9, seed=2, tuned=parameters, parameters=parameters)


@pytest.mark.parametrize("slower", [1.2, 2.0, 8.0, 50.0])
def test_a_run_of_equal_work_on_a_slower_machine_is_not_capped(slower: float) -> None:
    known = beside(paced(1.0, 10))
    like = running(LR=3e-4)
    for count in range(10):
        assert pruning.judge_curve(STUDY, known, like, paced(slower, count)) is None, count


def test_a_run_that_needs_more_steps_is_capped_on_a_slow_machine_too() -> None:
    known, like = beside(paced(1.0, 10)), running(LR=3e-4)
    found = pruning.judge_curve(STUDY, known, like, paced(8.0, 40, loss=99.0))
    assert isinstance(found, Stop)
    assert "of trial 1 on this machine, now 8.0 times slower, need at most" in found.sentence
    stuck = replace(paced(1.0, 5), last_ms=1_000_000)
    assert pruning.judge_curve(STUDY, known, like, stuck) is not None, "no progress is no slow machine"
    blind = RunLog(run_start_ms=0, last_ms=10_000_000)
    assert pruning.judge_curve(STUDY, known, like, blind) is not None


def test_a_run_whose_settings_are_slower_is_capped() -> None:
    known = beside(paced(1.0, 10), parameters={"LR": 1e-4, "HIDDEN": 64})
    wide = running(LR=1e-4, HIDDEN=512)
    assert pruning.judge_curve(STUDY, known, wide, paced(8.0, 6)) is not None


def test_a_limit_of_time_speaks_of_the_machine() -> None:
    limit = "ran into the limit of 3 min"
    stop = Stop(StopKind.TIME_LIMIT, limit, Diagnosis(FailureKind.CONFIGURATION, limit, "raise it"))
    known, like = beside(paced(1.0, 10)), running(LR=3e-4)
    slow = pruning.by_the_machine(STUDY, known, like, paced(8.0, 3), stop)
    assert slow.sentence == f"{limit} on a machine 8.0 times slower than for trials of equal work"
    begun = RunLog(train=(TrainPoint(50.0, 1.0, 20.0),), run_start_ms=0, last_ms=20_000)
    assert pruning.by_the_machine(STUDY, known, like, begun, stop).diagnosis.kind is FailureKind.INFRASTRUCTURE
    assert pruning.by_the_machine(STUDY, known, like, paced(1.1, 3), stop) == stop, "its own length"
    assert pruning.by_the_machine(STUDY, known, running(HIDDEN=512), paced(8.0, 3), stop) == stop, "another work"
    assert pruning.by_the_machine(STUDY, known, like, RunLog(run_start_ms=0), stop) == stop, "nothing is known of it"


def test_train_losses_tell_the_pace_before_the_first_eval() -> None:
    known, like = beside(paced(1.0, 10)), running(LR=3e-4)
    begun = RunLog(train=(TrainPoint(50.0, 1.0, 20.0),), run_start_ms=0, last_ms=20_000)
    assert slowdown(STUDY, known, like, begun) == pytest.approx(4.0)
    assert slowdown(STUDY, known, like, paced(0.5, 3)) == 1.0, "a faster machine makes nobody's limit tighter"


def test_explain_names_the_node_that_was_slower() -> None:
    """Two kinds of nodes, one 2.5 times slower: a run there says nothing of its configuration."""
    known, slow = beside(paced(1.0, 10)), paced(2.5, 10)
    trial = replace(
        known.trials[1], number=2, seconds=slow.evals[-1].seconds, metrics=TrialMetrics(objective=250.0),
        parameters={"LR": 3e-4}, tuned={"LR": 3e-4},
    )  # fmt: skip
    both = replace(
        known,
        trials={1: replace(known.trials[1], tuned={"LR": 1e-4}), 2: trial},
        attempts={
            (n, 0): Attempt(trial=n, number=0, job_name=f"x-000{n}-0", folder="", nodes=(f"n{n}",)) for n in (1, 2)
        },
        evals={**known.evals, (2, 0): slow.evals},
    )
    story = dict(trial_story(STUDY, both, trial))
    assert story["machine"] == (
        "2.5 times as long as trial 1 for the same samples with the same work a step, on n2 beside n1: its time is the "
        "machine's, not its configuration's"
    )
    assert "machine" not in dict(trial_story(STUDY, both, both.trials[1]))


def test_a_stated_role_counts_before_a_name() -> None:
    known = beside(paced(1.0, 10), parameters={"LR": 1e-4, "alpha": 16})
    stated = '[space]\nalpha = { type = "int", low = 8, high = 32, role = "convergence" }'
    study = parse_study(command_study(trials=5).replace("[space]", stated), Path("x.toml"))
    other = running(LR=1e-4, alpha=32)
    assert list(references(study, known, other)) == [1]
    assert references(STUDY, known, other) == {}


def test_a_run_of_which_only_the_log_is_there_is_like_no_other() -> None:
    assert references(STUDY, beside(paced(1.0, 10)), replace(running(LR=3e-4), tuned={})) == {}


@given(
    st.lists(st.tuples(st.floats(1, 1e6), st.floats(0.1, 1e6)), min_size=1, max_size=6, unique_by=lambda p: p[0]),
    st.floats(0.5, 2e6),
)
def test_progress_between_and_beyond_evals_has_a_time(points: list[tuple[float, float]], samples: float) -> None:
    assert 0 < seconds_at(samples, points) < float("inf")
    assert seconds_at(points[0][0], points) == pytest.approx(points[0][1])
