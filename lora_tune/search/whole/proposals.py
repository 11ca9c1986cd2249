"""What the whole model proposes, by expected improvement per second, and which of all that ran it recommends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from scipy.special import ndtr

from lora_tune.search.grey_box.gaussian import Array
from lora_tune.search.grey_box.unit_range import at_random, from_unit, unit
from lora_tune.search.observations import SEED_SD
from lora_tune.search.whole.model import LEAST_CHANCE, PACE_SD, Values, WholeModel

RANDOM, NEAR, TOPS = 250, 30, 8
"""Candidates: random ones, neighbours of each of the best, and how many count as the best."""
REFINED, BESIDE, LEADERS = 3, 15, 4
"""Rounds in which the candidates worth most are looked at more closely, by so many neighbours of so many of them."""
LARGEST = 0.7
"""ln(score) that one run may be expected to gain at most: a factor of two."""
CAP = 1.25
"""Expected cost of a bad run over that of a good one: it is stopped before it ends."""
QUIET = 0.005
"""Sd of ln(score) between runs of one configuration below which none is run again: it would say the same."""
FEWEST_RUNS = 5
"""Runs that reached the target before the model chooses among them, not their results: of two it took the slower."""


def expecting(model: WholeModel) -> WholeModel:
    """The same with open runs counted as ended, with the results expected of them, so that none is asked for again."""
    waiting = [r.values for r in model.runs if r.open]
    if not waiting:
        return model
    x = model.encoding.rows(waiting)
    return replace(model, samples=model.samples.expecting(x, SEED_SD), pace=model.pace.expecting(x, PACE_SD))


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeProposal:
    """A configuration to run: gain, the expected fall of ln(score) of the recommendation, and node seconds.

    shown: the part of the gain that one run shows, seeds scatter as they do.
    """

    values: dict[str, Any]
    gain: float
    seconds: float
    shown: float


def propose(model: WholeModel, rng: np.random.Generator, *, init_seconds: float, limit_seconds: float) -> WholeProposal:
    """The candidate of the highest expected improvement over the best known configuration, per second."""
    model = expecting(model)
    tried = _tried(model)
    best = _best_known(model, tried)
    asked = [r.values for r in model.runs if r.open or model.run_sd < QUIET]

    def valued(points: Sequence[Values]) -> list[WholeProposal]:
        mean, sd = model.predict(points)
        lives = model.succeeds(points)
        gains, shown = (lives * _improvement(mean, s, best) for s in (sd, sd**2 / np.hypot(sd, model.run_sd)))
        run = np.minimum(np.exp(np.minimum(mean, 60.0)), min(CAP * math.exp(best), limit_seconds))
        return [
            WholeProposal(values=dict(p), gain=float(g), seconds=float(init_seconds + r), shown=float(s))
            for p, g, r, s in zip(points, gains, run, shown, strict=True)
        ]

    points = candidates(model, tried, rng)
    leading = valued([p for p in points if p not in asked] or points)
    for _ in range(REFINED):  # of many parameters no random point is near what is worth most
        leading = sorted(leading, key=lambda p: -p.gain / p.seconds)[:LEADERS]
        beside = [near(model.encoding.distributions, p.values, rng) for p in leading for _ in range(BESIDE)]
        leading += valued([p for p in beside if p not in asked])
    return max(leading, key=lambda p: p.gain / p.seconds)


def _improvement(mean: Array, sd: Array, best: float) -> Array:
    """Expected fall below ``best`` of Gaussians (n), counted up to ``LARGEST``: beyond, a belief is a guess."""
    return _fall(mean, sd, best) - _fall(mean, sd, best - LARGEST)


def _fall(mean: Array, sd: Array, best: float) -> Array:
    z = (best - mean) / sd
    return np.asarray((best - mean) * ndtr(z) + sd * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))


def _tried(model: WholeModel) -> list[Values]:
    """The configurations that ran here and did not fail, best first by what is believed of them."""
    unique = {tuple(r.values.items()): r.values for r in model.runs if not r.failed}
    points = list(unique.values())
    if not points:
        return []
    mean, _ = model.predict(points)
    return [points[i] for i in np.argsort(mean)]


def _best_known(model: WholeModel, tried: Sequence[Values]) -> float:
    """ln(score) of the best configuration that reached the target or runs, as believed; of the best believed else."""
    reached = _reached(model)
    points = [*reached, *(r.values for r in model.runs if r.open)] if reached else list(tried[:1])
    if not points:
        return 0.0
    mean, _ = model.predict(points)
    return float(mean.min())


def _reached(model: WholeModel) -> list[Values]:
    return list({tuple(r.values.items()): r.values for r in model.runs if math.isfinite(r.ln_score)}.values())


def candidates(model: WholeModel, tried: Sequence[Values], rng: np.random.Generator) -> list[Values]:
    """Random points, those that are the best so far, and their neighbours in one, some and all parameters."""
    spread = model.encoding.distributions
    rows: list[Values] = [at_random(spread, spread, rng) for _ in range(RANDOM)]
    for values in tried[:TOPS]:
        rows.append(values)
        for _ in range(NEAR):
            rows.append(near(spread, values, rng))
    return list({tuple(r.items()): r for r in rows}.values())


def near(spread: Mapping[str, BaseDistribution], values: Values, rng: np.random.Generator) -> dict[str, Any]:
    """A neighbour: one parameter, about a third of them or all of them moved, by a little or by much."""
    share = rng.choice([0.0, 0.34, 1.0])
    width = float(rng.choice([0.04, 0.12, 0.35]))
    moved = {n for n in spread if rng.random() < share} or {list(spread)[int(rng.integers(len(spread)))]}
    return {n: _moved(d, values[n], width, rng) if n in moved else values[n] for n, d in spread.items()}


def _moved(distribution: BaseDistribution, value: Any, width: float, rng: np.random.Generator) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[int(rng.integers(len(distribution.choices)))]
    return from_unit(distribution, unit(distribution, value) + float(rng.normal(0, width)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Believed:
    """The configuration to hand over: its expected score, and what of it may be won yet, as a share."""

    values: Values
    score: float
    regret: float
    runs: int


def believed_best(model: WholeModel) -> Values | None:
    """The configuration believed best of those that reached the target here; None before one has."""
    points = _reached(model)
    if not points:
        return None
    mean, sd = model.predict(points)
    doubted = mean + 0.5 * sd
    results = [[r.ln_score for r in model.runs if r.values == p and math.isfinite(r.ln_score)] for p in points]
    if sum(map(len, results)) < FEWEST_RUNS:
        doubted = np.array([float(np.mean(scores)) for scores in results])
    # A run that fails costs about a whole one, and is repeated.
    return points[int(np.argmin(doubted - np.log(np.maximum(model.succeeds(points), LEAST_CHANCE))))]


def recommend_whole(model: WholeModel, rng: np.random.Generator) -> Believed | None:
    """The same with what is believed of it."""
    best = believed_best(model)
    if best is None:
        return None
    mean = float(model.predict([best])[0][0])
    others = candidates(model, _tried(model), rng)
    gains = _improvement(*model.predict(others), mean)
    runs = sum(r.values == best for r in model.runs)
    return Believed(values=best, score=math.exp(mean), regret=math.expm1(float(gains.max())), runs=runs)
