"""Ten parameters, and slots that ask at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from lora_tune.base.scatter import SEED_SD
from lora_tune.search.grey_box.acquisition import value_actions
from lora_tune.search.grey_box.features import Coordinates, unit
from lora_tune.search.grey_box.model import learn
from lora_tune.search.grey_box.objective import Goal, closed_schedule
from lora_tune.search.observations import Observation

Values = Mapping[str, Any]

KNOBS = {f"KNOB_{n}": FloatDistribution(1e-3, 1e3, log=True) for n in range(7)}
SPACE = {
    "LR": FloatDistribution(1e-5, 1e-2, log=True),
    "MAX_STEPS": IntDistribution(100, 2500),
    "layout": CategoricalDistribution(("tp4 pp1 cp1 minibs4 mbs1", "tp8 pp1 cp1 minibs8 mbs1")),
    **KNOBS,
}
COORDINATES = Coordinates(distributions=SPACE, gpus=8, centre=dict.fromkeys(KNOBS, 1.0))


def runs(count: int) -> list[Observation]:
    """Runs around a start of which each knob is better a little off."""
    rng = np.random.default_rng(2)
    found = []
    for number in range(count):
        knobs = {name: math.exp(rng.normal()) for name in KNOBS}
        samples = 3000 * math.exp(sum(0.05 * (math.log(v) - 2) ** 2 for v in knobs.values()))
        values = {"LR": 4e-4, "MAX_STEPS": 800, "layout": "tp4 pp1 cp1 minibs4 mbs1", **knobs}
        found.append(Observation(number=number, values=values, samples_per_second=2.2, reached=samples))
    return found


def asked_at_once(count: int) -> list[Values]:
    """What the grey box proposes after 25 runs, so many times without a result between."""
    observations, rng, asked = runs(25), np.random.default_rng(1), list[Values]()
    for number in range(count):
        model = learn(COORDINATES, Goal(schedule=closed_schedule), observations)
        asked.append(value_actions(model, rng, probes=False, capped=True)[0].values)
        observations.append(Observation(number=100 + number, values=asked[-1], open=True))
    return asked


def test_eight_asked_at_once_are_eight_questions_where_the_model_is_not_sure() -> None:
    """No answer to one of them answers another: they differ by more than runs of one configuration scatter."""
    asked = asked_at_once(8)
    _, covariance = learn(COORDINATES, Goal(schedule=closed_schedule), runs(25)).predict_ln_samples(asked)
    variance, others = np.diag(covariance), ~np.eye(8, dtype=bool)
    assert np.sqrt(variance).min() > 5 * SEED_SD, "the model is sure of none of them"
    differ = np.sqrt(variance[:, None] + variance[None, :] - 2 * covariance)
    assert differ[others].min() > 2 * SEED_SD
    places = np.array([[unit(SPACE[n], values[n]) for n in ("LR", "MAX_STEPS", *KNOBS)] for values in asked])
    assert np.abs(places[:, None] - places[None, :]).max(axis=2)[others].min() > 0.06, "half ranges"
