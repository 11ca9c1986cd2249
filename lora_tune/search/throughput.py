"""Sampler for studies of samples/s alone: layouts and switches, speed and memory, no convergence.

Throughput has almost no noise, and a layout either fits into memory or not, so points are not repeated. Each proposal
has the highest expected improvement of the best throughput (Jones et al., 1998), times its chance to fit into memory,
per expected node-hour. Models of speed and memory: :mod:`lora_tune.search.grey_box.model`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

from lora_tune.config.layout import Layout, parse_layout
from lora_tune.config.parameters import Conditions
from lora_tune.search.grey_box.features import Coordinates, at_random, from_unit, unit
from lora_tune.search.grey_box.gaussian import Array, positive_part
from lora_tune.search.grey_box.memory import needs_as_much
from lora_tune.search.grey_box.model import SearchModel, learn
from lora_tune.search.grey_box.objective import Goal
from lora_tune.search.observations import Observation
from lora_tune.search.physics import StudyPhysics
from lora_tune.search.recorded import annotate, of_trial

CANDIDATES = 600
"""Random candidates per proposal, in addition to neighbours of the fastest points."""
FASTEST = 5
"""Number of fastest points whose neighbours are candidates."""
EXCLUDED_RISK = 0.9999
"""Risk of a point that needs at least the memory of one that ran out of it."""
DEATH_SHARE = 0.5
"""Cost of an out-of-memory run relative to a successful one: it ends before it is measured."""

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A proposal: expected speed in samples/s, gain over the fastest known (a share; NaN without one), risk.

    improvement: expected decrease of the best ln(seconds per sample), per trial that does not run out of memory.
    """

    values: dict[str, Any]
    speed: float
    gain: float
    risk: float
    improvement: float

    def why(self, unit: str) -> str:
        """Reason in one sentence. unit: what the log counts, in the plural."""
        risk = f"{100 * self.risk:.0f}% risk of running out of memory or of being refused"
        if math.isnan(self.gain):
            return f"nothing was measured yet: likely to be fast and to fit; {risk}"
        return f"about {self.speed:.3g} {unit}/s expected, {100 * self.gain:+.1f}% from the fastest so far; {risk}"


class ThroughputSampler(BaseSampler):
    """Proposes points of ``distributions`` for trials that report ``samples_per_second`` or run out of memory.

    gpus: per trial. physics: memory model, if there is one. conditions: which parameters exist only under others'
    values. unit: what logs count, for people. Attributes read: see :mod:`lora_tune.search.recorded`; sets ``why`` on
    each trial.
    """

    def __init__(
        self,
        distributions: Mapping[str, BaseDistribution],
        *,
        gpus: int = 1,
        seed: int | None = None,
        physics: StudyPhysics | None = None,
        conditions: Conditions | None = None,
        unit: str = "samples",
    ) -> None:
        self._distributions = dict(distributions)
        self._coordinates = Coordinates(
            distributions=self._distributions, gpus=gpus, roles=dict.fromkeys(distributions, "speed"),
            conditions=conditions or Conditions(),
        )  # fmt: skip
        self._rng = np.random.default_rng(seed)
        self._random = RandomSampler(seed=seed)
        self._physics, self._unit = physics, unit
        self._chosen: tuple[object, tuple[Choice | None, list[Observation]]] = (None, (None, []))

    def reseed_rng(self) -> None:
        """Reseed for a worker process."""
        self._rng = np.random.default_rng()
        self._random.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters."""
        return dict(self._distributions)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Values of the best untried point; empty, so that they are drawn at random, after all have been tried."""
        choice, _ = self._choice(study, skip=trial.number)
        if choice is None:
            return {}
        annotate(study, trial, why=choice.why(self._unit))
        return choice.values

    def expected_gain(self, study: optuna.Study) -> float | None:
        """Expected improvement of the best throughput by the next node-hour, as a share; None before a measurement."""
        choice, observations = self._choice(study)
        hours = [o.node_hours for o in observations if o.samples_per_second > 0 and o.node_hours > 0]
        if not hours:
            return None
        return math.expm1(min(700.0, choice.improvement / median(hours))) if choice else 0.0

    def _choice(self, study: optuna.Study, skip: int = -1) -> tuple[Choice | None, list[Observation]]:
        """The best point that no trial except ``skip`` has had, or None, and the observations.

        Cached until a trial starts or ends, since a study with ``stop_below`` calls it at every tick.
        """
        names = frozenset(self._distributions)
        trials = [t for t in study.get_trials(deepcopy=False) if t.number != skip and names <= t.params.keys()]
        state = [(t.number, t.state) for t in trials]
        if state != self._chosen[0]:
            self._chosen = (state, self._choice_now(trials, names))
        return self._chosen[1]

    def _choice_now(
        self, trials: Sequence[FrozenTrial], names: frozenset[str]
    ) -> tuple[Choice | None, list[Observation]]:
        observations = [o for t in trials if (o := of_trial(t, names, -math.inf))]
        rested = self._coordinates.conditions.rested
        tried = {_key(rested(t.params)) for t in trials if t.state is not TrialState.WAITING}
        points = candidates(self._coordinates, observations, tried, self._rng)
        if not points:
            return None, observations
        return best(learn(self._coordinates, Goal(), observations, needs=self._physics), points), observations

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """At random: only after every point has been tried."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)


def best(model: SearchModel, points: Sequence[Values]) -> Choice:
    """The point with the highest expected improvement per node-hour."""
    mean, covariance, _, _ = model.predict_speed(points)
    sd = np.sqrt(np.diag(covariance))
    risk = risk_of(model, points)
    measured = [math.log(o.samples_per_second) for o in model.observations if o.samples_per_second > 0]
    # Without measurements the incumbent is set below the slowest prediction.
    known = max(measured, default=float(mean.min()) - 1)
    risk = 1 - (1 - risk) * (1 - _refused(model, points))
    gain = (1 - risk) * positive_part(mean - known, sd)
    rate = gain / (1 - (1 - DEATH_SHARE) * risk)
    at = int(np.argmax(rate / np.array([model.coordinates.nodes(p) for p in points])))
    return Choice(
        values=dict(points[at]),
        speed=math.exp(mean[at]),
        gain=math.expm1(mean[at] - known) if measured else math.nan,
        risk=float(risk[at]),
        improvement=float(rate[at]),
    )


def _refused(model: SearchModel, points: Sequence[Values]) -> Array:
    """Probability (n) that the trial's program rejects a point. Points that ran out of memory were accepted."""
    local = [o for o in model.observations if not o.source]
    taken = [o.values for o in local if o.ran or (o.infeasible and not o.refused)]
    return refused_chance(points, [o.values for o in local if o.refused], taken)


