"""A sweep that an earlier release began and that was interrupted goes on: nothing is lost, and nothing runs twice.

That release kept Optuna's tables as a second truth: proposals and points that waited stood there alone. Its records
name neither requests nor points.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa

from lora_tune.search.recorded import space_of, trial_at
from lora_tune.store import Changes
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.port import Request
from lora_tune.store.records import Attempt, Trial, TrialState, Verdict
from lora_tune.store.requests import Requests
from tests.controller.test_driver import House
from tests.controller.test_steering import ask, driver
from tests.fakes import FakeClock, FakeCluster, command_study

SPACE = """OPT = { type = "categorical", choices = ["adam", "sgd"] }
BETA2 = { type = "float", low = 0.9, high = 0.999, when = { OPT = "adam" } }
GBS = 8"""
POINTS = """enqueue = [{ LR = 2e-3, STEPS = 100 }, { LR = 3e-3, BETA2 = 0.95 }, { LR = 4e-3 }]"""


@pytest.fixture
def home(tmp_path: Path) -> House:
    """Two trials have ended, the second without the value that its point names; a third was proposed, not written down.

    The last point waited, and two requests of one person, of which an earlier trial had answered a third one.
    """
    study = command_study(trials=9, parallel=2).replace("GBS = 8", SPACE).replace("[budget]", f"{POINTS}\n[budget]")
    there = House(tmp_path, FakeCluster(FakeClock()), study)
    now = there.clock.now()
    tuned = [{"LR": 2e-3, "STEPS": 100, "OPT": "adam", "BETA2": 0.97}, {"LR": 3e-3, "STEPS": 200, "OPT": "sgd"}]
    tuned.append({"LR": 7e-3, "STEPS": 300, "OPT": "sgd"})
    whys = ["", "", "asked for by ada@login1: try LR=0.007"]
    trials, attempts = [], []
    for number, (values, why) in enumerate(zip(tuned, whys, strict=True)):
        trial = Trial(
            number=number, seed=1, tuned=values, parameters=values, why=why, state=TrialState.RUNNING,
            metrics=TrialMetrics(objective=10.0), proposed_at=now + 10 + number,
        )  # fmt: skip
        trials.append(trial.finished(Verdict.REACHED, "", now + 20))
        attempt = Attempt(trial=number, number=0, job_name=f"fake-{number}", folder="f", started_at=now, ended_at=now)
        attempts.append(attempt)
    for request in (0.007, 0.007, 0.008):
        ask(there, "enqueue", values={"LR": request}, clone_of=None)
        there.clock.sleep(100)
    lease = there.store.take_lease(there.study.name, "earlier", there.clock.now())
    there.store.save(lease, Changes(trials=tuple(trials), attempts=tuple(attempts)), there.clock.now())
    desk = Requests(there.store, there.study.name, lease)
    for request in desk.all():
        desk.answer(request, "the next free slot runs it", request.asked_at + 1, accepted=True)
    there.store.release(lease)
    as_the_earlier_release_wrote_them(there)
    in_optunas_tables(there, trials)
    return there


def as_the_earlier_release_wrote_them(home: House) -> None:
    with home.store._engine.begin() as connection:
        for number, text in connection.execute(sa.text("SELECT number, record FROM lora_tune_trial")).all():
            record = json.loads(text)
            for name in ("request", "point", "sampler_attributes"):
                del record[name]
            changed = {"record": json.dumps({**record, "told": True}), "number": number}
            connection.execute(sa.text("UPDATE lora_tune_trial SET record = :record WHERE number = :number"), changed)


def in_optunas_tables(home: House, trials: list[Trial]) -> None:
    kept, space = optuna.create_study(study_name=home.study.name, storage=home.store.url), space_of(home.study)
    for trial in trials:
        sweep = replace(home.sweep(), trials={trial.number: trial})
        kept.add_trial(trial_at(home.study, sweep, trial.number, space))
    kept.ask(home.study.search_space.distributions())
    kept.enqueue_trial({"LR": 4e-3})
    for request in (1, 2):
        kept.enqueue_trial({"LR": 0.007}, user_attrs={"request": request, "why": "asked for by ada@login1"})


def test_it_goes_on_to_its_end_with_every_point_and_request_once(home: House) -> None:
    before = {n: t.tuned for n, t in home.sweep().trials.items()}
    driver(home).run()
    trials = home.sweep().trials
    assert {n: trials[n].tuned for n in before} == before
    rates = Counter(trial.tuned["LR"] for trial in trials.values())
    assert [rates[rate] for rate in (2e-3, 3e-3, 4e-3, 0.008)] == [1, 1, 1, 1]
    assert rates[0.007] == 2, "asked for twice, the second time after the first was run"
    assert [t.request for t in trials.values()].count(None) == len(trials) - 2
    assert len(trials) == 9
    assert {int(name.split("-")[1]) for name in home.cluster.starts} == {3, 4, 5, 6, 7, 8}, "what had run rests"
    assert set(home.cluster.starts.values()) == {1}


def test_optunas_tables_are_what_the_records_are(home: House) -> None:
    driver(home).run()
    shown = optuna.load_study(study_name=home.study.name, storage=home.store.url).trials
    records = home.sweep().trials
    assert [t.number for t in shown] == [*records]
    assert all(t.state.is_finished() for t in shown)
    conditions = home.study.search_space.conditions
    assert [conditions.present(t.params) for t in shown] == [dict(t.tuned) for t in records.values()]
    assert [t.user_attrs.get("request") for t in shown] == [t.request for t in records.values()]


def test_a_request_is_kept_as_it_was(home: House) -> None:
    before = Requests(home.store, home.study.name).all()
    driver(home).run()
    after: list[Request] = Requests(home.store, home.study.name).all()
    assert after == before
