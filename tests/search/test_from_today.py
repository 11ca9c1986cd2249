"""Where the user has a configuration today: what is handed over, and which short runs are asked for before that."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

from lora_tune.search.grey_box.from_today import FromTodaySampler
from lora_tune.search.grey_box.objective import Goal, closed_schedule
from lora_tune.search.sentences import TO_BE_SURE

SLOW, FAST = "tp4 pp1 cp1 minibs4 mbs1", "tp2 pp1 cp2 minibs4 mbs1"
DARING = "tp4 pp1 cp1 minibs4 mbs2"
"""Larger micro-batches than the start's: it may well die of memory."""


SPACE_OF_LAYOUTS = {"LR": FloatDistribution(1e-4, 1e-2, log=True), "layout": CategoricalDistribution((SLOW, DARING))}


def studied_on(layout: str, runs: int, *, probes: bool) -> tuple[optuna.Study, FromTodaySampler]:
    """After a run of the start, which is slow, and some on a layout that is 5% faster."""
    space = {**SPACE_OF_LAYOUTS, "layout": CategoricalDistribution((SLOW, layout))}
    start = {"LR": 1e-3, "layout": SLOW}
    made = FromTodaySampler(
        space, goal=Goal(schedule=closed_schedule), gpus=8, probes=probes, seed=1, start=start, defaults=start
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
    study, made = studied_on(layout, runs, probes=False)
    values, _, sentence = made.recommend(study)
    return dict(values), sentence


def test_a_layout_that_would_replace_the_start_is_run_shortly_until_it_has_lived_often_enough() -> None:
    study, made = studied_on(DARING, 1, probes=True)
    assert made.recommend(study)[0]["layout"] == SLOW
    short = 0
    while made.recommend(study)[0]["layout"] == SLOW:
        trial = study.ask(SPACE_OF_LAYOUTS)
        assert (trial.params["layout"], trial.user_attrs["kind"]) == (DARING, "probe")
        assert trial.user_attrs["why"] == TO_BE_SURE
        beside = study.ask(SPACE_OF_LAYOUTS)
        assert beside.user_attrs["why"] != TO_BE_SURE, "one at a time: the first may be the last"
        study.tell(beside, state=TrialState.FAIL)
        for name, value in {"samples_per_second": 2.1, "verdict": "probed"}.items():
            trial.set_user_attr(name, value)
        study.tell(trial, state=TrialState.PRUNED)
        short += 1
    assert 1 <= short <= 8
    assert study.ask(SPACE_OF_LAYOUTS).user_attrs["why"] != TO_BE_SURE


def told_to_be_sure(ending: str, asked: int) -> int:
    """Short runs of the daring layout among so many proposals, each ending so without a word of memory."""
    study, _ = studied_on(DARING, 1, probes=True)
    for _ in range(asked):
        trial = study.ask(SPACE_OF_LAYOUTS)
        study.tell(trial, state=TrialState[ending])
    return sum(t.user_attrs["why"] == TO_BE_SURE for t in study.trials if "why" in t.user_attrs)


def test_a_short_run_that_fails_for_another_reason_than_memory_is_not_asked_for_again() -> None:
    """It would fail again, and three in a row end the sweep."""
    assert told_to_be_sure("FAIL", 3) == 1


def test_short_runs_that_measured_nothing_come_to_an_end() -> None:
    assert told_to_be_sure("PRUNED", 10) == 8


def test_a_start_that_nobody_counted_the_samples_of_is_compared_with_nothing() -> None:
    study, made = studied_on(DARING, 1, probes=True)
    uncounted = optuna.create_study(sampler=made)
    for t in study.trials:
        facts = {name: value for name, value in t.user_attrs.items() if name != "stop_samples"}
        uncounted.add_trial(
            optuna.trial.create_trial(params=t.params, distributions=t.distributions, value=t.value, user_attrs=facts)
        )
    assert uncounted.ask(SPACE_OF_LAYOUTS).user_attrs["why"] != TO_BE_SURE


def test_where_trials_are_never_short_none_is_asked_for_to_be_sure() -> None:
    study, _ = studied_on(DARING, 1, probes=False)
    assert study.ask(SPACE_OF_LAYOUTS).user_attrs["kind"] == "full"


def test_a_faster_layout_is_clear_long_before_other_hyperparameters_are() -> None:
    """Seeds leave the rate open, and speeds settle the layout."""
    values, sentence = with_runs_on(FAST, 2)
    assert values == {"LR": 1e-3, "layout": FAST}
    assert "on a faster layout" in sentence


def test_a_layout_that_lived_once_and_may_well_die_of_memory_is_not_clearly_better() -> None:
    """What its one run took is not all that it costs."""
    assert with_runs_on(DARING, 1)[0]["layout"] == SLOW
    assert with_runs_on(DARING, 6)[0]["layout"] == DARING


def on_daring(study: optuna.Study, shown: bool) -> None:
    """A full run of the daring layout begins, with an eval on record or without."""
    values = {"LR": 2e-3, "layout": DARING}
    evals = {384: 2.0} if shown else {}
    study.add_trial(
        optuna.trial.create_trial(
            params=values, distributions=SPACE_OF_LAYOUTS, state=TrialState.RUNNING, intermediate_values=evals
        )
    )


@pytest.mark.parametrize("shown", [False, True])
def test_a_full_run_that_has_shown_that_its_layout_lives_holds_up_no_short_one(shown: bool) -> None:
    """Of many at a time one of the layout is always open."""
    study, _ = studied_on(DARING, 1, probes=True)
    on_daring(study, shown)
    assert (study.ask(SPACE_OF_LAYOUTS).user_attrs["why"] == TO_BE_SURE) == shown


def test_a_forecast_counts_no_run_that_is_still_open_as_ended() -> None:
    study, made = studied_on(DARING, 1, probes=True)
    asked = {"LR": 2e-3, "layout": SLOW}
    alone = made.forecast(study, asked)
    for _ in range(6):
        study.add_trial(
            optuna.trial.create_trial(params=asked, distributions=SPACE_OF_LAYOUTS, state=TrialState.RUNNING)
        )
    assert made.forecast(study, asked) == pytest.approx(alone)
