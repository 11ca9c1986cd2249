"""Values on [-1, 1] over their ranges, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution


def unit(distribution: BaseDistribution, value: Any) -> float:
    """A numeric value on [-1, 1] over its range, logarithmically where the distribution is."""
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high, at = float(distribution.low), float(distribution.high), float(value)
    if distribution.log:
        low, high, at = math.log(low), math.log(high), math.log(max(at, 1e-300))
    return 2 * (at - low) / (high - low) - 1 if high > low else 0.0


def from_unit(distribution: BaseDistribution, u: float) -> Any:
    """The value at ``u`` in [-1, 1]; steps and whole numbers respected."""
    if isinstance(distribution, CategoricalDistribution):
        count = len(distribution.choices)
        return distribution.choices[min(count - 1, max(0, int((u + 1) / 2 * count)))]
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high = float(distribution.low), float(distribution.high)
    share = min(1.0, max(0.0, (u + 1) / 2))
    value = math.exp(math.log(low) + share * math.log(high / low)) if distribution.log else low + share * (high - low)
    if distribution.step:
        value = low + round((value - low) / distribution.step) * distribution.step
    value = min(high, max(low, value))
    return round(value) if isinstance(distribution, IntDistribution) else value


def at_random(
    distributions: Mapping[str, BaseDistribution], names: Iterable[str], rng: np.random.Generator
) -> dict[str, Any]:
    """A point of the parameters ``names``, each uniform on [-1, 1] over its range."""
    return {name: from_unit(distributions[name], float(rng.uniform(-1, 1))) for name in names}
