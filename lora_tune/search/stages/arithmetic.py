"""Precision switches: whether the time they save per sample is lost in more samples to the target. Pure.

ln(samples to the target) of a whole run is the base's plus an effect of each changed switch. Most effects are
negligible, some are costs. So the posterior is a mixture over which switches are costly, Gaussian in each component,
and a costly run clears the other switches. The score normalises samples below the reference, so only samples above it
count, and no gain below the base's samples is credited. The next whole run is chosen by the knowledge gradient
(Frazier, Powell and Dayanik 2008, doi:10.1137/070693424). A switch is adopted only after two whole runs with it have
reached the target, since one may be lucky.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lora_tune.base.scatter import READING_SD
from lora_tune.search.grey_box.gaussian import positive_part

Array = npt.NDArray[np.float64]
Changes = frozenset[int]
"""Indices of the changed precision switches."""

LEVEL_SD = 0.05
"""Prior sd of the base's ln(samples) about its expected value (public submissions: 2.9%, plus a site's offset)."""
COSTLY = 0.25
"""Prior probability that a switch costs a relevant number of samples (assumption: most public configs cost none)."""
HARMLESS_SD = 0.015
"""Sd of a harmless switch's effect on ln(samples)."""
COSTS, COSTS_SD = 0.08, 0.05
"""Mean and sd of a costly switch's effect: a guess, well above the 2.9% by which public submissions differ."""
LEAST_WEIGHT = 0.01
"""Mixture components with less weight are dropped."""
MISSED = 0.1
"""Least distance in ln(samples) of the crossing beyond the end of a run that missed the target; also its sd."""
SURE = 0.9
"""Probability of a gain required to adopt a switch: at 0.8, two lucky runs of one that costs 5% were enough on 3 of 16
simulated sites."""
KEPT_AFTER = 2
"""Whole runs with a changed switch that must have reached the target before it is adopted."""
DRAWS = 128
OUTCOMES = 5
"""DRAWS: posterior samples per decision. OUTCOMES: quantiles of a run's result in the look-ahead."""
AHEAD = (1, 2, 4, 8)
"""Numbers of runs in the look-ahead, since one noisy run alone rarely changes a decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """A whole run at the base's hyperparameters. ln_samples: NaN while it runs. missed: it did not reach the target."""

    changes: Changes
    ln_samples: float = math.nan
    sd: float = 0.05
    missed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticChoice:
    """An option: its changed switches, and its ln(seconds) relative to the fastest one with the base's arithmetic, at
    equal samples."""

    changes: Changes
    ln_seconds: float


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """options: the first keeps the base's arithmetic. expected: prior mean of the base's ln(samples). reference: fewer
    samples count as this, in ln; -inf: no normalisation. run_sd: sd of one run's ln(samples)."""

    options: tuple[ArithmeticChoice, ...]
    runs: tuple[WholeRun, ...] = ()
    expected: float
    reference: float = -math.inf
    run_sd: float = READING_SD

    @cached_property
    def _switches(self) -> tuple[int, ...]:
        combinations = [*(o.changes for o in self.options), *(r.changes for r in self.runs)]
        return tuple(sorted(frozenset[int]().union(*combinations)))

    def _row(self, changes: Changes) -> Array:
        return np.array([1.0, *(float(at in changes) for at in self._switches)])

    @cached_property
    def _posterior(self) -> _Mixture:
        """Posterior of the base's ln(samples) and each switch's effect, from all ended runs."""
        mixture = _prior(self.expected, len(self._switches))
        for run in self.runs:
            if math.isfinite(run.ln_samples):
                late = MISSED if run.missed else 0.0
                mixture = _after(mixture, self._row(run.changes), run.ln_samples + late, math.hypot(run.sd, late))
        return mixture

    def above_reference(self) -> float:
        """Expected excess of the base's ln(samples) over the reference: the most that fewer samples can gain.

        Infinite without a reference.
        """
        if math.isinf(self.reference):
            return math.inf
        row = self._row(frozenset())
        mean, sd = _mean(self._posterior, row) - self.reference, _sd(self._posterior, row)
        return float(positive_part(np.array(mean), np.array(sd)))

    @cached_property
    def _reached(self) -> Counter[int]:
        """Number of runs with each switch that reached the target."""
        return Counter(at for r in self.runs if math.isfinite(r.ln_samples) and not r.missed for at in r.changes)

    def decided(self) -> ArithmeticChoice:
        """The option to recommend."""
        return self.options[self._decide(self._posterior, self._reached)[0]]

    def _decide(self, mixture: _Mixture, reached: Counter[int]) -> tuple[int, float]:
        """Index of the best permitted option, and its expected ln(score) relative to the first option's."""
        rows = np.array([self._row(o.changes) for o in self.options])
        saved = np.array([o.ln_seconds for o in self.options])
        normal = np.random.default_rng(0).normal(size=(DRAWS, rows.shape[1]))
        means, sure = np.zeros(len(rows)), np.zeros(len(rows))
        for part in mixture:
            draws = part.mean + normal @ np.linalg.cholesky(part.covariance + 1e-14 * np.eye(rows.shape[1])).T
            needed = draws @ rows.T  # fewer than the base's are luck, so no gain below them is credited
            score = np.maximum(np.maximum(needed, needed[:, :1]), self.reference) + saved
            apart = score - score[:, :1]
            means += part.weight * apart.mean(axis=0)
            sure += part.weight * (apart < 0).mean(axis=0)
        kept = [all(reached[at] >= KEPT_AFTER for at in o.changes) for o in self.options]
        allowed = [at for at, o in enumerate(self.options) if not o.changes or (kept[at] and sure[at] >= SURE)]
        best = min(allowed, key=lambda at: means[at])
        return best, float(means[best])

    def next_run(self) -> tuple[ArithmeticChoice, float]:
        """The option for the next run, and the expected decrease of ln(score) after it.

        Several runs of an option are valued together and credited per run, including running ones. Running ones count
        as if they reached the target with the expected result.
        """
        mixture, reached = self._posterior, self._reached
        for run in self.runs:
            if not math.isfinite(run.ln_samples):
                row = self._row(run.changes)
                mixture = _after(mixture, row, _mean(mixture, row), self.run_sd)
                reached = reached + Counter(run.changes)
        now = self._decide(mixture, reached)[1]
        under_way = Counter(r.changes for r in self.runs if not math.isfinite(r.ln_samples))
        gains = [
            max(self._gain(mixture, reached, option, now, runs) / runs for runs in AHEAD)
            / (1 + under_way[option.changes])
            for option in self.options
        ]
        best = int(np.argmax(gains))
        return self.options[best], gains[best]

    def _gain(self, mixture: _Mixture, reached: Counter[int], option: ArithmeticChoice, now: float, runs: int) -> float:
        row, noise = self._row(option.changes), self.run_sd / math.sqrt(runs)
        reached = reached + Counter(dict.fromkeys(option.changes, runs))
        after, weights = 0.0, 0.0
        for part in mixture:
            if part.weight < 5 * LEAST_WEIGHT:
                continue
            spread = math.sqrt(float(row @ part.covariance @ row) + noise**2)
            for outcome in _quantiles(OUTCOMES):
                then = _after(mixture, row, float(row @ part.mean) + spread * outcome, noise)
                after += part.weight / OUTCOMES * self._decide(then, reached)[1]
            weights += part.weight
        return now - after / weights


