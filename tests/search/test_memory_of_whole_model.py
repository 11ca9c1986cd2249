"""Memory where every parameter may drive both speed and convergence: layouts die by the same physics and bounds."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial, TrialState

from lora_tune.config.layout import parse_layout
from lora_tune.search.forecasts import FORECASTS
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.memory_risk import learn_memory
from lora_tune.search.grey_box.sampler import GreyBoxSampler
from lora_tune.search.observations import Observation
from lora_tune.search.portfolio import Arms, PortfolioSampler
from lora_tune.search.tpe import WindowedTPESampler
from lora_tune.search.whole.encoding import Encoding
from lora_tune.search.whole.model import WholeModel, learn_whole
from lora_tune.search.whole.runs import Run

GPUS = 8
LAYOUTS = tuple(
    f"tp{tp} pp{pp} cp{cp} minibs{tp * pp * cp} mbs{mbs}"
    for tp in (1, 2, 4, 8) for pp in (1, 2) for cp in (1, 2) for mbs in (1, 2, 4)
    if tp * pp * cp <= GPUS and tp * pp * cp % mbs == 0
)  # fmt: skip
SPACE: dict[str, BaseDistribution] = {
    "LR": FloatDistribution(1e-4, 1e-2, log=True), "layout": CategoricalDistribution(LAYOUTS),
}  # fmt: skip
START = {"LR": 1e-3, "layout": "tp4 pp1 cp2 minibs8 mbs1"}
COORDINATES = Coordinates(distributions=SPACE, gpus=GPUS)


def dies(values: dict[str, Any]) -> bool:
    layout = parse_layout(values["layout"])
    return layout.tp * layout.cp * layout.pp < 8 * layout.mbs


def ended(values: dict[str, Any]) -> FrozenTrial:
    """A trial whose end the whole model foresaw and the grey box did not."""
    seconds = 1500 * math.exp(0.1 * math.log(values["LR"] / 2e-3) ** 2)
    alike = json.dumps({"grey_box": [math.log(seconds) + 2, 0.05], "whole": [math.log(seconds), 0.05]})
    facts: dict[str, Any] = {"verdict": "infeasible", FORECASTS: alike}
    if not dies(values):
        facts |= {"verdict": "reached", "samples_per_second": 2.0, "stop_samples": 2 * seconds}
    state = TrialState.PRUNED if dies(values) else TrialState.COMPLETE
    value = None if dies(values) else seconds
    return optuna.trial.create_trial(params=values, distributions=SPACE, value=value, user_attrs=facts, state=state)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_when_all_trust_is_the_whole_models_layouts_that_need_more_than_the_dead_are_not_tried(seed: int) -> None:
    tpe = WindowedTPESampler(seed=seed, n_startup_trials=5, multivariate=True, constant_liar=True)
    arms = Arms(grey_box=GreyBoxSampler(SPACE, gpus=GPUS, seed=seed), tpe=tpe)
    made = PortfolioSampler(COORDINATES, arms, target=1.0, centre=START, seed=seed)
    study = optuna.create_study(sampler=made)
    known = [START, {**START, "LR": 2e-3}, {**START, "LR": 3e-3}, {**START, "LR": 5e-4}]
    study.add_trials([ended(v) for v in [*known, {**START, "layout": "tp4 pp1 cp1 minibs4 mbs1"}]])
    assert not made.trust_in(study).believes_grey_box
    dead = 0
    for _ in range(12):
        values = study.ask(SPACE).params
        dead += dies(values)
        study.add_trial(ended(values))
    assert dead <= 3


def learned(memory: bool, *runs: Run) -> WholeModel:
    seen = [
        Observation(number=n, values=r.values, infeasible=r.died, samples_per_second=math.nan if r.died else 2.0)
        for n, r in enumerate(runs)
    ]
    return learn_whole(
        Encoding(SPACE, COORDINATES), runs, memory=learn_memory(COORDINATES, seen, None) if memory else None
    )


def test_a_death_says_nothing_of_the_rate_where_its_layout_explains_it() -> None:
    lived = [Run(values={**START, "LR": rate}, ln_score=7.0, ln_pace=-1.0) for rate in (5e-4, 2e-3)]
    died = Run(values={"LR": 1e-3, "layout": "tp1 pp1 cp1 minibs1 mbs1"}, failed=True, died=True)
    with_memory = learned(True, *lived, *3 * [died])
    assert with_memory.succeeds([START])[0] > 0.9
    assert with_memory.succeeds([died.values])[0] < 0.1


def test_a_death_where_the_layout_lives_is_the_other_parameters() -> None:
    lived = [Run(values={**START, "LR": rate}, ln_score=7.0, ln_pace=-1.0) for rate in np.geomspace(3e-4, 1e-3, 9)]
    died = [Run(values={**START, "LR": rate}, failed=True, died=True) for rate in (8e-3, 9e-3)]
    near, far = learned(True, *lived, *died).succeeds([died[0].values, START])
    assert near < 0.7 < far


def test_two_layouts_are_compared_by_what_is_believed_of_both_deaths() -> None:
    lived = [Run(values={**START, "LR": rate}, ln_score=7.0, ln_pace=-1.0) for rate in (5e-4, 1e-3, 2e-3)]
    other = {**START, "layout": "tp2 pp1 cp2 minibs4 mbs1"}
    model = learned(
        True, *lived, Run(values=other, failed=True, died=True), Run(values=other, ln_score=6.9, ln_pace=-1.1)
    )
    compared = model.compared(other, START)
    assert compared.deaths.died > 1 > compared.other_deaths.died
    assert model.compared({**other, "LR": 2e-3}, other).deaths.died == 0
