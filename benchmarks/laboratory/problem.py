"""A problem of the laboratory: a surface, the space that is searched, and the truth about its best point."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution

from lora_tune.config.space import Space
from lora_tune.search.grey_box.features import Coordinates, at_random, from_unit, unit
from lora_tune_simulation.simulated_run import SimulatedRun, rcp_samples

CLOSED_INTERVAL = 384.0
"""Samples between evals in the closed division."""

EXACT_DRAWS = 16_384
"""Simulated runs behind an exact score; the usual 512 leave an error of 0.3% of a score, as large as late claims."""
EXACT_TRIES = 40
"""Configurations that are scored exactly in search of the exact best, lowest usual score first."""
FEW, ROUNDS, MORE = 4, 160, 100
"""Rounds of a walk to the best point, and as many more for each parameter beyond ``FEW``: then it also moves one or two
alone, since a step of all at once seldom leads downhill."""

Values = Mapping[str, Any]


@dataclass
class Problem:
    """surface: has ``outcome(parameters, seed)`` and ``expected_score(parameters)``. nodes: of one trial.

    trial_minutes: the time limit that every method's runs are held to. interval: samples between evals; None: the
    closed division's schedule, and the published Llama-2-70B results are about this problem. start: where the
    user stands before any search, the published entry or the script's own defaults; every method measures it first.
    joint: every parameter may drive speed and convergence, so that the best point is searched over all of them at once.
    """

    name: str
    surface: Any
    space: Space
    nodes: int = 1
    target: float = 0.925
    trial_minutes: float = 60.0
    interval: float | None = None
    start: Values | None = None
    joint: bool = False
    _scores: dict[tuple[Any, ...], float] = field(default_factory=dict)
    _exact: dict[tuple[Any, ...], float] = field(default_factory=dict)

    @property
    def published(self) -> bool:
        """Whether published results are about this problem."""
        return self.interval is None

    @property
    def probe_samples(self) -> float:
        """Samples that a probe trains: two blocks."""
        return 2 * (self.interval or CLOSED_INTERVAL)

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The tuned parameters."""
        return self.space.distributions()

    @cached_property
    def coordinates(self) -> Coordinates:
        """The parameters by what they decide."""
        return Coordinates(distributions=self.distributions, gpus=self.space.gpus)

    def score(self, tuned: Values) -> float:
        """The true expected score of tuned values, seconds; computed once."""
        key = tuple(sorted(tuned.items()))
        if key not in self._scores:
            self._scores[key] = float(self.surface.expected_score(self.space.resolve(tuned)))
        return self._scores[key]

    def exact_score(self, tuned: Values) -> float:
        """The same from 32 times as many simulated runs, where it is simulated: an error of 0.05%. Computed once."""
        if not isinstance(self.surface, SimulatedRun):
            return self.score(tuned)
        key = tuple(sorted(tuned.items()))
        if key not in self._exact:
            self._exact[key] = float(self.surface.expected_score(self.space.resolve(tuned), EXACT_DRAWS))
        return self._exact[key]

    @cached_property
    def exact_best(self) -> float:
        """The lowest exact score: of the best configurations by the usual score, and of neighbours of the best."""
        usual = self.best
        if not isinstance(self.surface, SimulatedRun):
            return usual
        lowest = sorted(self._scores, key=self._scores.__getitem__)
        point = min((dict(key) for key in lowest[:EXACT_TRIES]), key=self.exact_score)
        rng = np.random.default_rng(6)
        names = self.coordinates.convergence_names
        for round_ in range(2 * EXACT_TRIES):
            near = self._near({n: point[n] for n in names}, 0.1 * 0.96**round_, rng)
            point = min(point, {**point, **near}, key=self.exact_score)
        return self.exact_score(point)

    @cached_property
    def best(self) -> float:
        """The lowest expected score of the space, by random and local search."""
        return self._best_jointly() if self.joint else self._best_by_batch()

    def _best_jointly(self) -> float:
        rng = np.random.default_rng(5)
        names = tuple(self.distributions)
        tries = [self._random(rng, names) for _ in range(800)]
        for point in sorted([*tries, *([dict(self.start)] if self.start else [])], key=self.score)[:2]:
            self._descend(point, {}, rng)
        return min(self._scores.values())

    def _best_by_batch(self) -> float:
        """Hyperparameters for each batch size on its best layout so far, then every layout at those, twice over."""
        rng = np.random.default_rng(5)
        c = self.coordinates
        names = c.convergence_names
        layouts = [self._random(rng, c.speed_names) for _ in range(200)]
        if c.layout is not None and c.speed_names == (c.layout,):
            layouts = [{c.layout: choice} for choice in c.batches_by_layout]
        by_batch: dict[float, list[dict[str, Any]]] = {}
        for layout in layouts:
            by_batch.setdefault(c.batch(layout), []).append(layout)
        lowest = math.inf
        for members in by_batch.values():
            tries = [(self._random(rng, names), members[rng.integers(len(members))]) for _ in range(400)]
            point, layout = min(tries, key=lambda t: self.score({**t[0], **t[1]}))
            for _ in range(2):
                point = self._descend(point, layout, rng)
                layout = min(members, key=lambda m: self.score({**point, **m}))
            lowest = min(lowest, self.score({**point, **layout}))
        return min(lowest, *self._scores.values())

    def _random(self, rng: np.random.Generator, names: tuple[str, ...]) -> dict[str, Any]:
        return at_random(self.distributions, names, rng)

    def _descend(self, point: dict[str, Any], layout: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        trials = [self._random(rng, tuple(point)) for _ in range(250)]
        best = min([point, *trials], key=lambda p: self.score({**p, **layout}))
        rounds = ROUNDS + MORE * max(0, len(point) - FEW)
        for round_ in range(rounds):
            width = 0.3 * 0.97 ** (round_ * ROUNDS / rounds)
            near = {**best, **self._near(self._some(best, rng), width, rng)}
            best = min(best, near, key=lambda p: self.score({**p, **layout}))
        return best

    def _some(self, point: Mapping[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
        """All parameters of a point where they are few; else one, two or all, as chance has it."""
        if len(point) <= FEW:
            return point
        count = (1, 2, len(point))[int(rng.integers(3))]
        return {str(n): point[str(n)] for n in rng.choice(sorted(point), count, replace=False)}

    def _near(self, point: Mapping[str, Any], width: float, rng: np.random.Generator) -> dict[str, Any]:
        """A point beside ``point``: sd ``width`` of the half range along each of its parameters."""
        return {n: self._moved(n, v, width, rng) for n, v in point.items()}

    def _moved(self, name: str, value: Any, width: float, rng: np.random.Generator) -> Any:
        spread = self.distributions[name]
        if isinstance(spread, CategoricalDistribution):
            return from_unit(spread, float(rng.uniform(-1, 1))) if rng.random() < width else value
        return from_unit(spread, unit(spread, value) + float(rng.normal(0, width)))

    def single_run_factor(self, tuned: Values, samples: float) -> float:
        """What RCP normalisation makes of one run that stopped after ``samples``, where the score is normalised."""
        if getattr(self.surface, "score", "") != "mlperf_score":
            return 1.0
        return max(1.0, rcp_samples(int(self.coordinates.batch(tuned))) / samples)

    def regret(self, tuned: Values) -> float:
        """Score of tuned values over the best, less 1."""
        return max(0.0, self.score(tuned) / self.best - 1)

    def exact_regret(self, tuned: Values) -> float:
        """The same by exact scores, for what claims are held against."""
        return max(0.0, self.exact_score(tuned) / self.exact_best - 1)
