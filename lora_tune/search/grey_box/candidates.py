"""What a proposal chooses from: hyperparameter settings and layouts, and what is believed of each, jointly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from optuna.distributions import CategoricalDistribution

from lora_tune.curves import Schedule
from lora_tune.search.grey_box.features import Coordinates, at_random, from_unit, unit
from lora_tune.search.grey_box.gaussian import Array, Joint
from lora_tune.search.grey_box.model import SearchModel
from lora_tune.search.grey_box.objective import Goal, Slopes

CONFIGURATIONS = 240
"""Random hyperparameter settings that a proposal chooses from, over all batch sizes."""
LAYOUTS = 160
"""Speed settings that a proposal chooses from."""
GROUPS = 6
"""Batch sizes (and other values that both models share) considered at once."""
TRIED = 200
"""Newest tried settings that are considered again."""
WALKS, WIDTHS, STEPS = (0.0, 1.0), (0.5, 0.35, 0.25, 0.15, 0.1, 0.05), 20
"""Walks downhill of many parameters, by how many sd below the mean each looks; widths of their rounds, points each."""

Values = Mapping[str, Any]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGroup:
    """Candidates that share a batch size: configurations (convergence only) and layouts (speed only)."""

    batch: float
    schedule: Schedule
    configurations: list[Values]
    layouts: list[Values]


def candidates(model: SearchModel, rng: np.random.Generator) -> list[BatchGroup]:
    """Configurations and layouts worth considering: random ones, those tried, and neighbours of the best tried."""
    c = model.coordinates
    layouts = _layouts(model, rng)
    by_key: dict[tuple[float, ...], list[Values]] = {}
    for values in layouts:
        by_key.setdefault(_key(c, values), []).append(values)
    tried = _best_tried(model)
    if len(by_key) > GROUPS:
        favoured = [k for k in dict.fromkeys(_key(c, v) for v in tried) if k in by_key][: GROUPS // 2]
        others = [k for k in by_key if k not in favoured]
        picked = rng.choice(len(others), GROUPS - len(favoured), replace=False)
        by_key = {k: by_key[k] for k in [*favoured, *(others[i] for i in picked)]}
    share = max(60, CONFIGURATIONS // len(by_key))
    groups = []
    for members in by_key.values():
        rows: list[Values] = []
        shared = {n: members[0][n] for n in c.convergence_names if n in c.speed_names}
        for _ in range(share):
            rows.append(shared | _random(c, rng))
        for values in tried:
            own = {n: values[n] for n in c.convergence_names if n not in shared}
            rows.append({**shared, **own})
            rows += [{**shared, **_near(c, own, rng, width)} for width in (0.05, 0.15)]
            if c.other_features:
                rows += [{**shared, **_some_moved(c, own, rng, width)} for width in (0.1, 0.3)]
        if c.other_features and tried:
            rows += [{**shared, **_downhill(model, {**tried[0], **members[0]}, rng, by)} for by in WALKS]
        unique = list({tuple(r.items()): r for r in rows}.values())
        batch = c.batch({**unique[0], **members[0]})
        groups.append(BatchGroup(batch=batch, schedule=model.schedule(batch), configurations=unique, layouts=members))
    return groups


def _key(c: Coordinates, values: Values) -> tuple[float, ...]:
    both = [n for n in c.speed_names if n in c.convergence_names]
    return (c.batch(values) if math.isfinite(c.batch(values)) else 0.0, *(hash(values[n]) for n in both))


def _random(c: Coordinates, rng: np.random.Generator) -> dict[str, Any]:
    own = [n for n in c.convergence_names if n not in c.speed_names]
    return at_random(c.distributions, own, rng)


def _near(c: Coordinates, values: Values, rng: np.random.Generator, width: float) -> dict[str, Any]:
    near: dict[str, Any] = {}
    for name, value in values.items():
        distribution = c.distributions[name]
        if isinstance(distribution, CategoricalDistribution):
            near[name] = value if rng.random() > width else from_unit(distribution, float(rng.uniform(-1, 1)))
        else:
            near[name] = from_unit(distribution, unit(distribution, value) + float(rng.normal(0, width)))
    return near


def _some_moved(c: Coordinates, values: Values, rng: np.random.Generator, width: float) -> dict[str, Any]:
    """A neighbour in two of many parameters, so that one direction after the other is tried."""
    chosen = {str(n) for n in rng.choice(sorted(values), min(2, len(values)), replace=False)}
    return {**values, **_near(c, {n: v for n, v in values.items() if n in chosen}, rng, width)}


def _downhill(model: SearchModel, values: Values, rng: np.random.Generator, optimism: float) -> Values:
    """Where a walk from ``values`` ends that takes what is believed best of neighbours in one or two parameters.

    Of many parameters no random point and no neighbour of what has run is near what the model believes best.
    """
    c, goal = model.coordinates, model.goal
    batch = c.batch(values)
    schedule, own = model.schedule(batch), [n for n in c.convergence_names if n not in c.speed_names]
    for width in WIDTHS:
        near = [values, *({**values, **_some_moved(c, {n: values[n] for n in own}, rng, width)} for _ in range(STEPS))]
        joint = model.ln_samples(near)
        sd, total = np.sqrt(joint.variance), np.array([c.total_samples(v) for v in near])
        hoped = goal.scored_ln_samples(joint.mean - optimism * sd, sd, batch, schedule)
        values = near[int(np.argmin(hoped + goal.log_risk(joint.mean, sd, total, schedule)))]
    return {n: values[n] for n in own}


def _best_tried(model: SearchModel) -> list[Values]:
    """Hyperparameters tried in this study, the most promising twenty by what the model makes of them."""
    tried = [o.values for o in model.observations if not o.source and not o.infeasible]
    if not tried:
        return []
    names = model.coordinates.convergence_names
    unique = list({tuple(v[n] for n in names): v for v in tried}.values())[-TRIED:]
    return [unique[i] for i in np.argsort(model.ln_samples(unique).mean)[:20]]


def _layouts(model: SearchModel, rng: np.random.Generator) -> list[Values]:
    c = model.coordinates
    if not c.speed_names:
        return [{}]
    if c.layout is not None and c.speed_names == (c.layout,):
        everything: list[Values] = [{c.layout: choice} for choice in c.batches_by_layout]
        if len(everything) <= LAYOUTS:
            return everything
        picked = rng.choice(len(everything), LAYOUTS, replace=False)
        rows = [everything[i] for i in picked]
    else:
        rows = [at_random(c.distributions, c.speed_names, rng) for _ in range(LAYOUTS)]
    tried = [{n: o.values[n] for n in c.speed_names} for o in model.observations if not o.source]
    rows += tried[-60:]
    rows += [_near(c, row, rng, 0.3) for row in tried[-20:]]
    return list({tuple(r.items()): r for r in rows}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Beliefs:
    """Beliefs over all candidates of all groups, laid end to end; ``rows[g]`` and ``columns[g]`` are group g's.

    configurations (n): ln samples, ``joint``; ``total``: samples at which training ends.
    layouts (m): ``speed`` and ``evals``, ln samples/s and ln seconds per eval; ``spread``: sd of ln seconds,
    ``together`` (m, m): its covariance; ``death``: chance of OOM, ``death_after`` one more survival; ``tested``: it
    ran in this study; ``due``: it runs now. slopes: per group, how its score follows its samples.
    """

    groups: list[BatchGroup]
    rows: list[slice]
    columns: list[slice]
    joint: Joint
    total: Array
    speed: Array
    evals: Array
    spread: Array
    together: Array
    death: Array
    death_after: Array
    tested: Flags
    due: Flags
    slopes: list[Slopes]

    @property
    def death_doubt(self) -> Array:
        """Sd of the death rates (m): a Beta belief of mean ``death`` that becomes ``death_after`` with one survival."""
        weight = self.death_after / np.maximum(self.death - self.death_after, 1e-9)
        return np.asarray(np.sqrt(self.death * (1 - self.death) / (weight + 1)))

    def survivals(self, runs: int) -> tuple[Array, Array, Array]:
        """Of ``runs`` runs in a row of each layout, ended by its first death: chance that all live, runs expected, and
        the chance of death after that (m each), for the Beta beliefs of :attr:`death_doubt`."""
        weight = np.maximum(self.death_after / np.maximum(self.death - self.death_after, 1e-9), 1e-9)
        alive, expected = np.ones(len(weight)), np.zeros(len(weight))
        for done in range(runs):
            expected = expected + alive
            alive = alive * ((1 - self.death) * weight + done) / (weight + done)
        return alive, expected, self.death * weight / (weight + runs)

    @property
    def mean(self) -> Array:
        """Mean of ln samples (n)."""
        return self.joint.mean

    @property
    def sd(self) -> Array:
        """Sd of ln samples (n)."""
        return np.sqrt(self.joint.variance)

    def configuration_logs(self, goal: Goal, mean: Array, sd: Array) -> Array:
        """Expected ln of the samples that count, rules, evals and risk included: (n), or (n, k) as ``mean`` is.

        Differences within a group are those of ln(score).
        """
        logs = np.empty(np.broadcast_shapes(mean.shape, sd.shape))
        for g, rows in enumerate(self.rows):
            logs[rows] = self.group_logs(goal, g, mean[rows], sd[rows])
        return logs

    def group_logs(self, goal: Goal, g: int, mean: Array, sd: Array) -> Array:
        """The same of group g alone, whose configurations are the first of one axis and the second to last of more."""
        group, total = self.groups[g], self.total[self.rows[g]]
        total = total if mean.ndim == 1 else total[:, None]
        scored = goal.scored_ln_samples(mean, sd, group.batch, group.schedule)
        return self.slopes[g].log_score(mean, scored) + goal.log_risk(mean, sd, total, group.schedule)

    def layout_logs(self, goal: Goal, ln_samples: Sequence[float]) -> Array:
        """ln of the seconds per layout (m) of runs that count as ``ln_samples[g]`` in group g, if they live."""
        logs = np.empty(len(self.speed))
        for group, columns, needed, slopes in zip(self.groups, self.columns, ln_samples, self.slopes, strict=True):
            speed, evals = np.exp(self.speed[columns]), np.exp(self.evals[columns])
            logs[columns] = goal.log_seconds(np.array([slopes.at]), speed, evals, group.schedule) + needed - slopes.at
        return logs


def believe(model: SearchModel, groups: list[BatchGroup]) -> Beliefs:
    """Predictions for every candidate, jointly, so that what one run says of the others is known."""
    c = model.coordinates
    configurations: list[Values] = []
    layouts: list[Values] = []
    rows, columns = [], []
    for group in groups:
        rows.append(slice(len(configurations), len(configurations) + len(group.configurations)))
        columns.append(slice(len(layouts), len(layouts) + len(group.layouts)))
        configurations += [{**group.layouts[0], **v} for v in group.configurations]
        layouts += group.layouts
    speed, speed_covariance, evals, eval_covariance = model.predict_speed(layouts)
    death, death_after = model.memory.chance(layouts)
    here = [o for o in model.observations if not o.source]
    tested = {tuple(c.speed_features(o.values)) for o in here if o.ran}
    due = {tuple(c.speed_features(o.values)) for o in here if o.open}
    keys = [tuple(c.speed_features(v)) for v in layouts]
    beliefs = Beliefs(
        groups=groups, rows=rows, columns=columns, joint=model.ln_samples(configurations),
        total=np.array([c.total_samples(v) for v in configurations]), speed=speed, evals=evals,
        spread=np.zeros(len(layouts)), together=np.zeros((len(layouts), len(layouts))),
        death=death, death_after=death_after,
        tested=np.array([k in tested for k in keys]), due=np.array([k in due for k in keys]), slopes=[],
    )  # fmt: skip
    beliefs.slopes[:] = [_slopes(model.goal, beliefs, g) for g in range(len(groups))]
    share = _eval_share(model.goal, beliefs)
    beliefs.together[:] = (1 - share) ** 2 * speed_covariance + share**2 * eval_covariance
    beliefs.spread[:] = np.sqrt(np.diag(beliefs.together))
    return beliefs


def _slopes(goal: Goal, beliefs: Beliefs, g: int) -> Slopes:
    """Around the best that group g may hope for, by reference or belief, on its fastest layout that may well live."""
    group, columns = beliefs.groups[g], beliefs.columns[g]
    at = max(float(beliefs.mean[beliefs.rows[g]].min()), goal.ln_reference(group.batch, group.schedule))
    speed, evals = np.exp(beliefs.speed[columns]), np.exp(beliefs.evals[columns])
    seconds = goal.log_seconds(np.array([at]), speed, evals, group.schedule)
    m = int(np.argmin(seconds + beliefs.death[columns]))
    return goal.slopes(at, float(speed[m]), float(evals[m]), group.schedule)


def _eval_share(goal: Goal, beliefs: Beliefs) -> float:
    """Share of evals in the seconds of a typical good run."""
    schedule, at = beliefs.groups[0].schedule, np.array([float(beliefs.mean[beliefs.rows[0]].min())])
    speed, evals = np.exp(beliefs.speed[:1]), np.exp(beliefs.evals[:1])
    both = goal.log_seconds(at, speed, evals, schedule)
    return float(1 - np.exp(goal.log_seconds(at, speed, np.zeros(1), schedule) - both)[0])
