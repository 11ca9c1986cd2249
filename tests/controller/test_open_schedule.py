"""The open division's eval schedule: chosen by what an eval costs and what a late one loses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from click.testing import CliRunner

from lora_tune import curves
from lora_tune.config.study import Study, parse_study
from lora_tune.controller import eval_schedule
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict
from lora_tune.sweep import main
from tests.recorded import recorded

STUDIES = Path(__file__).resolve().parents[2] / "studies"
SIMULATED = (STUDIES / "simulated_h100.toml").read_text()
OPEN = SIMULATED.replace('division = "closed"', 'division = "open"').replace('score = "mlperf_score"', "")
PARAMETERS = {"GBS": 8, "MAX_STEPS": 800, "TP": 4, "MINIBS": 4}


def study_of(text: str = OPEN) -> Study:
    return parse_study(text, Path("schedule.toml"))


def sweep_of(*crossings: float, seconds_per_eval: float = 34.5) -> StudyRecords:
    metrics = TrialMetrics(samples_per_second=2.18, seconds_per_eval=seconds_per_eval)
    trials = {
        i: Trial(
            number=i, seed=i, tuned={}, parameters=PARAMETERS, state=TrialState.FINISHED, verdict=Verdict.REACHED,
            metrics=replace(metrics, crossing_samples=samples),
        )
        for i, samples in enumerate(crossings)
    }  # fmt: skip
    return StudyRecords(name="schedule", digest="", study_toml="", began_at=0.0, trials=trials)


CROSSINGS = (2800.0, 2900.0, 3000.0, 3100.0, 3250.0)


def test_once_trials_have_shown_where_they_cross_evals_begin_shortly_before_it() -> None:
    values, why = eval_schedule.chosen(study_of(), sweep_of(*CROSSINGS), PARAMETERS)
    every = int(values["VAL_CHECK_INTERVAL"])
    first = (int(values["SKIP_EVALS"]) + 1) * every
    assert every % 8 == 0
    assert 1536 < first < 3000
    assert "s less than now" in why


def test_dear_evals_are_made_less_often_than_cheap_ones() -> None:
    every = [
        eval_schedule.chosen(study_of(), sweep_of(*CROSSINGS, seconds_per_eval=s), PARAMETERS)[0]["VAL_CHECK_INTERVAL"]
        for s in (1.0, 30.0, 200.0)
    ]
    assert every == sorted(every)
    assert every[0] < every[2]


@pytest.mark.parametrize(
    "text",
    [
        SIMULATED,
        OPEN.replace("[space]", "[space]\nVAL_CHECK_INTERVAL = 192"),
        OPEN.replace('surface = "h100"', 'surface = "h100"\neval_every = 192'),
    ],
    ids=["closed", "fixed in the space", "given in the workload"],
)
def test_the_schedule_stays_where_a_rule_or_the_study_says_it(text: str) -> None:
    assert eval_schedule.chosen(study_of(text), sweep_of(*CROSSINGS), PARAMETERS) == ({}, "")


def test_the_schedule_stays_while_too_little_is_known_of_this_batch_size() -> None:
    assert eval_schedule.chosen(study_of(), sweep_of(*CROSSINGS[:3]), PARAMETERS) == ({}, "")
    assert eval_schedule.chosen(study_of(), sweep_of(*CROSSINGS), {**PARAMETERS, "GBS": 16}) == ({}, "")


def test_a_training_that_ends_early_is_evaluated_as_before() -> None:
    assert eval_schedule.chosen(study_of(), sweep_of(*CROSSINGS), {**PARAMETERS, "MAX_STEPS": 300}) == ({}, "")


def test_trials_of_the_same_layout_say_what_an_eval_costs() -> None:
    sweep = sweep_of(*CROSSINGS)
    other = {**PARAMETERS, "TP": 8}
    slow = {
        n + 10: replace(t, number=n + 10, parameters=other, metrics=replace(t.metrics, seconds_per_eval=300.0))
        for n, t in sweep.trials.items()
    }
    both = replace(sweep, trials={**sweep.trials, **slow})
    quick, dear = (eval_schedule.chosen(study_of(), both, p)[0]["VAL_CHECK_INTERVAL"] for p in (PARAMETERS, other))
    assert quick < dear


def test_a_first_eval_that_is_a_multiple_of_the_interval_can_be_asked_for() -> None:
    crossing = curves.Crossing(
        samples=3000.0, low=2700.0, high=3300.0, stop_samples=None, stop_seconds=None, censored=True, method=""
    )
    now = curves.Schedule(1536, 384)
    plan = curves.choose_schedule(crossing, curves.Timing(2.2, 34.5), step=8, current=now, whole=True)
    assert plan.schedule.first_samples % plan.schedule.interval_samples == 0
    assert plan.saved_seconds > 0


def test_a_simulated_open_sweep_chooses_its_schedule_and_says_so(tmp_path: Path) -> None:
    text = OPEN.replace('sampler = "grey_box"', 'sampler = "random"').replace("gbs = [8, 16, 32]", "gbs = [8]")
    text = text.replace("low = 1e-5, high = 1e-2", "low = 3e-4, high = 6e-4").replace(
        "low = 100, high = 2500", "low = 600, high = 1000"
    )
    file = tmp_path / "opened.toml"
    file.write_text(text)
    options = ["--study", str(file), "--output", str(tmp_path / "sweep"), "--trials", "40", "--quiet"]
    done = CliRunner().invoke(main, options)
    assert done.exit_code == 0, done.output
    sweep = recorded(tmp_path / "sweep" / "sweep.db", "opened")
    later = [t for t in sweep.trials.values() if "VAL_CHECK_INTERVAL" in t.parameters]
    assert later
    assert all("first eval at" in t.why for t in later)
    evals = {t.number: len(sweep.last_evals(t.number)) for t in sweep.trials.values() if t.verdict is Verdict.REACHED}
    before = [n for number, n in evals.items() if sweep.trials[number] not in later]
    after = [evals[t.number] for t in later if t.number in evals]
    assert after
    for trial in later:
        seen = sweep.last_evals(trial.number)
        if seen:
            first = (int(trial.parameters["SKIP_EVALS"]) + 1) * int(trial.parameters["VAL_CHECK_INTERVAL"])
            assert seen[0].samples == first
    assert fmean(after) < fmean(before)
