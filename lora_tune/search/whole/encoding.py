"""Parameters as features of the whole-configuration model, and which pieces of a run each is guessed to drive."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution

from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.gaussian import Array
from lora_tune.search.grey_box.unit_range import coder, from_unit, half_folds, is_ordered, one_hot

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
        return [x for name, coded in self._coders.items() for x in coded(values[name])]

    def rows(self, points: Sequence[Values]) -> Array:
        """The features of configurations (n, d)."""
        return np.array([self.row(p) for p in points], dtype=np.float64).reshape(len(points), len(self.owners))

    @cached_property
    def owners(self) -> tuple[str, ...]:
        """The parameter that each feature belongs to."""
        return tuple(n for n, d in self.distributions.items() for _ in self._coders[n](from_unit(d, 0.0)))

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
        return tuple(max(1.0, half_folds(self.distributions[n]) / UNIT) if _is_rate(n) else 1.0 for n in self.owners)

    def _bend(self, name: str) -> float:
        folds = min(half_folds(self.distributions[name]), MOST_FOLDS)
        least = min(LEAST_BEND, ALL_BENDS / len(self.distributions))
        return least + (RATE_BEND if _is_rate(name) else OTHER_BEND) * folds**2

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
        return not isinstance(distribution, CategoricalDistribution) or is_ordered(distribution)

    @cached_property
    def _coders(self) -> Mapping[str, Callable[[Any], list[float]]]:
        """What makes features of each parameter's values."""
        return {name: self._coder(name, distribution) for name, distribution in self.distributions.items()}

    def _coder(self, name: str, distribution: BaseDistribution) -> Callable[[Any], list[float]]:
        if name == self.coordinates.layout:
            return self._layouts.__getitem__
        return coder(distribution) if self._is_number(name) else one_hot(distribution.choices)  # type: ignore[attr-defined]


def _is_rate(name: str) -> bool:
    return bool(RATE_NAME.search(name.upper()))
