"""Speed switches by short probes, several switches per probe: the next probe, and the effect of each switch. Pure.

A reading is ln(seconds of a run) at a setting of the switches, computed from a probe's samples/s and seconds per eval.
The model is linear with main effects and two-factor interactions and Gaussian priors (Bayesian D-optimal screening,
DuMouchel and Jones 1994, "A simple Bayesian modification of D-optimal designs", doi:10.1080/00401706.1994.10485399):

- at first each probe maximises the increase of the determinant of the information matrix (matrix determinant lemma:
  factor 1 + x' S x / sd^2), i.e. the predictive variance, times the probability that it runs;
- once every level has run, each probe maximises the expected improvement of the best measured setting, including noise
  (knowledge gradient, Frazier, Powell and Dayanik 2008, doi:10.1137/070693424).

Noise and sd of effects and interactions maximise the evidence; repeats of the base determine the noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lora_tune.base.scatter import SPEED_SD
from lora_tune.search.grey_box.gaussian import positive_part

Array = npt.NDArray[np.float64]
Setting = tuple[int, ...]
"""The level of each switch; 0 is the base's."""

EFFECTS = (0.01, 0.02, 0.04)
"""Sd of a switch's effect on ln(seconds): public sites with equal layouts differ by 13% in total."""
INTERACTIONS = (0.1, 0.3)
"""Sd of a two-switch interaction, relative to that of an effect."""
SCATTER = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
"""Noise sd of a reading; public runs: 0.14% of samples/s, 0.5% of evals."""
SCATTER_SD = 1.0
"""Prior sd of ln(noise) about ``SPEED_SD``."""
WHOLE_RUN = 0.02
"""Sd of the difference between a whole run and a probe at the same setting."""
LEVEL = 0.5
"""Prior sd of the base's ln(seconds) about the mean of the readings."""
DEAD = 0.04
"""Prior probability that a level does not run."""
STARTS = 6
"""Random starts of each local search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """name: of the variable. levels: its values, the base's first. precision: it changes arithmetic, too."""

    name: str
    levels: tuple[Any, ...]
    precision: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchReading:
    """One trial on the base's layout. ln_seconds: NaN while it runs. whole: a whole run, no probe. dead: it failed."""

    setting: Setting
    ln_seconds: float = math.nan
    whole: bool = False
    dead: bool = False


@dataclass(frozen=True, kw_only=True)
class _Scales:
    effect: float = EFFECTS[1]
    interaction: float = INTERACTIONS[1]
    scatter: float = SPEED_SD


