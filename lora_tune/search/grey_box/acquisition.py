"""What to run next: the action whose result is expected to improve the recommendation most per node-hour.

Knowledge gradient (Frazier, Powell, Dayanik 2009, "The knowledge-gradient policy for correlated normal beliefs") on
the composed score: for each action, the expected fall of the lowest expected ln(score) once its result is known, over
the two things that a run teaches (samples at its hyperparameters, seconds of its layout), its chance of dying of
memory, and its cost. A single noisy run teaches nearly nothing near the best, so each action is also valued as several
seeds at once and credited by the run (Frazier and Powell 2010, "Paradoxes in learning and the marginal value of
information").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lora_tune.search.grey_box.candidates import Beliefs, believe, candidates
from lora_tune.search.grey_box.gaussian import Array
from lora_tune.search.grey_box.memory import death_logs
from lora_tune.search.grey_box.model import SearchModel
from lora_tune.search.observations import SEED_SD

Values = Mapping[str, Any]
Rows = npt.NDArray[np.int64]

SEEDS = (1, 3, 8)
"""Seeds at once by which an action is also valued."""
OOM_SECONDS = 60.0
"""What a job that dies of memory costs beyond its start-up."""
CAP = 1.25
"""Expected cost of a bad run over that of a good one: it is stopped before it ends."""
PROBE_BLOCKS = 2
"""Eval intervals that a probe trains: a cold block and a warm one."""
ACTIONS = 60
"""Configurations that are valued as actions, out of all candidates."""
Z, WEIGHTS = np.polynomial.hermite_e.hermegauss(9)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
"""Gauss-Hermite nodes and weights of a standard normal: improvements often lie in its tails."""
UNTRIED = 0.3
"""ln(score) by which having no tested layout is worse than the average layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What to run and what it is for. gain: by how much it is expected to lower ln(score) of the recommendation.

    kind: "full" or "probe". node_hours: its expected cost. new_layout, replicate: what is known of its parts.
    """

    values: Values
    kind: str
    gain: float
    node_hours: float
    new_layout: bool
    risk: float
    seeds: int

    @property
    def rate(self) -> float:
        """Gain per node-hour."""
        return self.gain / max(self.node_hours, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Now:
    """The state of knowledge that actions are valued against.

    first: per group, the row of its best configuration; lowest: ln samples of that. logs (m): ln seconds of layouts at
    those, deaths included. best: per group, the lowest of its usable layouts. value: the lowest of all, i.e. the
    recommendation's.
    """

    first: npt.NDArray[np.int64]
    lowest: Array
    logs: Array
    alive: Array
    best: Array
    value: float


def _now(model: SearchModel, beliefs: Beliefs) -> _Now:
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
    """Every action considered, best rate first.

    probes: whether short runs are possible. capped: whether bad runs are stopped early.
    """
    beliefs = believe(model, candidates(model, rng))
    now = _now(model, beliefs)
    layout_values = _layout_values(beliefs, now, beliefs.death_after)
    actions: list[Action] = []
    if probes:
        actions += _probes(model, beliefs, now)
    chosen = _promising(model, beliefs, rng)
    together = beliefs.joint.covariance_with(chosen)
    for seeds in SEEDS:
        falls = _falls(model, beliefs, now, (chosen, together), seeds)
        actions += _full_runs(model, beliefs, now, (chosen, falls, seeds), layout_values, capped=capped)
    return sorted(actions, key=lambda a: -a.rate)


def _promising(model: SearchModel, beliefs: Beliefs, rng: np.random.Generator) -> Rows:
    """Configurations worth valuing: low by mean or by mean less one or two sd, in every group, and a few at random."""
    logs = beliefs.configuration_logs(model.goal, beliefs.mean, beliefs.sd)
    picks: list[int] = []
    for rows in beliefs.rows:
        for optimism in (0.0, 1.0, 2.0):
            order = np.argsort(logs[rows] - optimism * beliefs.sd[rows])[: max(4, ACTIONS // (4 * len(beliefs.rows)))]
            picks += (order + rows.start).tolist()
    picks += rng.choice(len(logs), min(len(logs), ACTIONS // 4), replace=False).tolist()
    return np.array(sorted(set(picks)))


def _falls(model: SearchModel, beliefs: Beliefs, now: _Now, actions: tuple[Rows, Array], seeds: int) -> Array:
    """(actions, groups, len(Z)): change of each group's best ln samples once ``seeds`` runs of an action are known.

    actions: their rows, and the covariance of all rows with them.
    """
    chosen, together = actions
    variance = beliefs.joint.variance
    directions = together.T / np.sqrt(variance[chosen] + SEED_SD**2 / seeds)[:, None]
    falls = np.empty((len(chosen), len(beliefs.groups), len(Z)))
    for g, rows in enumerate(beliefs.rows):
        direction = directions[:, rows]
        mean = beliefs.mean[rows][:, None] + direction[:, :, None] * Z
        sd = np.sqrt(np.maximum(variance[rows] - direction**2, 1e-12))[:, :, None]
        logs = beliefs.group_logs(model.goal, g, mean, sd)
        # The chance to finish is known better after a run and its ln lower in the mean, whatever was learned: while
        # nothing has reached the target, that is most of what is learned, and no reason to learn nothing.
        kept = now.lowest[g] if model.target_known else (logs[:, now.first[g] - rows.start] @ WEIGHTS)[:, None]
        falls[:, g] = logs.min(axis=1) - kept
    return falls


def _layout_values(beliefs: Beliefs, now: _Now, death: Array) -> Array:
    """(m, groups, len(Z)): each group's best ln seconds once it is known how fast layout m is and that it lived.

    death (m): the chance of death of each after that.
    """
    values = np.broadcast_to(now.best[:, None], (len(now.logs), len(now.best), len(Z))).copy()
    for g, columns in enumerate(beliefs.columns):
        spread = beliefs.spread[columns]
        known = now.alive[columns] + death_logs(death[columns])
        drawn = known[:, None] + spread[:, None] * Z
        values[columns, g] = np.minimum(values[columns, g], drawn)
    # A tested layout stays what it is, and one that runs already needs no second messenger: neither is news.
    known_soon = np.flatnonzero((beliefs.tested & (beliefs.death < 0.02)) | beliefs.due)
    values[known_soon] = now.best[:, None]
    return values


def _expected(falls: Array, seconds: Array, value: float) -> Array:
    """Expected fall of the lowest expected ln(score) over both results: (groups, Z) by (m, groups, Z) -> (m)."""
    sums = falls[None, :, :, None] + seconds[:, :, None, :]
    lowest = np.minimum(sums.min(axis=1), value + 5.0)
    rows = WEIGHTS if falls.shape[1] > 1 else np.ones(1)
    return np.asarray(value - rows @ (lowest @ WEIGHTS).T)


def _probes(model: SearchModel, beliefs: Beliefs, now: _Now) -> list[Action]:
    gains, times = _probe_gains(beliefs, now)
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
                    seeds=int(times[m]),
                )
            )
    return probes


def _probe_gains(beliefs: Beliefs, now: _Now) -> tuple[Array, Array]:
    """Gain per probe of each layout (m), and as how many probes in a row it is the highest (m).

    A layout that died once is not worth having after one survival, but may be after several; probes of it go on while
    it lives, so that k of them cost as many as survivals are expected before.
    """
    still = np.zeros((len(beliefs.groups), 1))
    gains, times = np.zeros(len(beliefs.death)), np.ones(len(beliefs.death))
    for probes in SEEDS:
        alive, expected, death = beliefs.survivals(probes)
        values = _layout_values(beliefs, now, death)
        each = alive * _expected(still, values, now.value) / expected
        gains, times = np.maximum(gains, each), np.where(each > gains, probes, times)
    return gains, times


def _full_runs(
    model: SearchModel, beliefs: Beliefs, now: _Now, learned: tuple[Rows, Array, int], layout_values: Array,
    *, capped: bool,
) -> list[Action]:  # fmt: skip
    chosen, falls, seeds = learned
    speed_only = _expected(np.zeros((len(beliefs.groups), 1)), layout_values, now.value)
    runs = []
    for i, at in enumerate(chosen):
        g = next(k for k, rows in enumerate(beliefs.rows) if rows.start <= at < rows.stop)
        group, columns = beliefs.groups[g], beliefs.columns[g]
        alive = 1 - beliefs.death[columns]
        # A run that ends before it crosses teaches its layout and next to nothing of its hyperparameters.
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
                gain=float(gains[m]) / seeds,
                node_hours=float(seconds[m]) * model.goal.nodes / 3600,
                new_layout=not (beliefs.tested | beliefs.due)[columns][m],
                risk=float(beliefs.death[columns][m]),
                seeds=seeds,
            )
        )
    return runs


def _finishes(model: SearchModel, beliefs: Beliefs, at: int, g: int) -> float:
    sd = np.array([math.sqrt(beliefs.joint.variance[at])])
    # The time limit ends a run as the end of its schedule does.
    within = model.goal.limit_seconds * math.exp(float(beliefs.speed[beliefs.columns[g]].max()))
    mean, total = beliefs.mean[at : at + 1], np.minimum(beliefs.total[at : at + 1], within)
    return float(model.goal.finish_probability(mean, sd, total, beliefs.groups[g].schedule)[0])


def _run_seconds(model: SearchModel, beliefs: Beliefs, now: _Now, where: tuple[int, int], *, capped: bool) -> Array:
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
