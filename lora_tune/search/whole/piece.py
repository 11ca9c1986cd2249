"""One piece of a run (samples or pace) as a Gaussian process in which every parameter's part is tested by evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lora_tune.search.grey_box.gaussian import Array, Data, Posterior, Prior, condition

RELEVANCE = (0.0, 0.5, 1.0, 2.0)
"""How much of a parameter a piece may see: nothing, a gentle dependence, the usual one, a sharp one."""
SURPRISE = 1.5
"""ln of the odds against a parameter driving a piece that its name does not suggest."""
SIMPLER = 0.3
"""ln of the odds against each other departure from the usual relevance."""
DOUBT = 0.7
"""Sd of a bend as a share of it, on top of :data:`LEAST_DOUBT`."""
LEAST_DOUBT = 0.2
SLOPE_SD = 0.5
"""Sd of the change of ln(seconds) over half a range, at least."""
AWAY = 0.6
"""Half ranges by which the best known point may be away from the best one, as far as slopes are concerned."""
OFF = 1e-4
"""Sd of the trend along a parameter that has no part in a piece."""
WALKS = (("amplitude", 2.0), ("length", 1.6), ("noise_scale", 1.4))


@dataclass(frozen=True, kw_only=True)
class Relevance:
    """What a piece sees of each parameter, and the scales of its residual. fitted_at: readings at the last fit."""

    of: Mapping[str, float]
    amplitude: float
    length: float = 1.0
    noise_scale: float = 1.0
    fitted_at: int = -1


@dataclass(frozen=True, kw_only=True)
class Readings:
    """n readings of a piece: features (n, d), y (n), sd (n); ``below`` (n): y is only a lower bound."""

    x: Array
    y: Array
    sd: Array
    below: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What all pieces of a model share.

    owners: each feature's parameter. bends: its expected rise at half a range, 0 where it is no number. reach: units
    of smoothness in half a range. centre: of the trend.
    """

    owners: tuple[str, ...]
    bends: Array
    reach: Array
    centre: Array

    @property
    def numbers(self) -> npt.NDArray[np.bool_]:
        """Features of which a middle value may be best."""
        return np.asarray(self.bends > 0)

    def basis(self, x: Array) -> Array:
        """1, the distance from the centre along every feature, and its square along numbers."""
        away = x - self.centre
        return np.hstack([np.ones((len(x), 1)), away, away[:, self.numbers] ** 2])

    def prior(self, r: Relevance, level: float, bent: bool) -> Prior:
        """The belief in a piece with these scales; ``level``: at the centre. bent: it has a best point within."""
        weights = np.array([r.of[name] for name in self.owners])
        seen = np.minimum(weights, 1.0)
        bends = (self.bends * seen if bent else np.zeros(len(seen)))[self.numbers]
        doubt = (seen * LEAST_DOUBT)[self.numbers] + DOUBT * bends
        slopes = seen * np.maximum(SLOPE_SD, 2 * AWAY * self.bends / self.reach if bent else SLOPE_SD)
        return Prior(
            mean=np.r_[level, np.zeros(len(weights)), bends],
            sd=np.r_[1.5, np.maximum(slopes, OFF), np.maximum(doubt, OFF)],
            amplitude=r.amplitude, length=r.length, departure=1e-3, noise_scale=r.noise_scale,
            weights=weights * (self.reach if bent else 1.0),
        )  # fmt: skip

    def data(self, readings: Readings) -> Data:
        """The readings as the Gaussian process takes them in."""
        n = len(readings.y)
        return Data(
            x=readings.x, basis=self.basis(readings.x), y=readings.y, sd=readings.sd,
            source=np.zeros(n, dtype=np.int64), below=readings.below, extended=np.zeros(n),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece after data."""

    frame: Frame
    posterior: Posterior
    relevance: Relevance

    def predict(self, x: Array) -> tuple[Array, Array]:
        """Mean (m) and covariance (m, m) at feature rows."""
        return self.posterior.predict(x, self.frame.basis(x))

    def expecting(self, x: Array, sd: float) -> Piece:
        """The same with runs at feature rows ``x`` (n, d) counted as measured, with the results expected of them."""
        seen, n = self.posterior.data, len(x)
        data = Data(
            x=np.vstack([seen.x, x]), basis=np.vstack([seen.basis, self.frame.basis(x)]),
            y=np.r_[seen.y, self.predict(x)[0]], sd=np.r_[seen.sd, np.full(n, sd)],
            source=np.r_[seen.source, np.zeros(n, dtype=np.int64)],
            below=np.r_[seen.below, np.zeros(n, dtype=np.bool_)], extended=np.r_[seen.extended, np.zeros(n)],
        )  # fmt: skip
        return replace(self, posterior=condition(data, self.posterior.prior))


def start(names: Sequence[str], guessed: frozenset[str], amplitude: float) -> Relevance:
    """What is believed before data: parameters that the piece is guessed to depend on count, others do not."""
    return Relevance(of={n: 1.0 if n in guessed else 0.0 for n in names}, amplitude=amplitude)


def learn_piece(
    frame: Frame, readings: Readings, known: Relevance, guessed: frozenset[str], *, bent: bool,
    stated: frozenset[str] = frozenset(),
) -> Piece:  # fmt: skip
    """The piece after ``readings``; scales and parts are fitted anew when readings grew by an eighth.

    stated: parameters whose role the study says, which are not tested.
    """
    exact = readings.y[~readings.below]
    level = float(np.median(exact)) if len(exact) else float(readings.y.max(initial=0.0))
    data = frame.data(readings)
    if len(exact) > 2 and len(readings.y) > 1.12 * known.fitted_at:
        known = _fitted(frame, data, known, (level, bent), (guessed, stated))
    posterior = condition(data, frame.prior(known, level, bent))
    return Piece(frame=frame, posterior=posterior, relevance=known)


def _fitted(
    frame: Frame, data: Data, known: Relevance, trend: tuple[float, bool], roles: tuple[frozenset[str], frozenset[str]]
) -> Relevance:
    """Scales and parts of better evidence, one after the other."""
    guessed, stated = roles
    start = known

    def value(r: Relevance) -> float:
        walked = sum((math.log(getattr(r, n) / (getattr(start, n) if n == "amplitude" else 1.0)) / 1.0) ** 2
                     for n, _ in WALKS)  # fmt: skip
        return condition(data, frame.prior(r, *trend)).log_evidence - 0.5 * walked - _odds(r, guessed)

    best, reached = known, value(known)
    for name, factor in WALKS:
        for direction in (factor, 1 / factor):
            for _ in range(3):
                trial = replace(best, **{name: getattr(best, name) * direction})
                if (found := value(trial)) <= reached + 1e-6:
                    break
                best, reached = trial, found
    # Twice: what stood in for another parameter in the first round is not needed once that one counts.
    for _ in range(2):
        before = best
        for name in (n for n in known.of if n not in stated):
            for weight in RELEVANCE:
                trial = replace(best, of={**best.of, name: weight})
                if weight != best.of[name] and (found := value(trial)) > reached + 1e-6:
                    best, reached = trial, found
        if best is before:
            break
    return replace(best, fitted_at=len(data.y))


def _odds(r: Relevance, guessed: frozenset[str]) -> float:
    """ln of the odds against these parts before data."""
    found = 0.0
    for name, weight in r.of.items():
        if (weight > 0) != (name in guessed):
            found += SURPRISE
        elif weight not in (0.0, 1.0):
            found += SIMPLER
    return found