@dataclass(frozen=True, kw_only=True)
class Screening:
    """Model of ``switches`` after ``readings``."""

    switches: tuple[Switch, ...]
    readings: tuple[SwitchReading, ...] = ()
    scales: _Scales = field(default_factory=_Scales)

    @property
    def base(self) -> Setting:
        """The base's setting."""
        return (0,) * len(self.switches)

    @cached_property
    def measured(self) -> tuple[SwitchReading, ...]:
        """The readings with a measured time."""
        return tuple(r for r in self.readings if not r.dead and math.isfinite(r.ln_seconds))

    @cached_property
    def levels(self) -> tuple[tuple[int, int], ...]:
        """Every level except the base's, as (switch, level)."""
        return tuple((at, level) for at, s in enumerate(self.switches) for level in range(1, len(s.levels)))

    # -- which levels run

    @cached_property
    def dead(self) -> frozenset[tuple[int, int]]:
        """Levels that do not run: those that are the only possible cause of a failure."""
        known: set[tuple[int, int]] = set()
        while new := {next(iter(s)) for s in self._suspects(known) if len(s) == 1} - known:
            known |= new
        return frozenset(known)

    def _suspects(self, known: Iterable[tuple[int, int]] = ()) -> list[set[tuple[int, int]]]:
        """For each failure that ``known`` levels do not explain: its levels that have never run.

        Omits failures of the base itself, which no switch causes, and those whose levels have all run elsewhere: there
        two levels are incompatible, and only that setting is excluded.
        """
        ran = {pair for r in self.measured for pair in _changes(r.setting)}
        deaths = [set(_changes(r.setting)) for r in self.readings if r.dead and r.setting != self.base]
        return [s for d in deaths if not d & set(known) and (s := d - ran)]

    @cached_property
    def _deadly(self) -> dict[tuple[int, int], float]:
        """Probability that a level does not run."""
        ran = {pair for r in self.measured for pair in _changes(r.setting)}
        chance = {pair: 0.0 if pair in ran else DEAD for pair in self.levels}
        for suspects in self._suspects(self.dead):
            for pair in suspects:
                chance[pair] = max(chance[pair], 1 / len(suspects))
        return chance | dict.fromkeys(self.dead, 1.0)

    def lives(self, setting: Setting) -> float:
        """Probability that a setting runs."""
        changed = set(_changes(setting))
        if any(r.dead and r.setting != self.base and set(_changes(r.setting)) <= changed for r in self.readings):
            return 0.0
        return math.prod(1 - self._deadly[pair] for pair in _changes(setting))

    # -- how fast a setting is

    @cached_property
    def _pairs(self) -> tuple[tuple[int, int], ...]:
        """Pairs of positions in ``levels`` that can be combined."""
        known = enumerate(self.levels)
        return tuple((i, j) for (i, a), (j, b) in itertools.combinations(known, 2) if a[0] != b[0])

    def _features(self, settings: Sequence[Setting], whole: Sequence[bool] = ()) -> Array:
        """Design matrix: intercept, whole run, a column for each level, a column for each pair."""
        at = np.array(settings, dtype=int).reshape(len(settings), len(self.switches))
        main = np.column_stack([at[:, s] == level for s, level in self.levels]).astype(float)
        first, second = np.array(self._pairs, dtype=int).reshape(-1, 2).T
        run = np.array(whole or [False] * len(settings), dtype=float)[:, None]
        return np.hstack([np.ones((len(settings), 1)), run, main, main[:, first] * main[:, second]])

    def _prior(self, scales: _Scales) -> Array:
        """Prior variances of the coefficients."""
        effect = scales.effect
        pairs = [effect * scales.interaction] * len(self._pairs)
        return np.square([LEVEL, WHOLE_RUN, *[effect] * len(self.levels), *pairs])

    def fitted(self) -> Screening:
        """A copy with the scales of the highest evidence."""
        if len(self.measured) < 3:
            return self
        grid = itertools.product(EFFECTS, INTERACTIONS, SCATTER)
        scales = [_Scales(effect=e, interaction=i, scatter=s) for e, i, s in grid]
        return replace(self, scales=max(scales, key=self._evidence))

    def _evidence(self, scales: _Scales) -> float:
        x, y = self._data
        covariance = (x * self._prior(scales)) @ x.T + scales.scatter**2 * np.eye(len(y))
        factor = np.linalg.cholesky(covariance)
        z = np.linalg.solve(factor, y)
        off = math.log(scales.scatter / SPEED_SD) / SCATTER_SD
        return float(-0.5 * z @ z - np.log(np.diag(factor)).sum() - 0.5 * off**2)

    @cached_property
    def _data(self) -> tuple[Array, Array]:
        known = self.measured
        x = self._features([r.setting for r in known], [r.whole for r in known])
        y = np.array([r.ln_seconds for r in known])
        return x, y - self.level

    @cached_property
    def level(self) -> float:
        """Mean of the readings' ln(seconds), the model's centre; 0 without any."""
        return float(np.mean([r.ln_seconds for r in self.measured])) if self.measured else 0.0

    @cached_property
    def _posterior(self) -> tuple[Array, Array]:
        """Posterior mean and covariance of the coefficients."""
        return self._learned(*self._data)

    def _learned(self, x: Array, y: Array, scales: _Scales | None = None) -> tuple[Array, Array]:
        known = scales or self.scales
        prior = self._prior(known)
        gain = (prior[:, None] * x.T) @ np.linalg.inv((x * prior) @ x.T + known.scatter**2 * np.eye(len(y)))
        return gain @ y, np.diag(prior) - gain @ (x * prior)

    @cached_property
    def _once_read(self) -> Array:
        """Posterior covariance of the coefficients once running trials have ended."""
        known = [r for r in self.readings if not r.dead]
        x = self._features([r.setting for r in known], [r.whole for r in known])
        return self._learned(x, np.zeros(len(known)))[1]

    @cached_property
    def _planned(self) -> Array:
        """Posterior covariance of the main effects once running trials have ended; independent of the readings' values.

        Interactions count as noise here. There are so many that any setting is informative about new ones, so that a
        level that may not run would never be tried.
        """
        known = [r for r in self.readings if not r.dead]
        no_interaction = replace(self.scales, interaction=0.0, scatter=self._blur)
        x = self._features([r.setting for r in known], [r.whole for r in known])
        return self._learned(x, np.zeros(len(known)), no_interaction)[1]

    @property
    def _blur(self) -> float:
        """Sd of a reading about the main effects: noise and an interaction."""
        return math.hypot(self.scales.scatter, self.scales.effect * self.scales.interaction)

    def predict(self, settings: Sequence[Setting]) -> tuple[Array, Array]:
        """Mean ln(seconds) of a probe of each setting, and the covariance of these means."""
        mean, covariance = self._posterior
        x = self._features(settings)
        return self.level + x @ mean, x @ covariance @ x.T

    def compared(self, setting: Setting, other: Setting) -> tuple[float, float]:
        """Mean and sd of the difference in ln(seconds) between a setting and another."""
        mean, covariance = self.predict([setting, other])
        variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
        return float(mean[0] - mean[1]), math.sqrt(max(0.0, float(variance)))

    def leader(self, *, precise: bool = False) -> Setting:
        """The measured setting with the lowest posterior mean. precise: only among those with the base's arithmetic."""
        known = {self.base, *(r.setting for r in self.measured)}
        kept = sorted(s for s in known if not (precise and self.precision_of(s)) and self.lives(s) > 0)
        mean, _ = self.predict(kept)
        return kept[int(np.argmin(mean))]

    def precision_of(self, setting: Setting) -> frozenset[int]:
        """The precision switches that differ from the base in a setting."""
        return frozenset(at for at, level in _changes(setting) if self.switches[at].precision)

    # -- the next probe

    @property
    def probes_needed(self) -> int:
        """Readings needed to observe every effect once: one more than the number of levels that may run."""
        return 1 + len(self.levels) - len(self.dead)

    @property
    def screened(self) -> bool:
        """Whether there are as many readings, including running ones, with every level that may run."""
        known = [r for r in self.readings if not r.dead]
        open_or_run = {pair for r in known for pair in _changes(r.setting)}
        left = {pair for pair in self.levels if self._deadly[pair] < 1} - open_or_run
        return not left and len(known) >= self.probes_needed

    def most_informative(self, rng: np.random.Generator) -> Setting:
        """The setting with the highest information gain times probability to run."""
        planned, noise = self._planned, self._blur**2

        def gain_of(settings: Sequence[Setting]) -> Array:
            x = self._features(settings)
            gained = np.log1p(np.einsum("ij,jk,ik->i", x, planned, x) / noise)
            return np.asarray(gained * np.array([self.lives(s) for s in settings]))

        return self._climb(gain_of, rng)[0]

    def most_promising(self, rng: np.random.Generator, *, precise: bool = False) -> tuple[Setting, float]:
        """The setting with the highest expected improvement of the best measured one, and that improvement in
        ln(seconds).

        precise: only among settings with the base's arithmetic.
        """
        best = self._features([self.leader(precise=precise)])[0]
        mean, covariance = self._posterior[0], self._once_read
        noise = self.scales.scatter**2
        tried = {r.setting for r in self.readings if not r.dead}

        def gain_of(settings: Sequence[Setting]) -> Array:
            x = self._features(settings)
            apart = x - best
            gain, moved_rows = -apart @ mean, x @ covariance
            moved = np.einsum("ij,ij->i", moved_rows, apart) / np.sqrt(np.einsum("ij,ij->i", moved_rows, x) + noise)
            improvement = positive_part(gain, np.abs(moved))
            allowed = [0.0 if s in tried or (precise and self.precision_of(s)) else self.lives(s) for s in settings]
            return np.asarray(improvement * np.array(allowed))

        return self._climb(gain_of, rng, self.leader(precise=precise))

    def _climb(
        self, gain_of: Callable[[Sequence[Setting]], Array], rng: np.random.Generator, *starts: Setting
    ) -> tuple[Setting, float]:
        """Maximise ``gain_of`` by coordinate ascent over switches from several starts; returns the setting and its
        value."""
        counts = [len(s.levels) for s in self.switches]
        drawn = [tuple(int(rng.integers(n)) for n in counts) for _ in range(STARTS)]
        best, height = self.base, -math.inf
        for start in (*starts, *drawn):
            current, high = start, float(gain_of([start])[0])
            while True:
                neighbours = [self._with(current, at, level) for at, n in enumerate(counts) for level in range(n)]
                values = gain_of(neighbours)
                if values[top := int(np.argmax(values))] <= high:
                    break
                current, high = neighbours[top], float(values[top])
            if high > height:
                best, height = current, high
        return best, height

    @staticmethod
    def _with(setting: Setting, at: int, level: int) -> Setting:
        return (*setting[:at], level, *setting[at + 1 :])


def _changes(setting: Setting) -> list[tuple[int, int]]:
    """The levels in which a setting differs from the base."""
    return [(at, level) for at, level in enumerate(setting) if level]