def risk_of(model: SearchModel, points: Sequence[Values]) -> Array:
    """Probability (n) that a point runs out of memory, by the model; near 1 if a failed point needed no more."""
    c = model.coordinates
    risk, _ = model.memory.chance(points)
    died = [o.values for o in model.observations if o.infeasible and not o.refused]
    if not died:
        return risk
    x, dead = (np.array([c.memory_features(v) for v in rows]) for rows in (points, died))
    return np.where(needs_as_much(x, dead, c.memory_labels), np.maximum(risk, EXCLUDED_RISK), risk)


def candidates(
    c: Coordinates, observations: Sequence[Observation], tried: Collection[tuple[Any, ...]], rng: np.random.Generator
) -> list[Values]:
    """Random points of the space, and the neighbours in one parameter of the fastest points; without tried ones."""
    rows: list[Values] = [at_random(c.distributions, c.distributions, rng) for _ in range(CANDIDATES)]
    known = sorted((o for o in observations if o.samples_per_second > 0), key=lambda o: -o.samples_per_second)
    for o, (name, d) in itertools.product(known[:FASTEST], c.distributions.items()):
        rows += [{**o.values, name: value} for value in _steps(d, o.values[name])]
    return [row for key, row in {_key(c.conditions.rested(row)): row for row in rows}.items() if key not in tried]


def _steps(distribution: BaseDistribution, value: Any) -> list[Any]:
    """All other categories, or a number moved by a tenth and a third of its range in both directions."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    return [from_unit(distribution, unit(distribution, value) + step) for step in (-0.67, -0.2, 0.2, 0.67)]


def _key(values: Values) -> tuple[Any, ...]:
    return tuple(sorted(values.items()))


# Predicts which points a trial's libraries will reject, from rejected and accepted points.
#
# A rule is one value, or two values, that are not allowed (together). For each rejected point all such rules that no
# accepted point violates are equally likely. So the chance that another point is rejected is the share of them that it
# violates: a version space (Mitchell 1982, "Generalization as search") with a vote.


Literal = tuple[str, Any]
Rule = frozenset[Literal]


def refused_chance(points: Sequence[Values], refused: Sequence[Values], accepted: Sequence[Values]) -> Array:
    """Probability (n) that each of ``points`` is rejected, given rejected and accepted points."""
    taken = [_literals(values) for values in accepted]
    chance = np.zeros(len(points))
    if not refused:
        return chance
    points_of = [_literals(values) for values in points]
    for values in refused:
        local = _literals(values)
        rules = [rule for rule in _rules(local) if not any(rule <= known for known in taken)]
        for at, point in enumerate(points_of):
            broken = sum(rule <= point for rule in rules) / len(rules) if rules else 0.0
            chance[at] = 1 - (1 - chance[at]) * (1 - (1.0 if point == local else broken))
    return chance


def _rules(literals: frozenset[Literal]) -> Iterable[Rule]:
    ordered = sorted(literals, key=str)
    return map(frozenset, itertools.chain(((one,) for one in ordered), itertools.combinations(ordered, 2)))


def _literals(values: Values) -> frozenset[Literal]:
    """A point's values, with a layout split into its degrees, and for integers whether they are 0."""
    literals: set[Literal] = set()
    for name, value in values.items():
        layout = _layout(value)
        if layout is not None:
            literals |= {(field.name, getattr(layout, field.name)) for field in fields(layout)}
            continue
        literals.add((name, value))
        if isinstance(value, int) and not isinstance(value, bool) and value not in (0, 1):
            literals.add((f"{name} > 0", value > 0))
    return frozenset(literals)


def _layout(value: Any) -> Layout | None:
    try:
        return parse_layout(value) if isinstance(value, str) else None
    except (ValueError, TypeError):
        return None
