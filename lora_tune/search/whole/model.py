"""Whole configurations: ln(seconds to the target) = ln(samples) + ln(seconds a sample), each of all parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lora_tune.search.advantage import Advantage, Deaths, SeedDoubt
from lora_tune.search.grey_box.gaussian import Array, matern
from lora_tune.search.grey_box.memory_risk import MemoryRisk
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
    """What is believed of whole configurations. Build it with :func:`learn_whole`.

    memory: which of them die of memory, where it is known what that depends on; None: their neighbours tell.
    """

    encoding: Encoding
    runs: tuple[Run, ...]
    samples: Piece
    pace: Piece
    scales: Scales
    memory: MemoryRisk | None = None

    def predict(self, points: Sequence[Values]) -> tuple[Array, Array]:
        """Mean (n) and sd (n) of ln(score) of configurations, apart from the luck of a run."""
        x = self.encoding.rows(points)
        (samples, first), (pace, second) = self.samples.predict(x), self.pace.predict(x)
        return samples + pace, np.sqrt(first + second)

    def compared(self, values: Values, instead: Values) -> Advantage:
        """What is believed of the score of ``values`` beside that of ``instead``, failures included."""
        rows = self.encoding.rows([values, instead])
        (samples, doubt), (pace, pace_doubt) = self.samples.together(rows), self.pace.together(rows)
        ln = samples + pace
        seeds = SeedDoubt(float(doubt[0, 0]), float(doubt[1, 1]), float(doubt[0, 1]), self.run_sd)
        spread = seeds.variance + max(0.0, float(pace_doubt[0, 0] + pace_doubt[1, 1] - 2 * pace_doubt[0, 1]))
        arrives, other = np.log(np.maximum(self._arrives([values, instead]), LEAST_CHANCE))
        deaths = self.memory.apart(values, instead) if self.memory else (Deaths(), Deaths())
        return Advantage(
            ln_saved=float(arrives - other + ln[1] - ln[0]), sd=math.sqrt(spread), seeds=seeds,
            deaths=deaths[0], other_deaths=deaths[1],
        )  # fmt: skip

    def scores(self, values: Values) -> list[float]:
        """ln(score) of the runs of a configuration that reached the target."""
        return [r.ln_score for r in self.runs if r.values == values and math.isfinite(r.ln_score)]

    @property
    def run_sd(self) -> float:
        """Sd of ln(score) between runs of one configuration."""
        return SEED_SD * self.scales.samples.noise_scale

    @property
    def forecast_sd(self) -> float:
        """The same of what a run will be seen to take, which ends at an eval."""
        spreads = [r.spread for r in self.runs if math.isfinite(r.ln_score)]
        return math.hypot(self.run_sd, float(np.median(spreads)) if spreads else 0.0)

    def succeeds(self, points: Sequence[Values]) -> Array:
        """Chance (n) that a run of each neither dies nor ends before the target."""
        arrives = self._arrives(points)
        return arrives if self.memory is None else arrives * (1 - self.memory.chance(points)[0])

    def _arrives(self, points: Sequence[Values]) -> Array:
        """Chance (n) that a run of each does not fail, by what its neighbours did.

        A death of memory counts as far as its layout lives: the rest of it is known from the layout.
        """
        tested = [r for r in self.runs if r.failed or math.isfinite(r.ln_score) or math.isfinite(r.ln_pace)]
        if not any(r.failed for r in tested):
            return np.ones(len(points))
        both = self.scales.samples.of, self.scales.pace.of
        weights = np.array([max(0.2, *(of[name] for of in both)) for name in self.encoding.owners])
        x, known = self.encoding.rows(points) * weights, self.encoding.rows([r.values for r in tested]) * weights
        near = matern(x, known, FAILURE_REACH) * self._unexplained(tested)
        alive = near @ np.array([not r.failed for r in tested], dtype=np.float64)
        return np.asarray((alive + 0.5) / (near.sum(axis=1) + 0.5))

    def _unexplained(self, tested: Sequence[Run]) -> Array:
        """How much of each run (n) its layout's memory leaves open."""
        if self.memory is None:
            return np.ones(len(tested))
        lives = 1 - self.memory.chance([r.values for r in tested])[0]
        return np.where([r.died for r in tested], lives, 1.0)


def learn_whole(
    encoding: Encoding, runs: Sequence[Run], scales: Scales | None = None, *,
    stated: frozenset[str] = frozenset(), centre: Values | None = None, memory: MemoryRisk | None = None,
) -> WholeModel:  # fmt: skip
    """The model after ``runs``; of open ones it knows what they have shown so far (see :func:`proposals.expecting`).

    stated: parameters whose roles the study says. centre: where the user stands, until a run has reached the target.
    memory: as of :class:`WholeModel`.
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
        memory=memory,
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
