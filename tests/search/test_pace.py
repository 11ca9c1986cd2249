"""A machine that becomes slower is no fault of a configuration: who is capped when others did the same work a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.cli.explain import trial_story
from lora_tune.config.study import Study, parse_study
from lora_tune.controller import pruning
from lora_tune.controller.policy import Stop
from lora_tune.logs.failures import Diagnosis, FailureKind
from lora_tune.logs.run import Eval, RunLog, TrainPoint
from lora_tune.review.page import trial_rows
from lora_tune.review.summary import overview
from lora_tune.search.pace import at_reference_pace, clock_text, references, seconds_at, slowdown
from lora_tune.search.recorded import attributes
from lora_tune.search.session import Session
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Attempt, StopKind, StudyRecords, Trial, TrialState, Value, Verdict
from tests.controller.test_driver import House
from tests.fakes import FakeClock, FakeCluster, Script, command_study, record

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
    assert "of trial 1 on this machine, now 8 times slower, need at most" in found.sentence
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
    assert slow.sentence == f"{limit} on a machine 8.0 times slower than at its reference pace"
    begun = RunLog(train=(TrainPoint(50.0, 1.0, 20.0),), run_start_ms=0, last_ms=20_000)
    assert pruning.by_the_machine(STUDY, known, like, begun, stop).diagnosis.kind is FailureKind.INFRASTRUCTURE
    assert pruning.by_the_machine(STUDY, known, like, paced(1.1, 3), stop) == stop, "its own length"
    assert pruning.by_the_machine(STUDY, known, running(HIDDEN=512), paced(8.0, 3), stop) == stop, "another work"
    assert pruning.by_the_machine(STUDY, known, like, RunLog(run_start_ms=0), stop) == stop, "nothing is known of it"


def test_a_limit_of_time_before_any_progress_goes_by_the_runs_before_it() -> None:
    limit = "ran into the limit of 3 min"
    stop = Stop(StopKind.TIME_LIMIT, limit, Diagnosis(FailureKind.CONFIGURATION, limit, "raise it"))
    silent, wide = RunLog(run_start_ms=0, last_ms=180_000), running(HIDDEN=512)
    busy, quiet = (swept(rates(6, lambda n, slow=slow: slow if n > 2 else 1.0)) for slow in (6.0, 1.0))
    again = pruning.by_the_machine(STUDY, busy, wide, silent, stop)
    assert again.diagnosis.kind is FailureKind.INFRASTRUCTURE
    assert "6.0 times slower" in again.sentence
    assert pruning.by_the_machine(STUDY, quiet, wide, silent, stop) == stop


def test_train_losses_tell_the_pace_before_the_first_eval() -> None:
    known, like = beside(paced(1.0, 10)), running(LR=3e-4)
    begun = RunLog(train=(TrainPoint(50.0, 1.0, 20.0),), run_start_ms=0, last_ms=20_000)
    assert slowdown(STUDY, known, like, begun) == pytest.approx(4.0)
    assert slowdown(STUDY, known, like, paced(0.5, 3)) == 1.0, "a faster machine makes nobody's limit tighter"


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
    at, first = seconds_at(np.array([samples, points[0][0]]), points)
    assert 0 < at < float("inf")
    assert first == pytest.approx(points[0][1])


Row = tuple[Mapping[str, Value], str, float, int]
"""Parameters, node, how many times slower it ran than 10 s an eval of 100 samples, and how many evals it needed."""


def swept(rows: Sequence[Row], study: Study = STUDY, *, at_pace: bool = True) -> StudyRecords:
    """A sweep of these trials, one after another, every one at its target with its last eval."""
    sweep = StudyRecords(name="x", digest="d", study_toml="", began_at=0.0)
    trials, attempts, evals = {}, {}, {}
    for n, (parameters, node, slower, count) in enumerate(rows):
        run, speed = paced(slower, count), 10 / slower
        seconds = run.evals[-1].seconds
        value = {"throughput": speed, "node_hours": seconds / 3600}.get(study.objective.score, seconds)
        trials[n] = Trial(
            number=n, seed=n, tuned=parameters, parameters=parameters, seconds=seconds, samples=100.0 * count,
            metrics=TrialMetrics(objective=value, samples_per_second=speed, stop_seconds=seconds),
            proposed_at=100.0 * n, state=TrialState.FINISHED, verdict=Verdict.REACHED, finished_at=100.0 * n + 99,
        )  # fmt: skip
        nodes = (node,) if node else ()
        attempts[n, 0] = Attempt(trial=n, number=0, job_name=f"x{n}", folder="", nodes=nodes, started_at=100.0 * n)
        evals[n, 0] = run.evals
    sweep = replace(sweep, trials=trials, attempts=attempts, evals=evals)
    return told(study, sweep) if at_pace else sweep


def told(study: Study, sweep: StudyRecords) -> StudyRecords:
    """The sweep with every value at the reference pace, as the driver writes it."""
    return replace(sweep, trials={**sweep.trials, **{t.number: t for t in at_reference_pace(study, sweep)}})


def corrected(sweep: StudyRecords) -> dict[int, float]:
    return {n: round(t.metrics.slower, 1) for n, t in sweep.trials.items() if t.metrics.slower is not None}


def luck(sd: float, seed: int = 0) -> Callable[[], float]:
    random = np.random.default_rng(seed)
    return lambda: math.exp(random.normal(0, sd))


def rates(count: int, factor: Callable[[int], float], node: Callable[[int], str] = lambda _: "") -> list[Row]:
    """Trials of equal work at different learning rates; the later ones need more evals."""
    return [({"LR": 1e-4 * (1 + n)}, node(n), factor(n), 5 + n % 4) for n in range(count)]


DRIFTS: dict[str, Callable[[int], float]] = {
    "1.2 times slower from the fourth on": lambda n: 1.2 if n > 2 else 1.0,
    "twice as slow from the fourth on": lambda n: 2.0 if n > 2 else 1.0,
    "8 times slower from the fourth on": lambda n: 8.0 if n > 2 else 1.0,
    "alternating": lambda n: 1.0 + n % 2,
    "slow at first": lambda n: 3.0 if n < 6 else 1.0,
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_a_time_is_what_it_would_be_at_the_pace_of_the_fastest(drift: str) -> None:
    factor, noise = DRIFTS[drift], luck(0.01)
    sweep = swept(rates(16, lambda n: factor(n) * noise()))
    for n, trial in sweep.trials.items():
        assert trial.objective == pytest.approx(10.0 * (5 + n % 4), rel=0.06), n
        assert trial.seconds == pytest.approx(10.0 * (5 + n % 4) * factor(n), rel=0.06), "the clock's stays"
    assert set(corrected(sweep)) == {n for n in range(16) if factor(n) > 1}


def test_a_quiet_sweep_has_the_times_of_the_clock_to_the_last_digit() -> None:
    for sd in (0.0, 0.01, 0.03, 0.1):
        noise = luck(sd)
        assert corrected(swept(rates(30, lambda n, noise=noise: noise()))) == {}, sd


def test_a_node_a_fifth_slower_is_known_by_its_median() -> None:
    """Its runs differ from the others' by little more than runs differ anyhow."""
    noise = luck(0.04)
    sweep = swept(rates(40, lambda n: noise() * (1.2 if n % 4 == 3 else 1.0), lambda n: f"n{n % 4}"))
    assert {n % 4 for n in corrected(sweep)} == {3}
    assert len(corrected(sweep)) >= 9
    assert "at the pace of n0, n1, n2: " in clock_text(STUDY, sweep.trials[3])


