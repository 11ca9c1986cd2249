"""Whole configurations: ln(seconds to the target) = ln(samples) + ln(seconds a sample), each of all parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from optuna.distributions import BaseDistribution, CategoricalDistribution
from scipy.special import ndtr

from lora_tune.search.advantage import Advantage
from lora_tune.search.grey_box.gaussian import Array, matern
from lora_tune.search.grey_box.unit_range import at_random, from_unit, unit
from lora_tune.search.observations import SEED_SD
from lora_tune.search.whole.encoding import Encoding
from lora_tune.search.whole.fitting import learn_piece
from lora_tune.search.whole.piece import Piece, PieceFrame, Readings, Relevance, start
from lora_tune.search.whole.runs import Run

PACE_SD = 0.01
"""Usual noise of ln(seconds a sample) between runs of one configuration."""
SURE = 1e-6
"""The same where no run tells its pace: it is 0 by definition, and the whole score is in the other piece."""
MOST = 150
"""Runs that a model keeps: the newest, and all that reached the target among the fastest half of them."""
FAILURE_REACH = 0.3
"""Distance over which a failure speaks of its neighbours, in half ranges."""
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
LEAST_CHANCE = 1e-3
"""Chance to succeed below which a configuration counts as no worse: a run that fails costs about a whole one."""

Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Scales:
    """What was fitted of both pieces, kept between asks.

    paced: some run told its pace. Fits of before, when the whole score was one piece, are not kept.
    """

    samples: Relevance
    pace: Relevance
    paced: bool = True


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """What is believed of whole configurations. Build it with :func:`learn_whole`."""

    encoding: Encoding
    runs: tuple[Run, ...]
    samples: Piece
    pace: Piece
    scales: Scales

    def predict(self, points: Sequence[Values]) -> tuple[Array, Array]:
        """Mean (n) and sd (n) of ln(score) of configurations, apart from the luck of a run."""
        x = self.encoding.rows(points)
        (samples, first), (pace, second) = self.samples.predict(x), self.pace.predict(x)
        return samples + pace, np.sqrt(first + second)

    def compared(self, values: Values, instead: Values) -> Advantage:
        """What is believed of the score of ``values`` beside that of ``instead``, failures included."""
        rows = self.encoding.rows([values, instead])
        (first, second), (third, fourth) = self.samples.difference(rows), self.pace.difference(rows)
        arrives, other = np.log(np.maximum(self.succeeds([values, instead]), LEAST_CHANCE))
        return Advantage(ln_saved=arrives - other - first - third, sd=math.sqrt(max(0.0, second + fourth)))

    @property
    def run_sd(self) -> float:
        """Sd of ln(score) between runs of one configuration."""
        return SEED_SD * self.scales.samples.noise_scale

    def succeeds(self, points: Sequence[Values]) -> Array:
        """Chance (n) that a run of each neither dies nor ends before the target, by what its neighbours did."""
        tested = [r for r in self.runs if r.failed or math.isfinite(r.ln_score) or math.isfinite(r.ln_pace)]
        if not any(r.failed for r in tested):
            return np.ones(len(points))
        both = self.scales.samples.of, self.scales.pace.of
        weights = np.array([max(0.2, *(of[name] for of in both)) for name in self.encoding.owners])
        x, known = self.encoding.rows(points) * weights, self.encoding.rows([r.values for r in tested]) * weights
        near = matern(x, known, FAILURE_REACH)
        alive = near @ np.array([not r.failed for r in tested], dtype=np.float64)
        return np.asarray((alive + 0.5) / (near.sum(axis=1) + 0.5))


def learn_whole(
    encoding: Encoding, runs: Sequence[Run], scales: Scales | None = None, *,
    stated: frozenset[str] = frozenset(), centre: Values | None = None,
) -> WholeModel:  # fmt: skip
    """The model after ``runs``; of open ones it knows what they have shown so far (see :func:`expecting`).

    stated: parameters whose roles the study says. centre: where the user stands, until a run has reached the target.
    """
    names = tuple(encoding.distributions)
    guesses = {piece: frozenset(n for n in names if piece in encoding.guess(n)) for piece in ("samples", "pace")}
    kept = _kept(runs)
    known = [r for r in kept if math.isfinite(r.ln_pace)]
    if not known:  # nothing tells speed apart: the whole score is one piece
        guesses = {"samples": frozenset(names), "pace": frozenset()}
    if scales is None or scales.paced != bool(known):
        scales = Scales(samples=start(names, guesses["samples"], 0.2), pace=start(names, guesses["pace"], 0.1))
    reached = [r for r in kept if math.isfinite(r.ln_score)]
    middle = min(reached, key=lambda r: r.ln_score).values if reached else centre
    row = encoding.rows([middle])[0] if middle is not None else np.zeros(len(encoding.owners))
    frame = PieceFrame(
        owners=encoding.owners, bends=np.array(encoding.bends), reach=np.array(encoding.reach), centre=row
    )  # fmt: skip
    pace = learn_piece(frame, _paces(encoding, known, row), scales.pace, guesses["pace"], bent=False, stated=stated)
    samples = learn_piece(
        frame, _samples(encoding, kept, pace), scales.samples, guesses["samples"], bent=True, stated=stated
    )
    return WholeModel(
        encoding=encoding, runs=tuple(kept), samples=samples, pace=pace,
        scales=Scales(samples=samples.relevance, pace=pace.relevance, paced=bool(known)),
    )  # fmt: skip


def _kept(runs: Sequence[Run]) -> list[Run]:
    """At most ``MOST`` runs: half of the places for the fastest, the others for the newest."""
    if len(runs) <= MOST:
        return list(runs)
    order = sorted(range(len(runs)), key=lambda at: runs[at].ln_score if math.isfinite(runs[at].ln_score) else math.inf)
    chosen = {*order[: MOST // 2], *range(len(runs) - MOST // 2, len(runs))}
    return [runs[at] for at in sorted(chosen)]


def _paces(encoding: Encoding, known: Sequence[Run], centre: Array) -> Readings:
    """ln of seconds a sample of every run that tells it; 0 everywhere, without noise, where none does."""
    x = encoding.rows([r.values for r in known]) if known else centre[None, :]
    n = len(x)
    return Readings(
        x=x, y=np.array([r.ln_pace for r in known] or [0.0]), sd=np.full(n, PACE_SD if known else SURE),
        extended=np.zeros(n), below=np.zeros(n, dtype=np.bool_),
    )  # fmt: skip


def _samples(encoding: Encoding, runs: Sequence[Run], pace: Piece) -> Readings:
    """ln of the samples that count, of every run whose speed is known: score over pace, or a bound of it."""
    told = [r for r in runs if math.isfinite(r.ln_score) or math.isfinite(r.above)]
    x = encoding.rows([r.values for r in told])
    expected = pace.predict(x)[0] if len(told) else np.zeros(0)
    paces = np.array([r.ln_pace if math.isfinite(r.ln_pace) else e for r, e in zip(told, expected, strict=True)])
    below = np.array([not math.isfinite(r.ln_score) for r in told], dtype=np.bool_)
    y = np.array([r.above if b else r.ln_score for r, b in zip(told, below, strict=True)]) - paces
    spread = np.array([r.spread for r in told])
    return Readings(x=x, y=y, sd=np.full(len(told), SEED_SD), extended=spread, below=below)


def expecting(model: WholeModel) -> WholeModel:
    """The same with open runs counted as ended, with the results expected of them, so that none is asked for again."""
    waiting = [r.values for r in model.runs if r.open]
    if not waiting:
        return model
    x = model.encoding.rows(waiting)
    return replace(model, samples=model.samples.expecting(x, SEED_SD), pace=model.pace.expecting(x, PACE_SD))


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeProposal:
    """A configuration to run: gain, the expected fall of ln(score) of the recommendation, and node seconds."""

    values: dict[str, Any]
    gain: float
    seconds: float


def propose(model: WholeModel, rng: np.random.Generator, *, init_seconds: float, limit_seconds: float) -> WholeProposal:
    """The candidate of the highest expected improvement over the best known configuration, per second."""
    model = expecting(model)
    tried = _tried(model)
    best = _best_known(model, tried)
    asked = [r.values for r in model.runs if r.open or model.run_sd < QUIET]

    def valued(points: Sequence[Values]) -> list[WholeProposal]:
        mean, sd = model.predict(points)
        gains = model.succeeds(points) * _improvement(mean, sd, best)
        run = np.minimum(np.exp(np.minimum(mean, 60.0)), min(CAP * math.exp(best), limit_seconds))
        return [
            WholeProposal(values=dict(p), gain=float(g), seconds=float(init_seconds + r))
            for p, g, r in zip(points, gains, run, strict=True)
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


def recommend_whole(model: WholeModel, rng: np.random.Generator) -> Believed | None:
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
    at = int(np.argmin(doubted - np.log(np.maximum(model.succeeds(points), LEAST_CHANCE))))
    others = candidates(model, _tried(model), rng)
    gains = _improvement(*model.predict(others), float(mean[at]))
    same: npt.NDArray[np.bool_] = np.array([r.values == points[at] for r in model.runs])
    return Believed(
        values=points[at], score=math.exp(float(mean[at])), regret=math.expm1(float(gains.max())), runs=int(same.sum())
    )
