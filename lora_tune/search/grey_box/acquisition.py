"""Acquisition: the action with the highest expected improvement of the recommendation per node-hour.

Knowledge gradient (Frazier, Powell, Dayanik 2009, "The knowledge-gradient policy for correlated normal beliefs") on the
composed score. For each action it is the expected decrease of the lowest expected ln(score) after its result. A run
informs about samples at its hyperparameters and seconds of its layout; the value includes its risk of running out of
memory and its cost. A single noisy run near the best has almost no value, so each full run is valued as several seeds
at once and credited per run (Frazier and Powell 2010, "Paradoxes in learning and the marginal value of information").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from optuna.distributions import CategoricalDistribution

from lora_tune.base.scatter import SEED_SD
from lora_tune.curves import Schedule
from lora_tune.search.grey_box.features import Coordinates, at_random, from_unit, unit
from lora_tune.search.grey_box.gaussian import Array, Joint
from lora_tune.search.grey_box.memory import death_logs
from lora_tune.search.grey_box.model import SearchModel
from lora_tune.search.grey_box.objective import Goal

Values = Mapping[str, Any]

# Candidates of a proposal: hyperparameter settings and layouts, with their joint posterior.


CONFIGURATIONS = 240
"""Random hyperparameter settings per proposal, over all batch sizes."""
LAYOUTS = 160
"""Speed settings per proposal."""
GROUPS = 6
"""Batch sizes (and other values shared by both models) considered at once."""
TRIED = 200
"""Most recent tried settings that are candidates again."""
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGroup:
    """Candidates with the same batch size: configurations (convergence only) and layouts (speed only)."""

    batch: float
    schedule: Schedule
    configurations: list[Values]
    layouts: list[Values]


def candidates(model: SearchModel, rng: np.random.Generator) -> list[BatchGroup]:
    """Candidate configurations and layouts: random ones, tried ones, and neighbours of the best tried ones."""
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
            free = {n: values[n] for n in c.convergence_names if n not in shared}
            rows.append({**shared, **free})
            rows += [{**shared, **_jittered(c, free, rng, width)} for width in (0.05, 0.15)]
            if c.other_features:
                rows += [{**shared, **_some_moved(c, free, rng, width)} for width in (0.1, 0.3, 1.0)]
        unique = list({tuple(r.items()): r for r in rows}.values())
        batch = c.batch({**unique[0], **members[0]})
        groups.append(BatchGroup(batch=batch, schedule=model.schedule(batch), configurations=unique, layouts=members))
    return groups


def _key(c: Coordinates, values: Values) -> tuple[float, ...]:
    both = [n for n in c.speed_names if n in c.convergence_names]
    return (c.batch(values) if math.isfinite(c.batch(values)) else 0.0, *(hash(values[n]) for n in both))


def _random(c: Coordinates, rng: np.random.Generator) -> dict[str, Any]:
    free = [n for n in c.convergence_names if n not in c.speed_names]
    return at_random(c.distributions, free, rng)


def _jittered(c: Coordinates, values: Values, rng: np.random.Generator, width: float) -> dict[str, Any]:
    jittered: dict[str, Any] = {}
    for name, value in values.items():
        distribution = c.distributions[name]
        if isinstance(distribution, CategoricalDistribution):
            jittered[name] = value if rng.random() > width else from_unit(distribution, float(rng.uniform(-1, 1)))
        else:
            jittered[name] = from_unit(distribution, unit(distribution, value) + float(rng.normal(0, width)))
    return jittered


def _some_moved(c: Coordinates, values: Values, rng: np.random.Generator, width: float) -> dict[str, Any]:
    """A neighbour that differs in two of many parameters, so that directions are explored one by one."""
    chosen = {str(n) for n in rng.choice(sorted(values), min(2, len(values)), replace=False)}
    return {**values, **_jittered(c, {n: v for n, v in values.items() if n in chosen}, rng, width)}


def _best_tried(model: SearchModel) -> list[Values]:
    """Up to twenty hyperparameter settings tried in this study with the lowest posterior mean."""
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
    rows += [_jittered(c, row, rng, 0.3) for row in tried[-20:]]
    return list({tuple(r.items()): r for r in rows}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePosterior:
    """Posterior over all candidates of all groups, concatenated; ``rows[g]`` and ``columns[g]`` select group g.

    configurations (n): ln samples, ``joint``; ``total``: samples at which training ends. layouts (m): ``speed`` and
    ``evals``, ln samples/s and ln seconds per eval; ``spread``: sd of ln seconds, ``covariance`` (m, m): its
    covariance; ``death``: probability of OOM, ``death_after``: the same after one more success; ``tested``: it ran in
    this study; ``due``: it is running. anchors: per group, ln samples at which layouts are compared.
    """

    groups: list[BatchGroup]
    rows: list[slice]
    columns: list[slice]
    joint: Joint
    total: Array
    speed: Array
    evals: Array
    spread: Array
    covariance: Array
    death: Array
    death_after: Array
    tested: Flags
    due: Flags
    anchors: list[float]

    @property
    def death_sd(self) -> Array:
        """Sd of the OOM probabilities (m): a Beta distribution with mean ``death``, and ``death_after`` after one
        success."""
        weight = self.death_after / np.maximum(self.death - self.death_after, 1e-9)
        return np.asarray(np.sqrt(self.death * (1 - self.death) / (weight + 1)))

    @property
    def mean(self) -> Array:
        """Mean of ln samples (n)."""
        return self.joint.mean

    @property
    def sd(self) -> Array:
        """Sd of ln samples (n)."""
        return np.sqrt(self.joint.variance)

    def configuration_logs(self, goal: Goal, mean: Array, sd: Array) -> Array:
        """Expected ln of the scored samples, including rules, evals and the risk of not finishing: (n), or (n, k) like
        ``mean``.

        Differences within a group equal those of ln(score).
        """
        logs = np.empty(np.broadcast_shapes(mean.shape, sd.shape))
        for g, rows in enumerate(self.rows):
            logs[rows] = self.group_logs(goal, g, mean[rows], sd[rows])
        return logs

    def group_logs(self, goal: Goal, g: int, mean: Array, sd: Array) -> Array:
        """The same for group g; its configurations are the first of one axis, the second to last of more."""
        group, total = self.groups[g], self.total[self.rows[g]]
        total = total if mean.ndim == 1 else total[:, None]
        scored = goal.scored_ln_samples(mean, sd, group.batch, group.schedule)
        return scored + goal.log_risk(mean, sd, total, group.schedule)

    def layout_logs(self, goal: Goal, ln_samples: Sequence[float]) -> Array:
        """ln seconds per layout (m) of successful runs with scored ln samples ``ln_samples[g]`` in group g."""
        logs = np.empty(len(self.speed))
        for group, columns, needed, at in zip(self.groups, self.columns, ln_samples, self.anchors, strict=True):
            speed, evals = np.exp(self.speed[columns]), np.exp(self.evals[columns])
            logs[columns] = goal.log_seconds(np.array([at]), speed, evals, group.schedule) + needed - at
        return logs


def predict_all(model: SearchModel, groups: list[BatchGroup]) -> CandidatePosterior:
    """Joint predictions for all candidates."""
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
    local = [o for o in model.observations if not o.source]
    tested = {tuple(c.speed_features(o.values)) for o in local if o.ran}
    due = {tuple(c.speed_features(o.values)) for o in local if o.open}
    keys = [tuple(c.speed_features(v)) for v in layouts]
    beliefs = CandidatePosterior(
        groups=groups, rows=rows, columns=columns, joint=model.ln_samples(configurations),
        total=np.array([c.total_samples(v) for v in configurations]), speed=speed, evals=evals,
        spread=np.zeros(len(layouts)), covariance=np.zeros((len(layouts), len(layouts))),
        death=death, death_after=death_after,
        tested=np.array([k in tested for k in keys]), due=np.array([k in due for k in keys]), anchors=[],
    )  # fmt: skip
    # The best possible crossing of a group: the reference, or the lowest posterior mean if that is higher.
    beliefs.anchors[:] = [
        max(float(beliefs.mean[rows_].min()), model.goal.ln_reference(group.batch, group.schedule))
        for group, rows_ in zip(groups, rows, strict=True)
    ]
    share = _eval_share(model.goal, beliefs)
    beliefs.covariance[:] = (1 - share) ** 2 * speed_covariance + share**2 * eval_covariance
    beliefs.spread[:] = np.sqrt(np.diag(beliefs.covariance))
    return beliefs


def _eval_share(goal: Goal, beliefs: CandidatePosterior) -> float:
    """Share of evals in the seconds of a typical good run."""
    schedule, at = beliefs.groups[0].schedule, np.array([float(beliefs.mean[beliefs.rows[0]].min())])
    speed, evals = np.exp(beliefs.speed[:1]), np.exp(beliefs.evals[:1])
    both = goal.log_seconds(at, speed, evals, schedule)
    return float(1 - np.exp(goal.log_seconds(at, speed, np.zeros(1), schedule) - both)[0])


# The value of each action.


Rows = npt.NDArray[np.int64]

SEEDS = 3
"""Number of seeds as which a full run is valued."""
OOM_SECONDS = 60.0
"""Seconds of an out-of-memory job beyond its start-up."""
CAP = 1.25
"""Expected cost of a bad run relative to a good one, since it is stopped early."""
PROBE_BLOCKS = 2
"""Eval intervals of a probe: a cold block and a warm one."""
ACTIONS = 60
"""Maximum number of configurations that are valued as actions."""
Z, WEIGHTS = np.polynomial.hermite_e.hermegauss(9)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
"""Gauss-Hermite nodes and weights of a standard normal; improvements are often in its tails."""
UNTRIED = 0.3
"""Excess in ln(score) of having no tested layout over the average layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An action with its value. gain: expected decrease of ln(score) of the recommendation.

    kind: "full" or "probe". node_hours: expected cost. new_layout: the layout has not run yet. risk: of running out of
    memory.
    """

    values: Values
    kind: str
    gain: float
    node_hours: float
    new_layout: bool
    risk: float

    @property
    def rate(self) -> float:
        """Gain per node-hour."""
        return self.gain / max(self.node_hours, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Now:
    """The current state against which actions are valued.

    first: per group, the row of its best configuration; lowest: its ln samples. logs (m): ln seconds of layouts at
    those, including OOM failures. alive (m): the same for successful runs. best: per group, the lowest of its usable
    layouts. value: the minimum of these, i.e. the recommendation's.
    """

    first: npt.NDArray[np.int64]
    lowest: Array
    logs: Array
    alive: Array
    best: Array
    value: float


def _now(model: SearchModel, beliefs: CandidatePosterior) -> _Now:
    logs_of = beliefs.configuration_logs(model.goal, beliefs.mean, beliefs.sd)
    first = np.array([int(np.argmin(logs_of[rows])) + rows.start for rows in beliefs.rows])
    lowest = logs_of[first]
    alive = beliefs.layout_logs(model.goal, [float(v) for v in lowest])
    logs = alive + death_logs(beliefs.death)
    best = np.array([
        min((float(v) for v in logs[columns][beliefs.tested[columns]]), default=math.inf) for columns in beliefs.columns
    ])  # fmt: skip
    value = float(best.min())
    if not math.isfinite(value):
        value = float(np.average(logs, weights=1 - beliefs.death)) + UNTRIED
    return _Now(first=first, lowest=lowest, logs=logs, alive=alive, best=best, value=value)


def value_actions(model: SearchModel, rng: np.random.Generator, *, probes: bool, capped: bool) -> list[Action]:
    """All candidate actions, highest rate first.

    probes: whether short runs are possible. capped: whether bad runs are stopped early.
    """
    beliefs = predict_all(model, candidates(model, rng))
    now = _now(model, beliefs)
    layout_values = _layout_values(beliefs, now, beliefs.death_after)
    actions: list[Action] = []
    if probes:
        actions += _probes(model, beliefs, now, layout_values)
    chosen = _promising(model, beliefs, rng)
    covariance = beliefs.joint.covariance_with(chosen)
    falls = _falls(model, beliefs, now, (chosen, covariance))
    actions += _full_runs(model, beliefs, now, (chosen, falls), layout_values, capped=capped)
    return sorted(actions, key=lambda a: -a.rate)


def _promising(model: SearchModel, beliefs: CandidatePosterior, rng: np.random.Generator) -> Rows:
    """Rows of configurations to value: low mean, or mean minus one or two sd, in every group, and a few at random."""
    logs = beliefs.configuration_logs(model.goal, beliefs.mean, beliefs.sd)
    picks: list[int] = []
    for rows in beliefs.rows:
        for optimism in (0.0, 1.0, 2.0):
            order = np.argsort(logs[rows] - optimism * beliefs.sd[rows])[: max(4, ACTIONS // (4 * len(beliefs.rows)))]
            picks += (order + rows.start).tolist()
    picks += rng.choice(len(logs), min(len(logs), ACTIONS // 4), replace=False).tolist()
    return np.array(sorted(set(picks)))


def _falls(model: SearchModel, beliefs: CandidatePosterior, now: _Now, actions: tuple[Rows, Array]) -> Array:
    """(actions, groups, len(Z)): change of each group's best ln samples after ``SEEDS`` runs of an action.

    actions: their rows, and the covariance of all rows with them.
    """
    chosen, covariance = actions
    variance = beliefs.joint.variance
    directions = covariance.T / np.sqrt(variance[chosen] + SEED_SD**2 / SEEDS)[:, None]
    falls = np.empty((len(chosen), len(beliefs.groups), len(Z)))
    for g, rows in enumerate(beliefs.rows):
        direction = directions[:, rows]
        mean = beliefs.mean[rows][:, None] + direction[:, :, None] * Z
        sd = np.sqrt(np.maximum(variance[rows] - direction**2, 1e-12))[:, :, None]
        logs = beliefs.group_logs(model.goal, g, mean, sd)
        # After any run the probability to finish is known better and its expected ln decreases. Before the target is
        # reached this would dominate the value, so it is not credited.
        kept = now.lowest[g] if model.target_known else (logs[:, now.first[g] - rows.start] @ WEIGHTS)[:, None]
        falls[:, g] = logs.min(axis=1) - kept
    return falls


def _layout_values(beliefs: CandidatePosterior, now: _Now, death: Array) -> Array:
    """(m, groups, len(Z)): each group's best ln seconds after layout m has run successfully and its speed is known.

    death (m): OOM probability of each after that.
    """
    values = np.broadcast_to(now.best[:, None], (len(now.logs), len(now.best), len(Z))).copy()
    for g, columns in enumerate(beliefs.columns):
        spread = beliefs.spread[columns]
        known = now.alive[columns] + death_logs(death[columns])
        drawn = known[:, None] + spread[:, None] * Z
        values[columns, g] = np.minimum(values[columns, g], drawn)
    # A tested layout, or one that is running, gives no new information.
    known_soon = np.flatnonzero((beliefs.tested & (beliefs.death < 0.02)) | beliefs.due)
    values[known_soon] = now.best[:, None]
    return values


def _expected(falls: Array, seconds: Array, value: float) -> Array:
    """Expected decrease of the lowest expected ln(score) over both results: (groups, Z) and (m, groups, Z) -> (m)."""
    sums = falls[None, :, :, None] + seconds[:, :, None, :]
    lowest = np.minimum(sums.min(axis=1), value + 5.0)
    rows = WEIGHTS if falls.shape[1] > 1 else np.ones(1)
    return np.asarray(value - rows @ (lowest @ WEIGHTS).T)


def _probes(model: SearchModel, beliefs: CandidatePosterior, now: _Now, layout_values: Array) -> list[Action]:
    gains = (1 - beliefs.death) * _expected(np.zeros((len(beliefs.groups), 1)), layout_values, now.value)
    best = [int(np.argmin(beliefs.configuration_logs(model.goal, beliefs.mean, beliefs.sd)[r])) for r in beliefs.rows]
    probes = []
    for g, columns in enumerate(beliefs.columns):
        samples = PROBE_BLOCKS * model.block_samples(beliefs.groups[g].batch)
        for m in range(columns.start, columns.stop):
            if beliefs.tested[m] or beliefs.due[m]:
                continue
            work = samples / math.exp(beliefs.speed[m]) + math.exp(beliefs.evals[m])
            alive = 1 - beliefs.death[m]
            seconds = model.init_seconds + alive * work + (1 - alive) * OOM_SECONDS
            group = beliefs.groups[g]
            probes.append(
                Action(
                    values={**group.configurations[best[g]], **group.layouts[m - columns.start]},
                    kind="probe",
                    gain=float(gains[m]),
                    node_hours=seconds * model.goal.nodes / 3600,
                    new_layout=True,
                    risk=float(beliefs.death[m]),
                )
            )
    return probes


def _full_runs(
    model: SearchModel, beliefs: CandidatePosterior, now: _Now, learned: tuple[Rows, Array], layout_values: Array,
    *, capped: bool,
) -> list[Action]:  # fmt: skip
    chosen, falls = learned
    speed_only = _expected(np.zeros((len(beliefs.groups), 1)), layout_values, now.value)
    runs = []
    for i, at in enumerate(chosen):
        g = next(k for k, rows in enumerate(beliefs.rows) if rows.start <= at < rows.stop)
        group, columns = beliefs.groups[g], beliefs.columns[g]
        alive = 1 - beliefs.death[columns]
        # A run that ends before it crosses is informative about its layout, but hardly about its hyperparameters.
        ends = _finishes(model, beliefs, int(at), g)
        gains = ends * _expected(falls[i], layout_values[columns], now.value)
        gains = alive * (gains + (1 - ends) * speed_only[columns])
        seconds = model.init_seconds + alive * _run_seconds(model, beliefs, now, (int(at), g), capped=capped)
        seconds = seconds + (1 - alive) * OOM_SECONDS
        m = int(np.argmax(gains / seconds))
        runs.append(
            Action(
                values={**group.configurations[at - beliefs.rows[g].start], **group.layouts[m]},
                kind="full",
                gain=float(gains[m]) / SEEDS,
                node_hours=float(seconds[m]) * model.goal.nodes / 3600,
                new_layout=not (beliefs.tested | beliefs.due)[columns][m],
                risk=float(beliefs.death[columns][m]),
            )
        )
    return runs


def _finishes(model: SearchModel, beliefs: CandidatePosterior, at: int, g: int) -> float:
    sd = np.array([math.sqrt(beliefs.joint.variance[at])])
    # The time limit ends a run like the end of its schedule.
    within = model.goal.limit_seconds * math.exp(float(beliefs.speed[beliefs.columns[g]].max()))
    mean, total = beliefs.mean[at : at + 1], np.minimum(beliefs.total[at : at + 1], within)
    return float(model.goal.finish_probability(mean, sd, total, beliefs.groups[g].schedule)[0])


def _run_seconds(
    model: SearchModel, beliefs: CandidatePosterior, now: _Now, where: tuple[int, int], *, capped: bool
) -> Array:
    """Expected seconds of a full run of a configuration on each layout of its group."""
    at, g = where
    needed = min(float(beliefs.mean[at]), math.log(beliefs.total[at]))
    if capped:
        needed = min(needed, float(now.lowest[g]) + math.log(CAP))
    columns = beliefs.columns[g]
    seconds = np.exp(
        model.goal.log_seconds(
            np.array([needed]),
            np.exp(beliefs.speed[columns]),
            np.exp(beliefs.evals[columns]),
            beliefs.groups[g].schedule,
        )
    )
    return np.asarray(np.minimum(seconds, model.goal.limit_seconds))
