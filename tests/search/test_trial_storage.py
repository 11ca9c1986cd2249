"""The study in memory and in Optuna's tables is the same study, whatever was done to it."""

from __future__ import annotations

import math
import uuid
from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from lora_tune.search.trial_storage import TrialStorage
from lora_tune.store import tune_sqlite

SPACE: dict[str, BaseDistribution] = {
    "LR": FloatDistribution(1e-5, 1e-3, log=True),
    "MAX_STEPS": IntDistribution(100, 900),
    "layout": CategoricalDistribution(["tp1", "tp4", "$(x) 'é\n"]),
}


def opened(url: str) -> tuple[TrialStorage, optuna.Study]:
    storage = TrialStorage(url, "s", tune_sqlite)
    return storage, optuna.create_study(study_name="s", storage=storage, load_if_exists=True)


def same(one: list[FrozenTrial], other: list[FrozenTrial]) -> bool:
    """Equal but for the id, which each storage gives out itself; NaN equals NaN."""
    return [content(t) for t in one] == [content(t) for t in other]


def content(trial: FrozenTrial) -> list[str]:
    tables = (trial.params, trial.distributions, trial.user_attrs, trial._system_attrs, trial.intermediate_values)
    head = (trial.number, trial.state, trial.values, trial.datetime_start, trial.datetime_complete)
    return [repr(head), *(repr(sorted(table.items())) for table in tables)]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask")),
        st.tuples(st.just("report"), st.integers(0, 5), st.integers(0, 4), st.floats()),
        st.tuples(st.just("attribute"), st.integers(0, 5), st.sampled_from("ab"), st.text() | st.floats(0, 1)),
        st.tuples(st.just("constraint"), st.integers(0, 5)),
        st.tuples(st.just("tell"), st.integers(0, 5), st.floats(allow_nan=False) | st.none()),
        st.tuples(st.just("flush")),
    ),
    max_size=25,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_optuna_and_a_second_start_read_what_was_done(tmp_path: Path, steps: list[tuple[object, ...]]) -> None:
    url = f"sqlite:///{tmp_path / uuid.uuid4().hex}.db"
    storage, study = opened(url)
    study.enqueue_trial({"LR": 1e-4})
    for what, *details in steps:
        do(storage, study, str(what), details)
    storage.flush()
    here = study.get_trials(deepcopy=False)
    assert same(RDBStorage(url).get_all_trials(1), here)
    assert same(opened(url)[1].get_trials(), here)


def do(storage: TrialStorage, study: optuna.Study, what: str, details: list[object]) -> None:
    if what == "ask":
        study.ask(SPACE)
    elif what == "flush":
        storage.flush()
    else:
        number, *rest = details
        running = [t for t in study.get_trials(deepcopy=False) if t.state is TrialState.RUNNING and t.number == number]
        if not running:
            return
        trial = optuna.Trial(study, running[0]._trial_id)
        if what == "report":
            trial.report(rest[1], rest[0])  # type: ignore[arg-type]
        elif what == "attribute":
            trial.set_user_attr(str(rest[0]), rest[1])
        elif what == "constraint":
            trial.set_constraint("feasible", 1.0)
        else:
            value = rest[0]
            study.tell(trial, value, state=None if value is not None else TrialState.PRUNED)  # type: ignore[arg-type]


def test_what_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"
    storage, study = opened(url)
    trial = study.ask(SPACE)

    def away() -> None:
        raise SQLAlchemyError("the database does not answer")

    with monkeypatch.context() as without:
        without.setattr(storage._rdb.engine, "begin", away)
        with pytest.raises(SQLAlchemyError):
            storage.flush()
        trial.report(math.nan, 8)
    storage.flush()
    assert same(RDBStorage(url).get_all_trials(1), study.get_trials())


def test_two_studies_of_one_database_keep_apart(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"
    both = [TrialStorage(url, name, tune_sqlite) for name in "ab"]
    studies = [optuna.create_study(study_name=n, storage=s) for n, s in zip("ab", both, strict=True)]
    for round_ in range(3):
        for study, storage in zip(studies, both, strict=True):
            study.ask(SPACE).report(round_, round_)
            storage.flush()
    for name, study in zip("ab", studies, strict=True):
        again = TrialStorage(url, name, tune_sqlite)
        assert same(again.get_all_trials(again.get_study_id_from_name(name)), study.get_trials())


def test_a_database_that_lost_a_trial_is_opened_and_its_number_is_not_given_out_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'gap.db'}"
    storage, study = opened(url)
    for _ in range(3):
        study.ask(SPACE)
    storage.flush()
    with storage._rdb.engine.begin() as connection:
        connection.execute(sa.text("delete from trials where number = 1"))
    again, study = opened(url)
    assert [trial.state for trial in study.trials] == [TrialState.RUNNING, TrialState.FAIL, TrialState.RUNNING]
    assert study.ask(SPACE).number == 3
    again.flush()
    assert [trial.number for trial in optuna.load_study(study_name="s", storage=url).trials] == [0, 1, 2, 3]
