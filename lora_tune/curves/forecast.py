"""Forecast of an unfinished run's stop: the probability of each coming eval, from its evals so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lora_tune.curves.family import Family, before_target, fit_offset, free_family
from lora_tune.curves.phases import second_phase
from lora_tune.curves.points import Array, eval_interval, evals_of, first_reached
from lora_tune.curves.timing import Schedule
from lora_tune.logs.run import Eval, RunLog

TAIL_DEGREES = 5
"""Degrees of freedom of Student's t for a run's future offset; 5 gave 1% tails on the calibration runs, normal 2-3%."""

NODES = 41
FURTHEST = 512
"""Most evals in a forecast; a stop beyond them counts as never."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The distribution of a run's raw stop.

    stops: samples of the coming evals, rising (one entry, the stop itself, for a run that reached the target).
    chance: probability of having stopped by each; need not end at 1.
    """

    stops: tuple[float, ...]
    chance: tuple[float, ...]

    def chance_by(self, samples: float) -> float:
        """Probability that the run has stopped at or before ``samples``."""
        at = int(np.searchsorted(self.stops, samples, side="right"))
        return self.chance[at - 1] if at else 0.0

    def quantile(self, probability: float) -> float:
        """The first eval by which the run has stopped with ``probability``; infinite if beyond all of them."""
        at = int(np.searchsorted(self.chance, probability))
        return self.stops[at] if at < len(self.stops) else math.inf


NEVER = Forecast((), ())


def forecast(
    run: RunLog | Sequence[Eval],
    target: float,
    *,
    family: Family | None = None,
    quantum: float | None = None,
    healing: float = 0.0,
) -> Forecast:
    """Forecast the first eval of ``run`` at or under ``target``, with evals every ``quantum`` samples.

    For a run that changes precision at ``healing`` samples only the evals after it count, and ``family`` is ignored.

    The run's offset from the family (or from its own free fit) is uncertain by its noise, by ``family.wander`` and by
    drift, jointly Student-distributed; each coming eval adds its own normal noise. Integrated over the offset:
    ``P(not stopped by j) = E_b[ prod_{i<=j} Phi((f_i + b_i - target) / noise_i) ]``.
    An empty forecast (probability 0 everywhere) means that the evals show no falling curve.
    """
    evals = evals_of(run)
    stop = first_reached(evals, target)
    if stop is not None:
        return Forecast((stop.samples,), (1.0,))
    usable = before_target(second_phase(evals, healing), target)
    if len(usable.samples) == 0:
        return NEVER
    if healing > 0:
        family = None
    offset = fit_offset(usable, family) if family is not None else None
    if family is None or offset is None or not offset.follows:
        family = free_family(usable)
        if family is None:
            return NEVER
        offset = fit_offset(usable, family)
    step = quantum if quantum is not None and quantum > 0 else eval_interval(usable.samples)
    last = float(usable.samples[-1])
    if not step > 0:
        step = last
    stops: Array = last + step * np.arange(1, FURTHEST + 1, dtype=np.float64)
    ahead = np.log(stops / last)
    sd = np.sqrt(offset.sd**2 + family.wander**2 + (family.drift * ahead) ** 2)
    above = family.loss_at(stops) + offset.value + _student_nodes()[:, None] * sd - target
    chance = 1.0 - np.cumprod(_phi(above / family.noise_at(stops)), axis=1).mean(axis=0)
    return Forecast(tuple(stops.tolist()), tuple(np.maximum.accumulate(chance).tolist()))


def expected_stop(crossing: float, family: Family, schedule: Schedule) -> float:
    """The mean raw stop, in samples, of a run whose noise-free curve crosses the target at ``crossing``.

    A crossing between two evals is detected late, by half an interval on average; noise sometimes makes it early. Both
    follow from ``P(not stopped by j) = prod_{i<=j} Phi((f_i + b - target) / noise_i)``. Infinite beyond ``FURTHEST``.
    """
    if not (0 < crossing < math.inf) or not schedule.interval_samples > 0:
        return math.inf if not crossing < math.inf else max(crossing, schedule.first_samples)
    stops: Array = schedule.first_samples + schedule.interval_samples * np.arange(FURTHEST, dtype=np.float64)
    if crossing > stops[-1]:
        return math.inf
    above = family.loss_at(stops) - float(family.loss_at(np.array([crossing]))[0])
    going_on = np.cumprod(_phi(above / family.noise_at(stops)))
    return float(stops[0] + schedule.interval_samples * going_on[:-1].sum())


def _student_nodes() -> Array:
    """Equally likely values of Student's t: the medians of ``NODES`` slices of equal probability."""
    from scipy.special import stdtrit

    return np.asarray(stdtrit(TAIL_DEGREES, (np.arange(NODES) + 0.5) / NODES), dtype=np.float64)


def _phi(z: Array) -> Array:
    from scipy.special import ndtr

    return np.asarray(ndtr(z), dtype=np.float64)


def chance_text(chance: float) -> str:
    """A probability with two digits, for people; no more precision than the model has."""
    return f"{100 * chance:.2g}%" if chance >= 1e-4 else "under 0.01%"