def test_two_kinds_of_nodes_are_compared_though_every_rank_ran_on_its_own() -> None:
    """Rank 8 is tried on both kinds, 16 on the slow and 32 on the fast one alone: the first says what nodes are."""
    ranks = [(8, "a"), (8, "b"), (16, "b"), (8, "a"), (32, "a"), (8, "b"), (16, "b"), (32, "a")]
    rows: list[Row] = [({"RANK": r}, node, (2.5 if node == "b" else 1.0) * (1 + r / 64), 6) for r, node in ranks]
    sweep = swept(rows)
    assert corrected(sweep) == {n: 2.5 for n, (_, node) in enumerate(ranks) if node == "b"}
    assert [round(t.objective / 60 - 1, 4) for t in sweep.trials.values()] == [r / 64 for r, _ in ranks]


def test_a_work_that_ran_only_while_the_machine_was_busy_is_at_the_pace_of_before() -> None:
    ranks = (8, 16, 8, 16, 8, 64, 16, 8, 64, 32, 8)
    sweep = swept([({"RANK": r}, "", 3.0 if n > 3 else 1.0, 6) for n, r in enumerate(ranks)])
    assert corrected(sweep) == dict.fromkeys(range(4, 11), 3.0), "64 twice and 32 once, with no run before"
    assert sweep.trials[9].metrics.pace_of == "trials 0, 1, 2, 3", "whose pace it is: none of those that were slow"


def test_the_reference_is_of_trials_that_were_not_slow_though_the_largest_work_was() -> None:
    ranks = (16, 8, 8, 16, *[32] * 6, 8, 8, 32)
    sweep = swept([({"RANK": r}, "", 3.0 if n > 3 else 1.0, 6) for n, r in enumerate(ranks)])
    assert corrected(sweep) == dict.fromkeys(range(4, 13), 3.0)
    assert {t.metrics.pace_of for t in sweep.trials.values()} == {None, "trials 1, 2", "trials 0, 1, 2, 3"}


