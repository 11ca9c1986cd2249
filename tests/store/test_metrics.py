"""A trial's metrics as plain data and back: one form for the database, for Optuna and for tables."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.errors import StoreError
from lora_tune.store.metrics import Confirmed, ConfirmedChoice, RunMetrics, TrialMetrics, as_mapping, from_mapping
from lora_tune.store.records import Trial, to_json, trial_from

numbers = st.none() | st.floats(allow_nan=False)
measured = st.builds(
    TrialMetrics,
    objective=numbers, seed=st.none() | st.integers(), crossing_method=st.none() | st.text(),
    audited=st.none() | st.text(),
    others=st.dictionaries(st.text().map("of a later release {}".format), st.booleans() | st.text()),
)  # fmt: skip
runs = st.builds(
    RunMetrics,
    seed=st.integers(), position=st.integers(0, 9), seconds=numbers, metrics=st.builds(TrialMetrics, last_loss=numbers),
)  # fmt: skip
races = st.builds(
    Confirmed,
    choice=st.sampled_from(ConfirmedChoice), runs=st.integers(), missed=st.integers(),
    node_hours=st.floats(allow_nan=False),
    sentence=st.text(), seconds=numbers, low=numbers, high=numbers,
    each=st.lists(st.floats(allow_nan=False)).map(tuple), score=st.none() | st.text(),
)  # fmt: skip


@given(plain=measured, several=st.lists(runs, max_size=2), race=st.none() | races)
def test_all_that_is_known_comes_back_from_the_database(
    plain: TrialMetrics, several: list[RunMetrics], race: Confirmed | None
) -> None:
    metrics = plain | TrialMetrics(runs=tuple(several), confirmed=race)
    assert from_mapping(json.loads(json.dumps(as_mapping(metrics)))) == metrics
    trial = Trial(number=3, seed=7, tuned={"LR": 4e-4}, parameters={"TP": 2}, metrics=metrics)
    assert trial_from(to_json(trial)) == trial


OLD = {
    "number": 0, "seed": 7, "tuned": {}, "parameters": {}, "why": "", "state": "finished", "verdict": "reached",
    "sentence": "", "seconds": 90.0, "samples": 3072.0, "proposed_at": 0.0, "finished_at": 1.0, "told": True,
    "facts": {
        "objective": 90.0, "evals": 8, "seed": 3, "crossing_method": "fit", "loss_of_a_later_release": [1],
        "runs": [
            {"objective": 90.0, "seconds": 90.0, "samples": 3072.0, "seed": 7, "position": 0},
            {"seconds": None, "samples": None, "seed": 8, "position": 1},
        ],
        "confirmed": "chosen", "confirmed_runs": 10, "confirmed_missed": 0, "confirmed_seconds": 91.5,
        "confirmed_low": 90.0, "confirmed_high": 93.0, "confirmed_each": [90.0, 93.0], "confirmed_node_hours": 2.5,
        "confirmed_sentence": "trial 0 is the fastest",
    },
}  # fmt: skip
"""A row as releases before the typed metrics wrote it."""


def test_a_row_of_an_earlier_release_is_read_and_what_a_later_one_added_is_kept() -> None:
    trial = trial_from(json.dumps(OLD))
    assert trial.objective == 90.0
    assert [(run.seed, run.metrics.objective) for run in trial.metrics.runs] == [(7, 90.0), (8, None)]
    race = trial.metrics.confirmed
    assert race is not None
    assert (race.choice, race.runs, race.each) == (ConfirmedChoice.CHOSEN, 10, (90.0, 93.0))
    assert json.loads(to_json(trial))["facts"] == OLD["facts"]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"objective": "fast"}, "objective = 'fast', which is not a number"),
        ({"seed": True}, "seed = True, which is not a number"),
        ({"crossing_method": 3}, "crossing_method = 3, which is not a text"),
        ({"runs": [{"seconds": 3.0}]}, "runs that cannot be read"),
        ({"confirmed": "perhaps"}, "runs that cannot be read"),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused_with_its_name(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(StoreError, match=words):
        trial_from(json.dumps(OLD | {"facts": facts}))
