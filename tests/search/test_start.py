"""A configuration that is there before the sweep is its first trial, whether or not the space holds it."""

from __future__ import annotations

from pathlib import Path

from lora_tune.config.study import Study, parse_study
from lora_tune.search.recorded import in_memory
from lora_tune.search.session import Session
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, Verdict
from lora_tune.workloads.base import Start
from tests.fakes import command_study

INSIDE = Start(name="config_x.sh", parameters={"LR": 2e-3, "STEPS": 100, "EXTRA": 1}, tuned={"LR": 2e-3, "STEPS": 100})
OUTSIDE = Start(name="config_x.sh", parameters={"LR": 9.0}, outside="LR=9 is not in 0.0001 to 0.01")


def study() -> Study:
    return parse_study(command_study(trials=5), Path("x.toml"))


def test_it_is_proposed_first_with_its_own_values() -> None:
    session = Session(study(), start=INSIDE)
    first, second = session.ask(), session.ask()
    assert not isinstance(first, str)
    assert not isinstance(second, str)
    assert (first.number, first.tuned, first.parameters, first.base) == (
        0,
        INSIDE.tuned,
        INSIDE.parameters,
        "config_x.sh",
    )
    assert first.why == "config_x.sh as it stands: what all others are compared with"
    assert (second.base, second.parameters) == ("", None)


def test_one_that_the_space_does_not_hold_is_measured_and_teaches_the_search_nothing() -> None:
    session = Session(study(), start=OUTSIDE)
    first = session.ask()
    assert not isinstance(first, str)
    assert (first.tuned, first.parameters) == ({}, OUTSIDE.parameters)
    assert "not a point of the study's space (LR=9 is not in" in first.why
    metrics = TrialMetrics(base="config_x.sh", objective=10.0)
    record = Trial(
        number=0,
        seed=1,
        tuned={},
        parameters=OUTSIDE.parameters,
        verdict=Verdict.REACHED,
        metrics=metrics,
        finished_at=1.0,
    )
    session.tell(record)
    second = session.ask()
    assert not isinstance(second, str)
    assert second.number == 1
    assert session._study.best_trials == []
    records = StudyRecords(name="x", digest="", study_toml="", began_at=0.0, trials={0: record})
    assert in_memory(study(), records).best_trials == []


def test_a_sweep_that_went_on_without_one_gets_none() -> None:
    records = StudyRecords(
        name="x", digest="", study_toml="", began_at=0.0, trials={0: Trial(number=0, seed=1, tuned={}, parameters={})}
    )
    asked = Session(study(), records, start=INSIDE).ask()
    assert not isinstance(asked, str)
    assert asked.base == ""
