"""Searches over parameters that exist only at times: what differs in nothing that exists is one configuration."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_tune.config.study import Study, parse_study
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.recommendation import _unrun, recommend
from lora_tune.search.samplers import make_sampler
from lora_tune.search.session import Session
from lora_tune.search.shrinkage import PosteriorEstimate
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict

STUDY = """
[workload]
kind = "command"
argv = ["bash", "train.sh"]
[site]
launcher = "local"
[space]
BETA2 = { type = "float", low = 0.9, high = 0.999, when = { OPTIMIZER = "adam" } }
LR = { type = "float", low = 1e-4, high = 1e-2, log = true }
OPTIMIZER = { type = "categorical", choices = ["adam", "sgd"] }
MOMENTUM = { type = "float", low = 0.5, high = 0.99, when = { OPTIMIZER = "sgd" } }
[objective]
target = 0.5
[search]
sampler = "SAMPLER"
[budget]
trials = 60
"""

THROUGHPUT = """
[workload]
kind = "command"
argv = ["bash", "train.sh"]
[site]
launcher = "local"
[space]
KERNEL = { type = "categorical", choices = ["plain", "fused"] }
BLOCK = { type = "int", low = 1, high = 4, when = { KERNEL = "fused" } }
[objective]
score = "throughput"
[budget]
trials = 9
"""


def study_of(sampler: str = "auto", text: str = STUDY) -> Study:
    return parse_study(text.replace("SAMPLER", sampler), Path("toy.toml"))


def seconds(values: dict[str, Any]) -> float:
    """Adam with a short memory is best; SGD is a little slower, whatever its momentum."""
    rate = 0.1 * math.log(values["LR"] / 1e-3) ** 2
    if values["OPTIMIZER"] == "adam":
        return 100 * math.exp(rate + 40 * (values["BETA2"] - 0.95) ** 2)
    return 130 * math.exp(rate + (values["MOMENTUM"] - 0.9) ** 2)


def ended(study: Study, number: int, tuned: dict[str, Any], score: float) -> Trial:
    metrics = TrialMetrics(
        objective=score, samples_per_second=10.0, stop_samples=10 * score, stop_seconds=score,
        crossing_samples=10 * score, node_hours=score / 3600,
    )  # fmt: skip
    return Trial(
        number=number, seed=number, tuned=tuned, parameters=study.search_space.resolve(tuned), metrics=metrics,
        state=TrialState.FINISHED, verdict=Verdict.REACHED, seconds=score, samples=10 * score,
    )  # fmt: skip


def swept(study: Study, trials: int) -> StudyRecords:
    """A sweep of so many trials, each told before the next is asked, as the driver records them."""
    session = Session(study, sampler=make_sampler(study))
    found: dict[int, Trial] = {}
    for _ in range(trials):
        asked = session.ask()
        assert not isinstance(asked, str)
        tuned = study.search_space.conditions.present(asked.tuned)
        found[asked.number] = ended(study, asked.number, tuned, seconds(tuned) if "LR" in tuned else 1.0)
        session.tell(found[asked.number])
    return StudyRecords(name="toy", digest="", study_toml="", began_at=0.0, trials=found)


@pytest.mark.parametrize("sampler", ["auto", "tpe", "random", "grey_box"])
def test_every_sampler_proposes_points_whose_records_hold_what_exists(sampler: str) -> None:
    sweep = swept(study_of(sampler), 14)
    kinds = {"adam": {"LR", "OPTIMIZER", "BETA2"}, "sgd": {"LR", "OPTIMIZER", "MOMENTUM"}}
    assert {t.tuned["OPTIMIZER"] for t in sweep.trials.values()} == kinds.keys()
    for trial in sweep.trials.values():
        assert trial.tuned.keys() == kinds[str(trial.tuned["OPTIMIZER"])] == trial.parameters.keys()


def test_the_search_finds_the_better_branch_and_hands_over_what_exists_in_it() -> None:
    study = study_of()
    sweep = swept(study, 24)
    found = recommend(study, sweep)
    assert found is not None
    assert found.trial.parameters.keys() == {"LR", "OPTIMIZER", "BETA2"}
    assert seconds(dict(found.trial.tuned)) < 105


def test_a_recommendation_that_nobody_ran_inherits_nothing_that_does_not_exist_for_it() -> None:
    study = study_of()
    lucky = ended(study, 0, {"LR": 1e-3, "OPTIMIZER": "sgd", "MOMENTUM": 0.9}, 130.0)
    lucky = replace(lucky, parameters={**lucky.parameters, "SEQ": 512})
    belief = PosteriorEstimate(
        tuned={"LR": 1e-3, "OPTIMIZER": "adam", "BETA2": 0.95}, objective=100.0, low=90.0, high=110.0
    )
    made = _unrun(study, belief, lucky)
    assert made.parameters == {"SEQ": 512, "LR": 1e-3, "OPTIMIZER": "adam", "BETA2": 0.95}


def test_what_differs_only_in_what_is_absent_is_one_point_to_the_model() -> None:
    space = study_of().search_space
    coordinates = Coordinates(distributions=space.distributions(), conditions=space.conditions)
    base = {"LR": 1e-3, "OPTIMIZER": "sgd", "MOMENTUM": 0.9, "BETA2": 0.91}
    row = coordinates.convergence_features
    assert row(base) == row({**base, "BETA2": 0.99})
    assert row(base) != row({**base, "MOMENTUM": 0.6})


def test_no_throughput_point_is_measured_twice_under_two_names() -> None:
    sweep = swept(study_of(text=THROUGHPUT), 5)
    assert len({tuple(sorted(t.tuned.items())) for t in sweep.trials.values()}) == 5


def test_a_fresh_database_takes_in_what_the_records_hold() -> None:
    study = study_of()
    sweep = swept(study, 6)
    again = Session(study, sweep, make_sampler(study))
    asked = again.ask()
    assert not isinstance(asked, str)
    assert asked.number == 6
