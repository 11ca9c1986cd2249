"""How far runs scatter is learned from the study, by the model of whole configurations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.whole.encoding import Encoding
from lora_tune.search.whole.model import WholeModel, learn_whole
from lora_tune.search.whole.proposals import recommend_whole
from lora_tune.search.whole.runs import Run

SPACE = {
    "LR": FloatDistribution(1e-5, 1e-2, log=True),
    "DECAY": FloatDistribution(0.0, 0.1),
    "OPTIMIZER": CategoricalDistribution(("adam", "lion")),
}
ENCODING = Encoding(SPACE, Coordinates(distributions=SPACE))


def truth(values: dict) -> float:
    """ln(seconds) without the luck of seeds."""
    return 7 + 0.08 * math.log(values["LR"] / 4e-4) ** 2 + 0.1 * (values["OPTIMIZER"] == "lion") + values["DECAY"]


def at_random(rng: np.random.Generator) -> dict:
    return {
        "LR": float(np.exp(rng.uniform(math.log(1e-5), math.log(1e-2)))),
        "DECAY": float(rng.uniform(0, 0.1)),
        "OPTIMIZER": str(rng.choice(["adam", "lion"])),
    }


def after(count: int, noise: float, seed: int, ln_pace: float = math.nan) -> tuple[WholeModel, list[dict]]:
    """The model after runs at random, and their values."""
    rng = np.random.default_rng(seed)
    points = [at_random(rng) for _ in range(count)]
    runs = [Run(values=p, ln_score=truth(p) + float(rng.normal(0, noise)), ln_pace=ln_pace) for p in points]
    return learn_whole(ENCODING, runs), points


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.15, 0.4])
def test_the_noise_of_forty_runs_is_told_within_a_factor_of_two(noise: float) -> None:
    for seed in range(4):
        model, _ = after(40, noise, seed)
        assert 0.5 * noise < model.run_sd < 2 * noise


def test_after_few_runs_several_noises_are_believed_possible() -> None:
    model, _ = after(4, 0.05, 1)
    believed = [s.noise_scale for s in model.scales.samples.scales]
    assert max(believed) >= 4 * min(believed)
    assert sum(s.share for s in model.scales.samples.scales) == pytest.approx(1.0)


def test_what_is_believed_of_a_comparison_is_as_unsure_as_it_ought_to_be() -> None:
    """Of pairs of configurations that ran once each, about two thirds are compared within one standard deviation."""
    held, counted = 0, 0
    for seed in range(8):
        model, points = after(24, 0.15, seed)
        for first, second in zip(points[::2], points[1::2], strict=True):
            compared = model.compared(first, second)
            held += abs(compared.ln_saved - (truth(second) - truth(first))) < compared.sd
            counted += 1
    assert 0.5 < held / counted < 0.95


def test_of_scripts_that_tell_no_speed_the_whole_score_is_one_piece() -> None:
    """Else half of what is unknown would be the level of a speed that nobody measures, in every comparison."""
    model, points = after(30, 0.02, 3)
    mean, sd = model.predict(points)
    assert sd.max() < 0.1
    assert np.abs(mean - [truth(p) for p in points]).max() < 0.1


def test_of_scripts_that_tell_no_speed_and_show_no_differences_nothing_is_expected_any_more() -> None:
    """Else a study of them would never stop because there is too little to gain."""
    rng = np.random.default_rng(5)
    model = learn_whole(ENCODING, [Run(values=at_random(rng), ln_score=7.0) for _ in range(60)])
    found = recommend_whole(model, np.random.default_rng(0))
    assert found is not None
    assert 0 <= found.regret < 0.0005


def test_what_a_parameter_does_to_speed_is_not_taken_for_noise() -> None:
    """Runs tell their speed within a percent or so. By names alone nothing of this script drives it."""
    space = {
        "LR": FloatDistribution(1e-5, 1e-1, log=True),
        "HIDDEN": IntDistribution(64, 1024, log=True),
        "LAYERS": IntDistribution(1, 12),
    }
    points = [(1e-3, 512, 6), (1e-3, 74, 5), (9e-4, 781, 9), (6e-4, 396, 9), (4e-3, 518, 10), (1e-3, 1024, 9)]
    runs = []
    for rate, hidden, layers in points:
        values = {"LR": rate, "HIDDEN": hidden, "LAYERS": layers}
        pace = 0.9 * math.log(hidden / 256) + 0.8 * math.log(layers / 4) + math.log1p((128 / hidden) ** 2)
        runs.append(Run(values=values, ln_score=pace + 9, ln_pace=pace))
    model = learn_whole(Encoding(space, Coordinates(distributions=space)), runs)
    assert model.scales.pace.noise_scale < 3
