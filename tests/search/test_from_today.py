"""Where the user has a configuration today: what is handed over."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

from lora_tune.search.grey_box.objective import Goal, closed_schedule
from lora_tune.search.grey_box.sampler import GreyBoxSampler

SLOW, FAST = "tp4 pp1 cp1 minibs4 mbs1", "tp2 pp1 cp2 minibs4 mbs1"
DARING = "tp4 pp1 cp1 minibs4 mbs2"
"""Larger micro-batches than the start's: it may well die of memory."""


SPACE_OF_LAYOUTS = {"LR": FloatDistribution(1e-4, 1e-2, log=True), "layout": CategoricalDistribution((SLOW, DARING))}


def studied_on(layout: str, runs: int) -> tuple[optuna.Study, GreyBoxSampler]:
    """After a run of the start, which is slow, and some on a layout that is 5% faster."""
    space = {**SPACE_OF_LAYOUTS, "layout": CategoricalDistribution((SLOW, layout))}
    start = {"LR": 1e-3, "layout": SLOW}
    made = GreyBoxSampler(
        space, goal=Goal(schedule=closed_schedule), gpus=8, probes=True, seed=1, start=start, defaults=start
    )
    study = optuna.create_study(sampler=made)
    for values, samples, speed in ((start, 3072, 2.0), *runs * [({"LR": 1.1e-3, "layout": layout}, 3050, 2.1)]):
        facts = {"samples_per_second": speed, "seconds_per_eval": 35.0, "init_seconds": 60.0, "stop_samples": samples}
        made_of = {**facts, "verdict": "reached"}
        study.add_trial(
            optuna.trial.create_trial(params=values, distributions=space, value=samples / speed, user_attrs=made_of)
        )
    return study, made


def with_runs_on(layout: str, runs: int) -> tuple[dict[str, Any], str]:
    """What is recommended then."""
    study, made = studied_on(layout, runs)
    values, _, sentence = made.recommend(study)
    return dict(values), sentence


def test_a_faster_layout_is_clear_long_before_other_hyperparameters_are() -> None:
    """Seeds leave the rate open, and speeds settle the layout."""
    values, sentence = with_runs_on(FAST, 2)
    assert values == {"LR": 1e-3, "layout": FAST}
    assert "on a faster layout" in sentence


def test_a_layout_that_is_faster_where_it_lives_and_often_dies_of_memory_replaces_nothing() -> None:
    """What its one run took is not all that it costs."""
    study, made = studied_on(DARING, 1)
    assert made.recommend(study)[0]["layout"] == DARING
    died = optuna.trial.create_trial(
        params={"LR": 1.1e-3, "layout": DARING}, distributions=SPACE_OF_LAYOUTS, state=TrialState.PRUNED,
        user_attrs={"verdict": "infeasible"},
    )  # fmt: skip
    study.add_trial(died)
    assert made.recommend(study)[0]["layout"] == SLOW


def test_a_forecast_counts_no_run_that_is_still_open_as_ended() -> None:
    study, made = studied_on(DARING, 1)
    asked = {"LR": 2e-3, "layout": SLOW}
    alone = made.forecast(study, asked)
    for _ in range(6):
        study.add_trial(
            optuna.trial.create_trial(params=asked, distributions=SPACE_OF_LAYOUTS, state=TrialState.RUNNING)
        )
    assert made.forecast(study, asked) == pytest.approx(alone)
