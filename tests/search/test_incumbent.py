"""What is handed over in place of the configuration of today: the start until another is clearly better."""

from __future__ import annotations

import math
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.trial import TrialState

from lora_tune.search.grey_box.sampler import Advantage, GreyBoxSampler

SPACE: dict[str, BaseDistribution] = {"LR": FloatDistribution(1e-5, 1e-1, log=True)}
START = {"LR": 1e-3}
NEIGHBOUR = {"LR": 1.05e-3}


def test_one_standard_deviation_is_clear() -> None:
    assert Advantage(ln_saved=0.0205, sd=0.02).is_clear
    assert not Advantage(ln_saved=0.0195, sd=0.02).is_clear
    assert not Advantage(ln_saved=-0.01, sd=0.0).is_clear
    assert Advantage(ln_saved=0.001, sd=0.0).is_clear
    assert not Advantage(ln_saved=0.0, sd=0.0).is_clear


def studied(
    space: dict[str, BaseDistribution], start: dict[str, Any] | None, *runs: tuple[dict[str, Any], float]
) -> tuple[optuna.Study, GreyBoxSampler]:
    """After a run of today's configuration that took 500 s (None: it has none yet) and others; infinite: no target."""
    made = GreyBoxSampler(space, start=START, defaults=START, seed=1)
    study = optuna.create_study(sampler=made)
    for values, took in ([(start, 500.0)] if start else []) + list(runs):
        facts: dict[str, Any] = {"samples_per_second": 10.0, "stop_samples": 10.0 * took, "verdict": "reached"}
        state = TrialState.COMPLETE
        if math.isinf(took):
            state, facts = TrialState.PRUNED, {"samples_per_second": 10.0, "verdict": "censored"}
        value = took if state is TrialState.COMPLETE else None
        study.add_trial(
            optuna.trial.create_trial(params=values, distributions=space, value=value, user_attrs=facts, state=state)
        )
    return study, made


def test_the_start_stays_while_its_first_run_is_open() -> None:
    study, made = studied(SPACE, None, (NEIGHBOUR, 485.0))
    assert made.recommend(study)[0] == NEIGHBOUR
    study.add_trial(optuna.trial.create_trial(params=START, distributions=SPACE, state=TrialState.RUNNING))
    assert made.recommend(study)[0] == START


def test_the_start_stays_until_another_configuration_is_clearly_better() -> None:
    hardly, made = studied(SPACE, START, (NEIGHBOUR, 485.0))
    values, _, sentence = made.recommend(hardly)
    assert values == START
    assert "not yet clear" in sentence
    clearly, made = studied(SPACE, START, *4 * [({"LR": 3e-3}, 300.0)])
    assert made.recommend(clearly)[0]["LR"] > 2e-3


def test_a_start_that_never_reached_the_target_does_not_stay() -> None:
    study, made = studied(SPACE, None, (START, math.inf), (NEIGHBOUR, 485.0))
    assert made.recommend(study)[0] == NEIGHBOUR
