"""On which scale the values of a parameter count, in the search."""

from __future__ import annotations

import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from lora_tune.search.grey_box.features import Coordinates, from_unit, unit

BETA2, RATE = FloatDistribution(0.9, 0.9999), FloatDistribution(1e-5, 1e-1, log=True)
EVEN = [*(FloatDistribution(*ends) for ends in ((0, 0.3), (0.5, 0.9), (0.9, 1))), IntDistribution(0, 9)]


def test_betas_and_discounts_count_by_their_horizon() -> None:
    """0.9, 0.99, 0.999 and 0.9999 average over 10, 100, 1,000 and 10,000 steps: three steps of the same size."""
    assert [unit(BETA2, v) for v in (0.9, 0.99, 0.999, 0.9999)] == pytest.approx([-1, -1 / 3, 1 / 3, 1])
    assert from_unit(BETA2, 0.0) == pytest.approx(1 - 10**-2.5)


@pytest.mark.parametrize(
    "even",
    [FloatDistribution(0.0, 0.3), FloatDistribution(0.5, 0.9), FloatDistribution(0.9, 1.0), IntDistribution(0, 9)],
)
def test_other_ranges_count_evenly(even: FloatDistribution | IntDistribution) -> None:
    assert unit(even, even.low + 0.5 * (even.high - even.low)) == pytest.approx(0)


@pytest.mark.parametrize(
    "spread",
    [BETA2, FloatDistribution(1e-5, 1e-1, log=True), IntDistribution(8, 1024, log=True), IntDistribution(1, 9)],
)
@pytest.mark.parametrize("u", [-1.0, -0.4, 0.3, 1.0])
def test_a_value_is_found_again_at_its_place(spread: FloatDistribution | IntDistribution, u: float) -> None:
    value = from_unit(spread, u)
    assert spread.low <= value <= spread.high
    assert unit(spread, value) == pytest.approx(u, abs=0.25 if isinstance(spread, IntDistribution) else 1e-9)


def test_choices_that_are_numbers_lie_at_the_same_place_on_their_scale() -> None:
    """Those that span a factor of eight or more by their ratio."""
    space: dict[str, BaseDistribution] = {"LORA_ALPHA": CategoricalDistribution((8, 16, 32, 64, 128))}
    coordinates = Coordinates(distributions=space)
    for choice, place in ((8, -1.0), (32, 0.0), (128, 1.0)):
        assert coordinates.convergence_features({"LORA_ALPHA": choice})[0] == pytest.approx(place)


def test_each_of_forty_choices_is_told_from_the_others() -> None:
    space: dict[str, BaseDistribution] = {"DATASET": CategoricalDistribution(tuple(f"set {n}" for n in range(40)))}
    coordinates = Coordinates(distributions=space)
    rows = {tuple(coordinates.convergence_features({"DATASET": f"set {n}"})) for n in range(40)}
    assert len(rows) == 40
