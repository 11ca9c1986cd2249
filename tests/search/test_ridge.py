"""Two parameters whose best values go together: a larger batch wants a larger rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution

from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.portfolio import Arms, PortfolioSampler
from lora_tune.search.tpe import WindowedTPESampler
from lora_tune.search.whole.encoding import Encoding
from lora_tune.search.whole.model import learn_whole
from lora_tune.search.whole.runs import Run

SPACE = {"LR": FloatDistribution(1e-5, 1e-1, log=True), "BATCH": IntDistribution(8, 2048, log=True)}
COORDINATES = Coordinates(distributions=SPACE, roles={"BATCH": "both", "LR": "convergence"})


def at(along: float, across: float) -> dict[str, Any]:
    """A point by e-folds along the ridge from its middle, and across it."""
    return {"LR": 1e-3 * math.exp(along + across), "BATCH": round(128 * math.exp(along - across))}


def truth(values: dict[str, Any]) -> float:
    """ln(seconds): gentle along the ridge, steep across."""
    across = math.log(values["LR"] / 1e-3) - math.log(values["BATCH"] / 128)
    return 6 + 0.5 * across**2 + 0.03 * math.log(values["BATCH"] / 512) ** 2


def test_what_lies_on_along_the_ridge_is_believed_better_than_what_lies_beside_it() -> None:
    """By runs within one e-fold of its middle, of points two e-folds away."""
    rng = np.random.default_rng(3)
    points = [at(*rng.uniform(-0.7, 0.7, 2)) for _ in range(14)]
    model = learn_whole(Encoding(SPACE, COORDINATES), [Run(values=p, ln_score=truth(p)) for p in points])
    on, beside = model.predict([at(1.6, 0.0), at(0.0, 1.6)])[0]
    assert beside - on > 0.3 * (truth(at(0.0, 1.6)) - truth(at(1.6, 0.0)))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_search_that_nothing_is_known_of_arrives_on_the_ridge(seed: int) -> None:
    tpe = WindowedTPESampler(seed=seed, n_startup_trials=5, multivariate=True, constant_liar=True)
    made = PortfolioSampler(COORDINATES, Arms(grey_box=None, tpe=tpe), target=1.0, seed=seed)
    study = optuna.create_study(sampler=made)
    for _ in range(20):
        trial = study.ask(SPACE)
        study.tell(trial, math.exp(truth(trial.params)))
    by_tpe = [t.user_attrs["why"].startswith("Optuna's TPE, to find out") for t in study.trials]
    assert by_tpe.index(False) == 4, "two runs a parameter, before the model proposes"
    assert truth(made.recommend(study)[0]) - 6 < 0.05


def apart(values: dict[str, Any]) -> float:
    """ln(seconds) of a script whose rate and batch have nothing to do with each other."""
    return 6 + 0.2 * math.log(values["LR"] / 1e-3) ** 2 + 0.1 * math.log(values["BATCH"] / 128) ** 2


@pytest.mark.parametrize(("script", "low", "high"), [(truth, 0.9, 1.0), (apart, 0.0, 0.5)])
def test_that_two_numbers_move_together_is_believed_as_far_as_runs_show_it(
    script: Callable[[dict[str, Any]], float], low: float, high: float
) -> None:
    rng = np.random.default_rng(4)
    points = [at(*rng.uniform(-1.5, 1.5, 2)) for _ in range(20)]
    model = learn_whole(Encoding(SPACE, COORDINATES), [Run(values=p, ln_score=script(p)) for p in points])
    assert low <= sum(s.share for s in model.scales.samples.scales if s.together) <= high