@dataclass(frozen=True, slots=True)
class _Part:
    """Mixture component for one set of costly switches: weight and Gaussian posterior."""

    weight: float
    mean: Array
    covariance: Array


_Mixture = tuple[_Part, ...]


def _prior(expected: float, switches: int) -> _Mixture:
    """One component for every set of costly switches."""
    parts = []
    for mask in range(2**switches):
        costly = [bool(mask >> at & 1) for at in range(switches)]
        weight = math.prod(COSTLY if d else 1 - COSTLY for d in costly)
        mean = np.array([expected, *(COSTS if d else 0.0 for d in costly)])
        sds = np.array([LEVEL_SD, *(COSTS_SD if d else HARMLESS_SD for d in costly)])
        parts.append(_Part(weight, mean, np.diag(sds**2)))
    return _kept(parts)


def _kept(parts: Sequence[_Part]) -> _Mixture:
    total = math.fsum(p.weight for p in parts)
    kept = [p for p in parts if p.weight >= LEAST_WEIGHT * total]
    rest = math.fsum(p.weight for p in kept)
    return tuple(_Part(p.weight / rest, p.mean, p.covariance) for p in kept)


def _after(mixture: _Mixture, row: Array, value: float, sd: float) -> _Mixture:
    """The mixture after one observation of ``row``."""
    parts = []
    for part in mixture:
        response = part.covariance @ row
        variance, off = float(row @ response) + sd**2, value - float(row @ part.mean)
        likelihood = math.exp(-0.5 * min(off * off / variance, 200.0)) / math.sqrt(variance)
        mean, covariance = (
            part.mean + response * (off / variance),
            part.covariance - np.outer(response, response) / variance,
        )
        parts.append(_Part(part.weight * likelihood, mean, covariance))
    return _kept(parts)


def _mean(mixture: _Mixture, row: Array) -> float:
    return math.fsum(p.weight * float(row @ p.mean) for p in mixture)


def _sd(mixture: _Mixture, row: Array) -> float:
    middle = _mean(mixture, row)
    spread = (p.weight * (float(row @ p.covariance @ row) + (float(row @ p.mean) - middle) ** 2) for p in mixture)
    return math.sqrt(math.fsum(spread))


def _quantiles(count: int) -> Sequence[float]:
    """Normal quantiles at the midpoints of ``count`` equal shares."""
    from scipy.special import ndtri

    return [float(ndtri((at + 0.5) / count)) for at in range(count)]
