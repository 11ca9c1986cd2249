"""The last trial of a sweep's budget is what it hands over, where no trial has run that as a whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_tune.config.study import Study, parse_study
from lora_tune.controller.last_run import MOST, WHY, LastRun, last
from lora_tune.logs.run import Eval
from lora_tune.search.session import SearchPoint
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState, Verdict

STUDY = """
[workload]
kind = "surface"
surface = "h100_time"
[site]
launcher = "simulated"
gpus_per_node = 8
[space]
LR = { type = "float", low = 1e-5, high = 1e-2, log = true }
MAX_STEPS = { type = "int", low = 400, high = 1200 }
layout = { type = "layout", tp = [2, 4], cp = [1, 2], gbs = [8] }
[objective]
target = 0.925
[search]
sampler = "grey_box"
[budget]
BUDGET
parallel = 2
"""
FAST, SLOW = "tp2 pp1 cp2 minibs4 mbs1", "tp4 pp1 cp2 minibs8 mbs1"


NARROW = {"low = 1e-5, high = 1e-2": "low = 3.9e-4, high = 4.1e-4", "low = 400, high = 1200": "low = 800, high = 805"}
"""Ranges in which all that is in them is as good as 4e-4 and 800 steps."""


def study_of(budget: str = "trials = 4", sampler: str = "grey_box", *, narrow: bool = False) -> Study:
    text = STUDY.replace("BUDGET", budget).replace('"grey_box"', f'"{sampler}"')
    for wide, less in NARROW.items() if narrow else ():
        text = text.replace(wide, less)
    return parse_study(text, Path("last.toml"))


class Proposer:
    """A search that proposes nothing of its own but says so, and what it is given."""

    def __init__(self, answer: SearchPoint | str = "its own", *, points: bool = False) -> None:
        self.answer, self.points = answer, points

    def points_wait(self) -> bool:
        return self.points

    def ask(self) -> SearchPoint | str:
        return self.answer

    def propose(self, tuned, why) -> SearchPoint:
        return SearchPoint(99, tuned, why)


def ended(study: Study, number: int, rate: float, layout: str, speed: float, samples: float) -> Trial:
    tuned = {"LR": rate, "MAX_STEPS": 800, "layout": layout}
    seconds = samples / speed + 100
    metrics = TrialMetrics(
        objective=seconds, samples_per_second=speed, seconds_per_eval=20.0, stop_samples=samples,
        stop_seconds=seconds, crossing_samples=samples,
    )  # fmt: skip
    return Trial(
        number=number, seed=number, tuned=tuned, parameters=study.search_space.resolve(tuned), seconds=seconds,
        samples=samples, metrics=metrics, state=TrialState.FINISHED, verdict=Verdict.REACHED, finished_at=3600.0,
    )  # fmt: skip


def apart(study: Study) -> list[Trial]:
    """The fast layout ran at a poor rate only, and the good rate on the slow layout."""
    return [
        ended(study, 0, 4e-5, FAST, 2.6, 6000),
        ended(study, 1, 4e-4, SLOW, 1.3, 3000),
        ended(study, 2, 4.3e-4, SLOW, 1.3, 3000),
    ]


def sweep_of(trials: list[Trial], hours: float = 1.0) -> StudyRecords:
    attempts = {
        (t.number, 0): Attempt(
            trial=t.number, number=0, job_name="", folder="", started_at=0.0, ended_at=3600 * hours
        )
        for t in trials
    }  # fmt: skip
    evals = {
        (t.number, 0): tuple(Eval(s, 0.925 + 2e-5 * (t.samples - s), 0.0) for s in range(384, int(t.samples) + 1, 384))
        for t in trials
        if t.samples
    }
    return StudyRecords(
        name="last", digest="", study_toml="", began_at=0.0, trials={t.number: t for t in trials},
        attempts=attempts, evals=evals,
    )  # fmt: skip


def asked(study: Study, trials: list[Trial], search: Proposer | None = None) -> SearchPoint | str:
    sweep = sweep_of(trials)
    return LastRun(search or Proposer(), lambda: study, lambda: sweep, lambda: 3600.0).ask()  # type: ignore[arg-type]


def test_a_point_that_somebody_asked_for_goes_before_it() -> None:
    study = study_of()
    point = SearchPoint(3, {"LR": 5e-4, "MAX_STEPS": 600, "layout": SLOW})
    assert asked(study, apart(study), Proposer(point, points=True)) is point


def test_the_last_trial_runs_what_is_believed_best_as_a_whole() -> None:
    study = study_of()
    found = asked(study, apart(study))
    assert isinstance(found, SearchPoint)
    assert (found.why, found.tuned["layout"]) == (WHY, FAST)
    assert 2e-4 < float(str(found.tuned["LR"])) < 8e-4


def test_it_waits_for_those_that_run_since_they_may_change_what_is_believed() -> None:
    study = study_of()
    running = replace(apart(study)[2], state=TrialState.RUNNING, verdict=None, metrics=TrialMetrics(), seconds=None)
    found = asked(study, [*apart(study)[:2], running])
    assert isinstance(found, str)
    assert "waits for the 1 that run" in found


def test_where_it_was_run_the_search_goes_on_by_itself() -> None:
    study = study_of("trials = 3", narrow=True)
    again = [ended(study, 0, 4e-4, FAST, 2.6, 3000), ended(study, 1, 4e-4, FAST, 2.6, 3010)]
    assert asked(study, again) == "its own"


def test_before_the_last_the_search_proposes() -> None:
    study = study_of("trials = 10")
    own = SearchPoint(3, {"LR": 1.0})
    assert asked(study, apart(study), Proposer(own)) == own


def test_a_sweep_that_is_no_longer_worth_its_cost_runs_it_before_it_ends_and_not_for_ever() -> None:
    study = study_of("trials = 40")
    found = asked(study, apart(study), Proposer("not worth it"))
    assert isinstance(found, SearchPoint)
    tried = [replace(t, why=WHY) for t in apart(study)[:MOST]]
    assert asked(study, [*tried, *apart(study)[MOST:]], Proposer("not worth it")) == "not worth it"


def test_a_budget_that_a_person_changes_decides_which_trial_is_the_last() -> None:
    study = study_of("trials = 4")
    own, sweep, now = SearchPoint(3, {"LR": 1.0}), sweep_of(apart(study)), [study]
    search = LastRun(Proposer(own), lambda: now[0], lambda: sweep, lambda: 3600.0)  # type: ignore[arg-type]
    now[0] = study.with_options({"budget": {"trials": 10}})
    assert search.ask() == own
    now[0] = study
    found = search.ask()
    assert isinstance(found, SearchPoint)
    assert found.why == WHY


def test_a_sampler_that_recommends_only_what_ran_never_waits() -> None:
    study = study_of(sampler="tpe")
    assert asked(study, apart(study)) == "its own"


@pytest.mark.parametrize(
    ("budget", "hours", "expected"),
    [
        ("trials = 4", 1.0, True),
        ("trials = 5", 1.0, False),
        ("trials = 2", 1.0, False),  # all begin at once: there is nothing to believe in
        ("node_hours = 4", 1.0, True),
        ("node_hours = 5", 1.0, False),
        ("wall_hours = 2.5", 1.0, True),
        ("wall_hours = 30", 1.0, False),
    ],
)
def test_which_trial_is_the_last(budget: str, hours: float, expected: bool) -> None:
    study = study_of(budget)
    assert last(study, sweep_of(apart(study), hours), 3600.0) is expected