@pytest.mark.parametrize("score", ["time", "throughput", "node_hours"])
def test_a_layout_keeps_its_own_pace(score: str) -> None:
    study = replaced(score)
    rows: list[Row] = [({"TP": 2 ** (n % 3)}, "", float(2 ** (n % 3)), 6) for n in range(9)]
    sweep = swept(rows, study)
    assert corrected(sweep) == {}
    slow = swept([*rows, ({"TP": 1}, "", 4.0, 6)], study)
    assert corrected(slow) == {9: 4.0}
    assert slow.trials[9].objective == pytest.approx(slow.trials[0].objective)


def replaced(score: str) -> Study:
    text = command_study(trials=5, parallel=2)
    if score == "throughput":
        text = text.replace("target = 0.0", 'score = "throughput"')
    elif score == "node_hours":
        text = text.replace("target = 0.0", 'target = 0.0\nscore = "node_hours"')
    study = parse_study(text, Path("x.toml"))
    assert study.objective.score == {"time": "time_to_target"}.get(score, score)
    return study


def test_runs_that_evaluate_more_often_are_no_slow_machine() -> None:
    """Evals take time, too: of two schedules each is a work of its own, though equal parameters cost alike."""
    often = swept([({"STEPS": 100 * (1 + n % 2)}, "", 1.0, 8) for n in range(12)], at_pace=False)
    evals = {
        (n, a): tuple(e._replace(samples=e.samples / 2) for e in each) if n % 2 else each
        for (n, a), each in often.evals.items()
    }
    assert corrected(told(STUDY, replace(often, evals=evals))) == {}


def test_runs_that_become_slower_with_their_precision_are_no_slow_machine_where_they_go_on() -> None:
    """Of equal runs some reach the target soon after the change: what comes later was at another pace."""
    sweep = swept(rates(12, lambda n: 1.0), at_pace=False)
    evals = {
        key: tuple(e._replace(seconds=e.seconds + 1.5 * max(0.0, e.seconds - 50)) for e in each)
        for key, each in sweep.evals.items()
    }
    assert corrected(told(STUDY, replace(sweep, evals=evals))) == {}


def test_a_slow_machine_is_known_though_no_two_runs_evaluate_at_the_same_steps() -> None:
    """A script that evaluates at a tenth of its steps, where the steps are tuned."""
    sweep = swept([({"STEPS": 100}, "", 2.0 if n > 6 else 1.0, 8) for n in range(14)], at_pace=False)
    evals = {
        (n, a): tuple(
            e._replace(samples=e.samples * (1 + n % 7 / 10), seconds=e.seconds * (1 + n % 7 / 10)) for e in each
        )
        for (n, a), each in sweep.evals.items()
    }
    assert corrected(told(STUDY, replace(sweep, evals=evals))) == dict.fromkeys(range(7, 14), pytest.approx(2.0))


def test_what_was_corrected_is_the_clock_again_when_the_sweep_says_otherwise() -> None:
    """A single run faster than the rest is not believed once four have run."""
    rows = rates(8, lambda n: 0.5 if n == 0 else 1.0)
    early, late = swept(rows[:2]), swept(rows[:2])
    assert corrected(early) == {1: 2.0}
    both = swept(rows, at_pace=False)
    late = told(STUDY, replace(both, trials={**both.trials, **late.trials}))
    assert corrected(late) == {0: 0.5}
    assert late.trials[1].objective == late.trials[1].seconds
    assert late.trials[1].metrics.clock_objective is None
    assert list(at_reference_pace(STUDY, replace(late, trials=late.trials))) == [], "a second time nothing is new"


def test_the_search_learns_speeds_and_times_at_the_reference_pace() -> None:
    sweep = swept(rates(8, lambda n: 8.0 if n > 2 else 1.0))
    facts = attributes(sweep.trials[5])
    assert facts["samples_per_second"] == pytest.approx(10.0)
    assert facts["stop_seconds"] == pytest.approx(sweep.trials[5].objective)


def test_a_session_is_told_what_an_ended_trial_is_worth_now() -> None:
    rows = rates(4, lambda n: 1.0)
    before, after = swept(rows[:3]), swept([*rows[:2], (*rows[2][:2], 3.0, 7)])
    session = Session(STUDY, before)
    session.tell(after.trials[2])
    again = Session(STUDY, after)
    known, made = (s._study.get_trials()[2] for s in (session, again))
    assert known.values == made.values
    assert known.user_attrs["samples_per_second"] == made.user_attrs["samples_per_second"]


