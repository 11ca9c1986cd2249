"""Values on [-1, 1] over their ranges, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

DECAY = 30.0
"""Ratio of the distances of a range's ends from 1 from which on its values count by that distance: betas, discounts and
averages act by their horizon 1 / (1 - x), so that 0.99 and 0.999 are as far apart as 0.9 and 0.99."""
WIDE = 8.0
"""Ratio of the largest to the smallest of positive choices from which on they are taken on a log scale."""


def unit(distribution: BaseDistribution, value: Any) -> float:
    """A number on [-1, 1] over its range, evenly on the scale on which it counts."""
    return coder(distribution)(value)[0]


def is_ordered(distribution: BaseDistribution) -> bool:
    """Whether it is a choice of more than two numbers."""
    choices = distribution.choices if isinstance(distribution, CategoricalDistribution) else ()
    return len(choices) > 2 and _are_numbers(choices)


def ends(distribution: BaseDistribution) -> tuple[float, float] | None:
    """The least and the largest value of a number or of a choice of numbers; None of other choices."""
    if isinstance(distribution, FloatDistribution | IntDistribution):
        return float(distribution.low), float(distribution.high)
    if not (isinstance(distribution, CategoricalDistribution) and is_ordered(distribution)):
        return None
    return float(min(distribution.choices)), float(max(distribution.choices))  # type: ignore[type-var,arg-type]


@lru_cache(maxsize=256)
def coder(distribution: BaseDistribution) -> Callable[[Any], list[float]]:
    """What makes features of a parameter's values: of a number one on [-1, 1], of other categories one each."""
    if not isinstance(distribution, CategoricalDistribution):
        return _number_coder(distribution)
    choices = distribution.choices
    if not (len(choices) > 1 and _are_numbers(choices)):
        return one_hot(choices)
    low, high = float(min(choices)), float(max(choices))  # type: ignore[type-var,arg-type]
    log = low > 0 and high / low >= WIDE
    return _number_coder(FloatDistribution(low, high, log=log))


def one_hot(choices: Sequence[Any]) -> Callable[[Any], list[float]]:
    """Features of a choice, one for each; none where there is no choice."""
    width = len(choices) if len(choices) > 1 else 0
    places = {choice: at for at, choice in enumerate(choices[:width])}

    def coded(value: Any) -> list[float]:
        row = [0.0] * width
        if value in places:
            row[places[value]] = 0.7
        return row

    return coded


def _number_coder(distribution: BaseDistribution) -> Callable[[Any], list[float]]:
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high = (_place(distribution, v) for v in (distribution.low, distribution.high))
    scale, log, decay = 2 / (high - low) if high > low else 0.0, distribution.log, _is_decay(distribution)

    def coded(value: Any) -> list[float]:
        at = float(value)
        at = math.log(max(at, 1e-300)) if log else -math.log(max(1 - at, 1e-300)) if decay else at
        return [scale * (at - low) - 1 if scale else 0.0]

    return coded


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _is_decay(distribution: FloatDistribution | IntDistribution) -> bool:
    low, high = distribution.low, distribution.high
    even = not (distribution.log or distribution.step) and 0 <= low < high < 1
    return even and (1 - low) >= DECAY * (1 - high)


def _place(distribution: FloatDistribution | IntDistribution, value: float) -> float:
    """A value on the scale on which it counts evenly."""
    if distribution.log:
        return math.log(max(float(value), 1e-300))
    return -math.log(max(1 - float(value), 1e-300)) if _is_decay(distribution) else float(value)


def from_unit(distribution: BaseDistribution, u: float) -> Any:
    """The value at ``u`` in [-1, 1]; steps and whole numbers respected."""
    if isinstance(distribution, CategoricalDistribution):
        count = len(distribution.choices)
        return distribution.choices[min(count - 1, max(0, int((u + 1) / 2 * count)))]
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    return _number_at(distribution)(u)


@lru_cache(maxsize=256)  # a proposal asks for thousands of values of the same few ranges
def _number_at(distribution: FloatDistribution | IntDistribution) -> Callable[[float], float]:
    """What makes values of a number from where they are in [-1, 1]."""
    low, high, step = float(distribution.low), float(distribution.high), distribution.step
    first, span = _place(distribution, low), _place(distribution, high) - _place(distribution, low)
    log, decay, whole = distribution.log, _is_decay(distribution), isinstance(distribution, IntDistribution)

    def at(u: float) -> float:
        place = first + min(1.0, max(0.0, (u + 1) / 2)) * span
        value = math.exp(place) if log else 1 - math.exp(-place) if decay else place
        if step:
            value = low + round((value - low) / step) * step
        value = min(high, max(low, value))
        return round(value) if whole else value

    return at


def at_random(
    distributions: Mapping[str, BaseDistribution], names: Iterable[str], rng: np.random.Generator
) -> dict[str, Any]:
    """A point of the parameters ``names``, each uniform on [-1, 1] over its range."""
    return {name: from_unit(distributions[name], float(rng.uniform(-1, 1))) for name in names}
