"""Optuna's own tables show what the records say, whoever died when, and keep what people wrote beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import optuna_dashboard
import pytest
from optuna.trial import FrozenTrial, TrialState

from lora_tune.base.errors import StoreError
from lora_tune.config.parameters import FloatParameter
from lora_tune.config.study import Study
from lora_tune.logs.run import Eval
from lora_tune.search import optuna_tables
from lora_tune.search.optuna_tables import OptunaTables
from lora_tune.search.recorded import recorded_trials
from lora_tune.store import Lease, Store, full_url, sqlite_url
from lora_tune.store.records import StudyRecords
from lora_tune.store.records import TrialState as OurState
from tests.builders import study_of, sweep_of

TRIALS = 12


@pytest.fixture(autouse=True)
def evals_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optuna_tables, "EVALS_SECONDS", 0.0)


@pytest.fixture
def study() -> Study:
    return study_of()


@pytest.fixture
def sweep(study: Study) -> StudyRecords:
    return sweep_of(study, trials=TRIALS, running=2)


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database, SQLite's where a test does not ask for both."""
    if getattr(request, "param", "") == "postgresql":
        return str(request.getfixturevalue("postgres_url"))
    return sqlite_url(tmp_path / "sweep.db")


BOTH = pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def driver(url: str, study: Study) -> Iterator[tuple[Store, Lease]]:
    store = Store(url)
    store.begin(study.name, study.digest, "", 0.0)
    yield store, store.take_lease(study.name, "tests", 0.0)
    store.close()


def shown(study: Study, store: Store) -> optuna.Study:
    return optuna.load_study(study_name=study.name, storage=full_url(store.url))


def of(study: optuna.Study, number: int) -> optuna.Trial:
    """A trial as a person's program holds it."""
    return optuna.Trial(study, study.trials[number]._trial_id)


def contents(trials: list[FrozenTrial]) -> list[str]:
    """All but the id, which each storage gives out itself, and the order in mappings."""
    return [
        repr((t.number, t.state, t.values, t.datetime_start, t.datetime_complete))
        + repr([sorted(m.items()) for m in (t.params, t.user_attrs, t.system_attrs, t.intermediate_values)])
        for t in trials
    ]


def at_first(sweep: StudyRecords, upto: int, *, open_: int) -> StudyRecords:
    """The sweep when it had ``upto`` trials, of which the last ``open_`` ran and had no eval yet."""
    trials = {n: t for n, t in sweep.trials.items() if n < upto}
    for number in range(upto - open_, upto):
        trials[number] = replace(
            trials[number], state=OurState.RUNNING, verdict=None, finished_at=None, sentence="", seconds=None
        )
    evals = {key: found for key, found in sweep.evals.items() if key[0] < upto - open_}
    return replace(sweep, trials=trials, evals=evals)


@BOTH
def test_they_show_the_records_whenever_a_driver_died(
    study: Study, sweep: StudyRecords, driver: tuple[Store, Lease]
) -> None:
    for upto in (2, 5, 6, 9, TRIALS):
        tables = OptunaTables(study, *driver)  # a start
        for open_ in (3, 1):
            assert tables.follow(at_first(sweep, upto, open_=min(open_, upto))) == ""
    assert tables.follow(sweep) == ""
    found = shown(study, driver[0]).get_trials()
    assert contents(found) == contents(recorded_trials(study, sweep))
    assert {t.state for t in found} >= {TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED}