def test_explain_and_status_name_the_clock_beside_the_pace() -> None:
    """Two kinds of nodes, one 2.5 times slower: a run there says nothing of its configuration."""
    sweep = swept(rates(8, lambda n: 2.5 if n % 2 else 1.0, lambda n: f"n{n % 2}"))
    words = (
        "the machine took 2.5 times as long for the same work as at the pace of n0: 2:30 min by the clock, 60.0 s "
        "at that pace"
    )
    assert dict(trial_story(STUDY, sweep, sweep.trials[1]))["machine"] == words
    assert "machine" not in dict(trial_story(STUDY, sweep, sweep.trials[0]))
    here = swept(rates(8, lambda n: 2.5 if n > 2 else 1.0))
    assert "as at the pace of trials 0, 1, 2: " in clock_text(STUDY, here.trials[4])
    assert overview(STUDY, sweep, 1000.0).machine == (
        f"trials 1, 3, 5, 7; trial 1: {words}; all of them on n1, where no other ran"
    )
    table = trial_rows(STUDY, sweep, 1000.0)
    (clock,) = (c for c in table.columns if c.head == "By the clock")
    assert [cell.sort for cell in clock.cells[:2]] == [50.0, 150.0]


def test_a_rate_of_no_effect_is_not_recommended_for_its_node() -> None:
    """Equal curves on two kinds of nodes: what is recommended is not told from the rest by where it ran."""
    noise = luck(0.01)
    rows: list[Row] = [({"LR": 1e-4 * (1 + n)}, f"n{n % 2}", noise() * (2.5 if n % 2 else 1.0), 6) for n in range(20)]
    ranked = sorted(swept(rows).trials.values(), key=lambda t: t.objective)
    assert ranked[-1].objective < 1.06 * ranked[0].objective


@pytest.mark.parametrize("drift", [*DRIFTS, "one slow node of four"])
def test_no_identical_run_is_capped_on_a_slow_machine_and_bad_ones_are(drift: str) -> None:
    """200 runs of one curve: the machine's pace may cap none of them; runs that need twice the samples are."""
    factor = DRIFTS.get(drift, lambda n: 1.5 if n % 4 == 3 else 1.0)
    node = (lambda n: f"n{n % 4}") if drift not in DRIFTS else (lambda _: "")
    noise = luck(0.01, 1)
    known = swept(rates(12, lambda n: factor(n) * noise(), node))
    capped = bad = 0
    for n in range(12, 212):
        trial = running(LR=1e-4 * n)
        attempt = Attempt(trial=9, number=0, job_name="j", folder="", nodes=(node(n),) if node(n) else ())
        now = replace(known, trials={**known.trials, 9: trial}, attempts={**known.attempts, (9, 0): attempt})
        now.carry_cache(known)
        slower = factor(n) * noise()
        capped += any(pruning.judge_curve(STUDY, now, trial, paced(slower, k)) is not None for k in (1, 4, 7))
        if n % 10 == 0:
            bad += pruning.judge_curve(STUDY, now, trial, paced(slower, 19, loss=99.0)) is not None
    assert (capped, bad) == (0, 20)


def test_a_driver_writes_times_at_one_pace_and_others_read_them(tmp_path: Path) -> None:
    """The machine is four times slower from the fourth job on: the first results are the level for all."""
    numbers = itertools.count()

    def script(environment: Mapping[str, str], start: float) -> Script:
        pace = 10.0 * (4.0 if next(numbers) > 2 else 1.0)
        yield 1.0, record(start + 1, "run_start", None)
        for k in range(1, 9):
            yield 1 + pace * k, record(start + 1 + pace * k, "eval_accuracy", 2.0 - 0.25 * k, samples_count=100 * k)
        yield 1 + pace * 8, record(start + 1 + pace * 8, "run_stop", None, status="success")

    study = command_study(trials=8, parallel=1).replace(
        'STEPS = { type = "int", low = 100, high = 400, step = 100 }', "STEPS = 100"
    )
    house = House(tmp_path, FakeCluster(FakeClock(), script), study)
    early = None
    driver = house.driver()
    while not driver.tick():
        house.cluster.clock.sleep(1.0)
        if early is None and sum(t.verdict is not None for t in driver.sweep.trials.values()) == 4:
            early = house.sweep()
    sweep = house.sweep()
    assert [t.verdict for t in sweep.trials.values()] == [Verdict.REACHED] * 8
    assert [t.objective for t in sweep.trials.values()] == pytest.approx([80.0] * 8)
    assert [t.seconds for t in sweep.trials.values()] == pytest.approx([80.0] * 3 + [320.0] * 5)
    assert early is not None
    known = {n: t.metrics.slower for n, t in house.store.load(house.study.name, early).trials.items()}
    assert known == {n: t.metrics.slower for n, t in sweep.trials.items()}, "read again from where it was, too"
