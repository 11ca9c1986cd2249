"""Switches that change arithmetic: whether what they save in seconds a sample is lost in samples to the target. Pure.

ln(samples to the target) of a whole run is the base's plus what each changed arithmetic adds. Most add nothing worth
speaking of, some cost: a belief is a mixture over which do, normal in each part, so that one dear run clears others.
Samples below the reference are taken back by the score, so only those above it count, and none that are fewer than the
base's. The next whole run is the one that improves what would be decided after it most, the knowledge gradient
(Frazier, Powell and Dayanik 2008, doi:10.1137/070693424). Nothing is decided for an arithmetic that fewer than two
whole runs have brought to the target: one may be lucky.
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
"""The switches that change arithmetic, by number."""

LEVEL_SD = 0.05
"""Sd of the base's ln(samples) around what is expected of it (public submissions: 2.9%, and a site's own)."""
COSTLY = 0.25
"""Chance that another arithmetic costs samples worth speaking of (assumption: most of the public configs cost none)."""
HARMLESS_SD = 0.015
"""Sd of what an arithmetic adds to ln(samples) that costs nothing worth speaking of."""
COSTS, COSTS_SD = 0.08, 0.05
"""What another adds, and its sd: a guess, well above the 2.9% by which public submissions differ."""
LEAST_WEIGHT = 0.01
"""Weight below which a hypothesis of which arithmetics are dear is dropped."""
MISSED = 0.1
"""What a run that did not reach the target lacked, in ln(samples) beyond its end, at least; also its sd."""
SURE = 0.9
"""Chance that another arithmetic pays, from which on it is kept: at 0.8 two lucky runs of one that costs 5% were
enough on 3 of 16 simulated sites."""
KEPT_AFTER = 2
"""Whole runs that must have reached the target with a changed arithmetic before it is kept."""
DRAWS = 128
OUTCOMES = 5
"""Draws of a belief, and outcomes of a run that are looked ahead to."""
AHEAD = (1, 2, 4, 8)
"""Runs that are looked ahead to at once: one noisy run alone seldom changes a decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """A whole run at the base's hyperparameters. ln_samples: NaN while it is open. missed: it did not reach the
    target."""

    changes: Changes
    ln_samples: float = math.nan
    sd: float = 0.05
    missed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticChoice:
    """What may be decided for: its changed arithmetic, and its ln(seconds) less the base arithmetic's best, for equal
    samples."""

    changes: Changes
    ln_seconds: float


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """options: the first keeps the base's arithmetic. expected: ln(samples) of the base. reference: samples below it
    count as it, in ln; -inf: none are taken back. run_sd: of one run's ln(samples)."""

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
        """The base's ln(samples) and what each switch adds, after all runs that have ended."""
        mixture = _prior(self.expected, len(self._switches))
        for run in self.runs:
            if math.isfinite(run.ln_samples):
                late = MISSED if run.missed else 0.0
                mixture = _after(mixture, self._row(run.changes), run.ln_samples + late, math.hypot(run.sd, late))
        return mixture

    def above_reference(self) -> float:
        """The expected ln(samples) of the base above the reference, which is all that fewer samples can win.

        Infinite without a reference: then every sample counts.
        """
        if math.isinf(self.reference):
            return math.inf
        row = self._row(frozenset())
        mean, sd = _mean(self._posterior, row) - self.reference, _sd(self._posterior, row)
        return float(positive_part(np.array(mean), np.array(sd)))

    @cached_property
    def _reached(self) -> Counter[int]:
        """With how many runs each switch has reached the target."""
        return Counter(at for r in self.runs if math.isfinite(r.ln_samples) and not r.missed for at in r.changes)

    def decided(self) -> ArithmeticChoice:
        """The option to hand over."""
        return self.options[self._decide(self._posterior, self._reached)[0]]

    def _decide(self, mixture: _Mixture, reached: Counter[int]) -> tuple[int, float]:
        """The number of the best option that may be handed over, and its expected ln(score) less the first's."""
        rows = np.array([self._row(o.changes) for o in self.options])
        saved = np.array([o.ln_seconds for o in self.options])
        normal = np.random.default_rng(0).normal(size=(DRAWS, rows.shape[1]))
        means, sure = np.zeros(len(rows)), np.zeros(len(rows))
        for part in mixture:
            draws = part.mean + normal @ np.linalg.cholesky(part.covariance + 1e-14 * np.eye(rows.shape[1])).T
            needed = draws @ rows.T  # fewer than the base's are luck: no arithmetic is taken for what it saves there
            score = np.maximum(np.maximum(needed, needed[:, :1]), self.reference) + saved
            apart = score - score[:, :1]
            means += part.weight * apart.mean(axis=0)
            sure += part.weight * (apart < 0).mean(axis=0)
        kept = [all(reached[at] >= KEPT_AFTER for at in o.changes) for o in self.options]
        allowed = [at for at, o in enumerate(self.options) if not o.changes or (kept[at] and sure[at] >= SURE)]
        best = min(allowed, key=lambda at: means[at])
        return best, float(means[best])

    def next_run(self) -> tuple[ArithmeticChoice, float]:
        """The option of which one more run is worth most, and how much, in ln(score) of what is then decided.

        Several runs of an option are valued at once and credited by the run, those under way among them. Open runs
        count as if they would reach the target as expected.
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
    """What is believed if some arithmetics are dear and the others harmless: its weight, and a normal belief."""

    weight: float
    mean: Array
    covariance: Array


_Mixture = tuple[_Part, ...]


def _prior(expected: float, switches: int) -> _Mixture:
    """One part for every set of dear arithmetics."""
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
    """A belief after one reading of ``row``."""
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
    """Normal quantiles in the middle of ``count`` equal shares."""
    from scipy.special import ndtri

    return [float(ndtri((at + 0.5) / count)) for at in range(count)]
