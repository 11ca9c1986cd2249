"""Parameters as features of the whole-configuration model, and which pieces of a run each is guessed to drive."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.gaussian import Array
from lora_tune.search.grey_box.unit_range import from_unit, unit

Values = Mapping[str, Any]
RATE_NAME = re.compile(r"(^|[^A-Z])(LR|LEARNING_?RATE|ETA)($|[^A-Z])")
RATE_BEND, OTHER_BEND = 0.25, 0.02
"""Rise of ln(seconds) at an e-fold from the best: of learning rates, of other numbers searched on a log scale."""
LEAST_BEND, ALL_BENDS = 0.25, 0.75
"""The same at half a range of any number, and of all together: of many parameters most matter little."""
MOST_FOLDS = 4.0
"""E-folds beyond which a rise is no longer quadratic."""
UNIT = 1.5
"""E-folds of a learning rate within which its effect is smooth."""
WIDE = 8.0
"""Ratio of the largest to the smallest of positive choices from which on they are taken on a log scale."""


@dataclass(frozen=True)
class Encoding:
    """Features of configurations of ``distributions``, all in about [-1, 1]; a layout by its degrees.

    coordinates: the same parameters as the grey box sees them, whose roles are the first guess here.
    """

    distributions: Mapping[str, BaseDistribution]
    coordinates: Coordinates

    def row(self, values: Values) -> list[float]:
        """The features of a configuration."""
        values = self.coordinates.conditions.rested(values)
        return [x for name in self.distributions for x in self._coded(name, values[name])]

    def rows(self, points: Sequence[Values]) -> Array:
        """The features of configurations (n, d)."""
        return np.array([self.row(p) for p in points], dtype=np.float64).reshape(len(points), len(self.owners))

    @cached_property
    def owners(self) -> tuple[str, ...]:
        """The parameter that each feature belongs to."""
        return tuple(n for n, d in self.distributions.items() for _ in self._coded(n, from_unit(d, 0.0)))

    @cached_property
    def bends(self) -> tuple[float, ...]:
        """Expected rise of ln(seconds) at half a range from the best value, for each feature; 0 where it is no number.

        A learning rate a factor e from the best one costs a quarter of the time (as the grey box believes: samples
        double at 1.7 e-folds); of other numbers it is known only that ranges are chosen to hold a best point.
        """
        return tuple(self._bend(n) if self._is_number(n) else 0.0 for n in self.owners)

    @cached_property
    def reach(self) -> tuple[float, ...]:
        """Half ranges in units in which a learning rate is smooth, for each feature: at least 1."""
        return tuple(max(1.0, self._folds(n) / UNIT) if _is_rate(n) else 1.0 for n in self.owners)

    def _bend(self, name: str) -> float:
        folds = min(self._folds(name), MOST_FOLDS)
        least = min(LEAST_BEND, ALL_BENDS / len(self.distributions))
        return least + (RATE_BEND if _is_rate(name) else OTHER_BEND) * folds**2

    def _folds(self, name: str) -> float:
        """Half of the range in e-folds where it is searched on a log scale; else 0."""
        distribution = self.distributions[name]
        log = isinstance(distribution, FloatDistribution | IntDistribution) and distribution.log
        return 0.5 * math.log(distribution.high / distribution.low) if log else 0.0  # type: ignore[attr-defined]

    def guess(self, name: str) -> frozenset[str]:
        """The pieces that a parameter drives as its role or its name says: "samples", "pace" or both."""
        c = self.coordinates
        driven = {"samples": name in c.convergence_names, "pace": name in c.speed_names}
        return frozenset(piece for piece, drives in driven.items() if drives)

    @cached_property
    def _layouts(self) -> dict[Any, list[float]]:
        """The features of each layout choice: its degrees, and its batch in octaves."""
        name = self.coordinates.layout
        assert name is not None
        alone = Coordinates(distributions={name: self.distributions[name]}, gpus=self.coordinates.gpus)
        octaves = {c: math.log2(b / alone.reference_batch) / 2 for c, b in alone.batches_by_layout.items()}
        return {c: [*alone.speed_features({name: c}), at] for c, at in octaves.items()}

    def _is_number(self, name: str) -> bool:
        distribution = self.distributions[name]
        return not isinstance(distribution, CategoricalDistribution) or _ordered(distribution)

    def _coded(self, name: str, value: Any) -> list[float]:
        distribution = self.distributions[name]
        if not isinstance(distribution, CategoricalDistribution):
            return [unit(distribution, value)]
        if name == self.coordinates.layout:
            return self._layouts[value]
        if _ordered(distribution):
            low, high = min(distribution.choices), max(distribution.choices)  # type: ignore[type-var]
            return [_place(float(value), float(low), float(high))]  # type: ignore[arg-type]
        return (
            [0.7 if value == choice else 0.0 for choice in distribution.choices]
            if len(distribution.choices) > 1
            else []
        )


def _is_rate(name: str) -> bool:
    return bool(RATE_NAME.search(name.upper()))


def _ordered(distribution: CategoricalDistribution) -> bool:
    """Whether the choices are numbers of which there are more than two."""
    return len(distribution.choices) > 2 and all(
        isinstance(c, int | float) and not isinstance(c, bool) for c in distribution.choices
    )


def _place(value: float, low: float, high: float) -> float:
    """Where a number lies between the smallest and the largest choice, from -1 to 1."""
    if low > 0 and high / low >= WIDE:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return 2 * (value - low) / (high - low) - 1