def test_evals_of_trials_that_go_on_follow_later_and_with_all_that_begins_or_ends(
    study: Study, sweep: StudyRecords, driver: tuple[Store, Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optuna_tables, "EVALS_SECONDS", 1e9)
    tables = OptunaTables(study, *driver)
    assert tables.follow(replace(sweep, evals={})) == ""
    assert tables.follow(sweep) == ""
    assert shown(study, driver[0]).trials[-1].intermediate_values == {}
    assert OptunaTables(study, *driver).follow(sweep) == ""
    assert len(shown(study, driver[0]).trials[-1].intermediate_values) == len(sweep.last_evals(TRIALS - 1)) > 0


def test_a_long_sweep_fills_a_fresh_database_in_several_transactions(
    study: Study, sweep: StudyRecords, driver: tuple[Store, Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optuna_tables, "MOST", 5)
    assert OptunaTables(study, *driver).follow(sweep) == ""
    assert len(shown(study, driver[0]).get_trials()) == TRIALS


def test_what_people_wrote_in_optuna_dashboard_stays(
    study: Study, sweep: StudyRecords, driver: tuple[Store, Lease]
) -> None:
    tables = OptunaTables(study, *driver)
    assert tables.follow(at_first(sweep, 6, open_=2)) == ""
    people = shown(study, driver[0])
    optuna_dashboard.save_note(people, "the study for the paper")
    optuna_dashboard.save_note(of(people, 1), "an odd one")
    optuna_dashboard.save_note(of(people, 5), "watch this")
    people.set_user_attr("owner", "ada")
    of(people, 5).set_user_attr("tag", "mine")
    assert tables.follow(at_first(sweep, 9, open_=4)) == ""
    assert OptunaTables(study, *driver).follow(sweep) == ""
    after = shown(study, driver[0])
    assert [optuna_dashboard.get_note(x) for x in (after, of(after, 1), of(after, 5))] == [
        "the study for the paper",
        "an odd one",
        "watch this",
    ]
    assert after.user_attrs == {"owner": "ada"}
    assert after.trials[5].user_attrs["tag"] == "mine"


@BOTH
@pytest.mark.parametrize("upto", [4, TRIALS])
def test_what_an_earlier_release_left_there_is_overruled_by_the_records(
    study: Study, sweep: StudyRecords, driver: tuple[Store, Lease], upto: int
) -> None:
    """It had its own study there: a proposal that nobody wrote down, and a point that waited."""
    old = optuna.create_study(study_name=study.name, storage=full_url(driver[0].url))
    old.add_trials(recorded_trials(study, sweep if upto == TRIALS else at_first(sweep, upto, open_=0)))
    old.ask(study.search_space.distributions())
    old.enqueue_trial({"LR": 4e-4})
    assert OptunaTables(study, *driver).follow(sweep) == ""
    found = shown(study, driver[0]).get_trials()
    assert [(t.number, t.params) for t in found] == [(n, dict(t.tuned)) for n, t in sweep.trials.items()]
    assert [t.state for t in found] == [t.state for t in recorded_trials(study, sweep)]
    assert upto < TRIALS or contents(found) == contents(recorded_trials(study, sweep))


def test_a_number_without_a_record_is_a_failed_trial_until_one_comes(
    study: Study, sweep: StudyRecords, driver: tuple[Store, Lease]
) -> None:
    holed = replace(sweep, trials={n: t for n, t in sweep.trials.items() if n != 3})
    tables = OptunaTables(study, *driver)
    assert tables.follow(holed) == ""
    found = shown(study, driver[0]).get_trials()
    assert len(found) == TRIALS
    assert (found[3].state, found[3].params) == (TrialState.FAIL, {})
    assert tables.follow(sweep) == ""
    assert contents(shown(study, driver[0]).get_trials()) == contents(recorded_trials(study, sweep))


def test_what_goes_wrong_is_said_and_made_up_for_later(
    study: Study, sweep: StudyRecords, driver: tuple[Store, Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = OptunaTables(study, *driver)
    assert tables.follow(at_first(sweep, 4, open_=1)) == ""

    def away(*_: object) -> None:
        raise StoreError("the database does not answer")

    with monkeypatch.context() as without:
        without.setattr(Store, "_fenced", away)
        said = tables.follow(sweep)
    assert said == "Optuna's tables could not be brought up to date: the database does not answer"
    assert tables.follow(sweep) == ""
    assert contents(shown(study, driver[0]).get_trials()) == contents(recorded_trials(study, sweep))


def test_an_error_of_another_program_is_said_with_its_kind(
    study: Study, sweep: StudyRecords, driver: tuple[Store, Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(optuna_tables, "TrialTables", broken)
    said = OptunaTables(study, *driver).follow(sweep)
    assert said == "Optuna's tables could not be brought up to date: KeyError: 'x'"


@BOTH
def test_evals_of_an_attempt_that_was_requeued_go_with_it(
    study: Study, sweep: StudyRecords, driver: tuple[Store, Lease]
) -> None:
    number = TRIALS - 1
    first, second = sweep.attempts[number, 0], replace(sweep.attempts[number, 0], number=1)
    again = replace(
        sweep,
        attempts={**sweep.attempts, (number, 0): first, (number, 1): second},
        evals={**sweep.evals, (number, 1): (Eval(7.0, 2.0, 1.0),)},
    )
    tables = OptunaTables(study, *driver)
    assert tables.follow(sweep) == ""
    assert len(shown(study, driver[0]).trials[number].intermediate_values) > 1
    for start in (tables, OptunaTables(study, *driver)):
        assert start.follow(again) == ""
        assert shown(study, driver[0]).trials[number].intermediate_values == {7: 2.0}


def test_trials_stay_complete_when_the_study_tunes_more(
    study: Study, sweep: StudyRecords, driver: tuple[Store, Lease], tmp_path: Path
) -> None:
    """In the tables that were there, and in those of a fresh database."""
    assert OptunaTables(study, *driver).follow(sweep) == ""
    before = [(t.state, t.values, t.params) for t in shown(study, driver[0]).trials]
    wider = study.model_copy(update={"space": {**study.space, "MORE": FloatParameter(type="float", low=0.0, high=1.0)}})
    assert wider.search_space.distributions().keys() > study.search_space.distributions().keys()
    assert OptunaTables(wider, *driver).follow(sweep) == ""
    assert [(t.state, t.values, t.params) for t in shown(study, driver[0]).trials] == before
    fresh = Store(sqlite_url(tmp_path / "fresh.db"))
    fresh.begin(study.name, study.digest, "", 0.0)
    assert OptunaTables(wider, fresh, fresh.take_lease(study.name, "tests", 0.0)).follow(sweep) == ""
    assert [(t.state, t.values, t.params) for t in shown(study, fresh).trials] == before
    fresh.close()


@BOTH
def test_the_studys_direction_is_that_of_the_records(
    study: Study, sweep: StudyRecords, driver: tuple[Store, Lease]
) -> None:
    optuna.create_study(study_name=study.name, storage=full_url(driver[0].url), directions=["maximize", "maximize"])
    assert OptunaTables(study, *driver).follow(sweep) == ""
    assert [direction.name for direction in shown(study, driver[0]).directions] == ["MINIMIZE"]


def test_a_driver_that_was_overtaken_writes_nothing(
    study: Study, sweep: StudyRecords, driver: tuple[Store, Lease]
) -> None:
    store, lease = driver
    overtaken = OptunaTables(study, store, lease)
    assert overtaken.follow(at_first(sweep, 2, open_=1)) == ""
    later = OptunaTables(study, store, store.take_lease(study.name, "another", 1.0, dead=True))
    assert later.follow(sweep) == ""
    assert "taken over by another driver" in overtaken.follow(at_first(sweep, 9, open_=4))
    assert contents(shown(study, store).get_trials()) == contents(recorded_trials(study, sweep))


@BOTH
def test_a_study_that_somebody_deletes_is_made_again(
    study: Study, sweep: StudyRecords, driver: tuple[Store, Lease]
) -> None:
    tables = OptunaTables(study, *driver)
    assert tables.follow(sweep_of(study, trials=TRIALS - 3, running=2)) == ""
    optuna.delete_study(study_name=study.name, storage=full_url(driver[0].url))
    optuna.create_study(study_name="of somebody else", storage=full_url(driver[0].url))  # SQLite gives it the same id
    assert tables.follow(sweep) == ""
    assert contents(shown(study, driver[0]).get_trials()) == contents(recorded_trials(study, sweep))
    assert optuna.load_study(study_name="of somebody else", storage=full_url(driver[0].url)).trials == []


@pytest.mark.parametrize("waiting", [False, True])
def test_trials_that_have_ended_have_the_values_of_a_new_objective(
    study: Study, sweep: StudyRecords, driver: tuple[Store, Lease], waiting: bool
) -> None:
    """And a point that waited there is taken out."""
    assert OptunaTables(study, *driver).follow(sweep) == ""
    if waiting:
        shown(study, driver[0]).enqueue_trial({})
    two = study.model_copy(update={"objective": study.objective.model_copy(update={"second": "node_hours"})})
    assert OptunaTables(two, *driver).follow(sweep) == ""
    assert contents(shown(two, driver[0]).get_trials()) == contents(recorded_trials(two, sweep))
