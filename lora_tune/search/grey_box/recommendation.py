"""What to hand over: the configuration of lowest expected score on a layout that has run, and what is at stake."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lora_tune.search.grey_box.acquisition import Values
from lora_tune.search.grey_box.candidates import Beliefs, believe, candidates
from lora_tune.search.grey_box.memory_risk import death_logs
from lora_tune.search.grey_box.model import SearchModel

TRIED = 0.003
"""ln(score) that it is worth to recommend a configuration that ran as a whole, not one put together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The best configuration as far as is known.

    score: expected seconds; sd: of ln(score), as believed. regret: expected excess over the best there is, as a share;
    infinite while nothing known has reached the target, here or elsewhere, and where nobody asked for it. runs: full
    runs of exactly these hyperparameters, on any layout.
    """

    values: Values
    score: float
    sd: float
    regret: float
    runs: int


def recommend_from(model: SearchModel, rng: np.random.Generator, draws: int = 128) -> Recommendation:
    """The configuration of lowest expected score on a layout that has run here (any layout before the first has).

    draws: from the whole belief, for the regret; 0 where that is not asked for.
    """
    beliefs = believe(model, candidates(model, rng))
    goal = model.goal
    # What is handed over must also be safe: half the variance is the price of a belief in ln(samples), and a layout
    # that lived a few times may still be a flaky one.
    logs_of = beliefs.configuration_logs(goal, beliefs.mean, beliefs.sd) + 0.5 * beliefs.sd**2
    best = [int(np.argmin(logs_of[rows])) + rows.start for rows in beliefs.rows]
    seconds = beliefs.layout_logs(goal, [float(logs_of[b]) for b in best]) + 0.5 * beliefs.spread**2
    doubted = seconds + death_logs(beliefs.death + beliefs.death_doubt)
    seconds = seconds + death_logs(beliefs.death)
    allowed = beliefs.tested if beliefs.tested.any() else np.ones(len(seconds), dtype=bool)
    m = int(np.argmin(np.where(allowed, doubted, np.inf)))
    g = next(k for k, columns in enumerate(beliefs.columns) if columns.start <= m < columns.stop)
    values = _whole(beliefs, best[g], g, m)
    ran = [o.values for o in model.observations if math.isfinite(o.reached) and not (o.source or o.probe)]
    rows = [at for at in range(beliefs.rows[g].start, beliefs.rows[g].stop) if logs_of[at] <= logs_of[best[g]] + TRIED]
    for at in sorted(rows, key=lambda row: float(logs_of[row])):
        if (known := _whole(beliefs, at, g, m)) in ran:
            best[g], values = at, known
            break
    names = model.coordinates.convergence_names
    runs = sum(all(o.values.get(n) == values[n] for n in names) and not o.probe for o in model.observations)
    regret = _expected_regret(model, beliefs, (best[g], g, m), rng, draws) if draws and model.target_known else math.inf
    sd = math.hypot(float(beliefs.sd[best[g]]), float(beliefs.spread[m]))
    return Recommendation(values=values, score=float(np.exp(seconds[m])), sd=sd, runs=runs, regret=regret)


def _whole(beliefs: Beliefs, at: int, g: int, m: int) -> Values:
    """The values of configuration ``at`` on layout ``m``, both of group ``g``."""
    group = beliefs.groups[g]
    return {**group.configurations[at - beliefs.rows[g].start], **group.layouts[m - beliefs.columns[g].start]}


def _expected_regret(
    model: SearchModel, beliefs: Beliefs, chosen: tuple[int, int, int], rng: np.random.Generator, draws: int
) -> float:
    """Mean over draws of the whole belief of score(recommended) / score(best) - 1."""
    at, g, m = chosen
    n = len(beliefs.mean)
    root = np.linalg.cholesky(beliefs.joint.covariance() + 1e-8 * np.eye(n))
    samples = beliefs.mean[:, None] + root @ rng.normal(size=(n, draws))
    logs = beliefs.configuration_logs(model.goal, samples, np.full((n, 1), 1e-6))
    lowest = np.array([logs[rows].min(axis=0) for rows in beliefs.rows])
    base = beliefs.layout_logs(model.goal, [float(v) for v in lowest.mean(axis=1)])
    noise = np.linalg.cholesky(beliefs.together + 1e-8 * np.eye(len(base))) @ rng.normal(size=(len(base), draws))
    every = [layout for group in beliefs.groups for layout in group.layouts]
    layouts = base[:, None] + noise + death_logs(model.memory.draws(every, rng, draws))
    by_group = np.array([layouts[c].min(axis=0) for c in beliefs.columns])
    best = (by_group + lowest - lowest.mean(axis=1, keepdims=True)).min(axis=0)
    mine = layouts[m] + logs[at] - lowest[g].mean()
    return float(np.expm1(np.maximum(mine - best, 0.0)).mean())
